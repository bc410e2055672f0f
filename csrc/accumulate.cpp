// Sums of gradients over micro-batches, and sums of squares of the result in an order that nothing changes.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "abi.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

// A row is read twice, the second time from the first-level cache: long enough that its loops run at full speed, short
// enough that memory does not wait for the second. Two or three streams the hardware prefetches better than we do.
constexpr int64_t row_numel = 256;

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

struct Nothing {};

// The loop over one piece. Values are written to `target` or, where it is null, to nowhere.
template <class Source, class Previous>
struct PieceLoop {
    using Function = double (*)(const Source*, const Previous*, float, float*, int64_t, bool);

    static TM_INLINE double run(const Source* source, const Previous* previous, float scale, float* target,
                                int64_t numel, bool measure) {
        SumOfSquares squares;
        float scratch[row_numel];
        for (int64_t row = 0; row < numel; row += row_numel) {
            const int64_t row_size = std::min(row_numel, numel - row);
            float* values = target ? target + row : scratch;
            TM_INDEPENDENT  // also where target is previous
            for (int64_t i = 0; i < row_size; ++i) {
                if constexpr (std::is_same_v<Previous, Nothing>) {
                    values[i] = widen(source[row + i]);
                } else {
                    values[i] = one_nan(widen(previous[row + i]) * scale + widen(source[row + i]));
                }
            }
            if (measure) squares.add(values, row_size);
        }
        return squares.total();
    }
};

struct Accumulate {
    using Task = AccumulateTask;

    static constexpr int64_t unit_pieces = 8;

    static int64_t pieces(const AccumulateTask& task) {
        if (task.numel == 0) return 0;
        return 1 + std::max<int64_t>(0, (task.numel - task.first_piece + piece_numel - 1) / piece_numel);
    }

    static int64_t units(const AccumulateTask& task) { return (pieces(task) + unit_pieces - 1) / unit_pieces; }

    static void run(int32_t isa, const AccumulateTask& task, int64_t unit) {
        const int64_t last = std::min((unit + 1) * unit_pieces, pieces(task));
        for (int64_t piece = unit * unit_pieces; piece < last; ++piece) {
            const int64_t begin = piece == 0 ? 0 : task.first_piece + (piece - 1) * piece_numel;
            const int64_t end = std::min(task.first_piece + piece * piece_numel, task.numel);
            const double sum = task.source_dtype == BF16 ? with_source<uint16_t>(isa, task, begin, end - begin)
                                                         : with_source<float>(isa, task, begin, end - begin);
            if (task.partials) task.partials[piece] = sum;
        }
    }

    template <class Source>
    static double with_source(int32_t isa, const AccumulateTask& task, int64_t begin, int64_t numel) {
        if (!task.previous) return with_previous<Source, Nothing>(isa, task, begin, numel);
        if (task.previous_dtype == BF16) return with_previous<Source, uint16_t>(isa, task, begin, numel);
        return with_previous<Source, float>(isa, task, begin, numel);
    }

    template <class Source, class Previous>
    static double with_previous(int32_t isa, const AccumulateTask& task, int64_t begin, int64_t numel) {
        const Source* source = static_cast<const Source*>(task.source) + begin;
        const Previous* previous = static_cast<const Previous*>(task.previous) + (task.previous ? begin : 0);
        float* target = nullptr;
        if (task.target && task.target_dtype == F32) {
            target = static_cast<float*>(task.target) + begin;
        } else if (task.target) {
            std::memcpy(static_cast<uint16_t*>(task.target) + begin, source, size_t(numel) * sizeof(uint16_t));
            if (!task.partials) return 0.0;
        }
        return select<PieceLoop<Source, Previous>>(isa)(source, previous, task.previous_scale, target, numel,
                                                        task.partials != nullptr);
    }
};

}  // namespace

TM_EXPORT void tm_accumulate(int32_t isa, const AccumulateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Accumulate>(isa, tasks, count, threads);
}

}  // namespace tiermem
