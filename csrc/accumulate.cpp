// Sums of gradients over micro-batches, and sums of squares of the result in an order that nothing changes.

#include <algorithm>
#include <cstring>

#include "abi.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

// A row is read twice, the second time from the first-level cache: long enough that its loops run at full speed, short
// enough that memory does not wait for the second. Two or three streams the hardware prefetches better than we do.
constexpr int64_t row_numel = 256;

// One row, whose values lie in `target` afterwards. `target` may be `previous`.
template <class Source>
TM_INLINE void convert(const Source* source, float* target, int64_t numel) {
    TM_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) target[i] = widen(source[i]);
}

template <class Source, class Previous>
TM_INLINE void add(const Source* source, const Previous* previous, float scale, float* target, int64_t numel) {
    TM_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) target[i] = one_nan(widen(previous[i]) * scale + widen(source[i]));
}

// The squares of a row. Products of two fp32 values are exact in float64, so only the order of the additions counts:
// element i of a piece goes to lane i % lanes, and lanes are added from the first to the last.
class SumOfSquares {
public:
    TM_INLINE void add(const float* values, int64_t numel) {
        int64_t i = 0;
        for (; i + lanes <= numel; i += lanes) {
            for (int lane = 0; lane < lanes; ++lane) sums_[lane] += double(values[i + lane]) * double(values[i + lane]);
        }
        for (int lane = 0; i < numel; ++i, ++lane) sums_[lane] += double(values[i]) * double(values[i]);
    }

    TM_INLINE double total() const {
        double sum = 0.0;
        for (int lane = 0; lane < lanes; ++lane) sum += sums_[lane];
        return sum == sum ? sum : __builtin_nan("");
    }

private:
    double sums_[lanes] = {};
};

static_assert(row_numel % lanes == 0 && piece_numel % row_numel == 0, "rows of a piece start at lane 0");

struct Accumulate {
    using Task = AccumulateTask;
    using Function = void (*)(const AccumulateTask&, int64_t);

    static constexpr int64_t unit_pieces = 8;

    static int64_t pieces(const AccumulateTask& task) {
        if (task.numel == 0) return 0;
        return 1 + std::max<int64_t>(0, (task.numel - task.first_piece + piece_numel - 1) / piece_numel);
    }

    static int64_t units(const AccumulateTask& task) { return (pieces(task) + unit_pieces - 1) / unit_pieces; }

    static TM_INLINE void run(const AccumulateTask& task, int64_t unit) {
        const int64_t last = std::min((unit + 1) * unit_pieces, pieces(task));
        for (int64_t piece = unit * unit_pieces; piece < last; ++piece) {
            const int64_t begin = piece == 0 ? 0 : task.first_piece + (piece - 1) * piece_numel;
            const int64_t end = std::min(task.first_piece + piece * piece_numel, task.numel);
            run_piece(task, piece, begin, end - begin);
        }
    }

    static TM_INLINE void run_piece(const AccumulateTask& task, int64_t piece, int64_t begin, int64_t numel) {
        if (task.source_dtype == BF16) {
            run_source(task, static_cast<const uint16_t*>(task.source) + begin, piece, begin, numel);
        } else {
            run_source(task, static_cast<const float*>(task.source) + begin, piece, begin, numel);
        }
    }

    template <class Source>
    static TM_INLINE void run_source(const AccumulateTask& task, const Source* source, int64_t piece, int64_t begin,
                                     int64_t numel) {
        if (task.target && task.target_dtype == BF16) {
            std::memcpy(static_cast<uint16_t*>(task.target) + begin, source, size_t(numel) * sizeof(uint16_t));
            if (!task.partials) return;
        }
        SumOfSquares squares;
        float scratch[row_numel];
        float* values = scratch;
        for (int64_t row = 0; row < numel; row += row_numel) {
            const int64_t row_size = std::min(row_numel, numel - row);
            if (task.target && task.target_dtype == F32) values = static_cast<float*>(task.target) + begin + row;
            if (!task.previous) {
                convert(source + row, values, row_size);
            } else if (task.previous_dtype == BF16) {
                const uint16_t* previous = static_cast<const uint16_t*>(task.previous) + begin + row;
                add(source + row, previous, task.previous_scale, values, row_size);
            } else {
                const float* previous = static_cast<const float*>(task.previous) + begin + row;
                add(source + row, previous, task.previous_scale, values, row_size);
            }
            if (task.partials) squares.add(values, row_size);
        }
        if (task.partials) task.partials[piece] = squares.total();
    }
};

}  // namespace

TM_EXPORT void tm_accumulate(int32_t isa, const AccumulateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Accumulate>(isa, tasks, count, threads);
}

}  // namespace tiermem
