// The optimizer pass over part of a task, for one formula, format and pair of dtypes: gradient in; weight, residual and
// moments in and out. From load to store, values stay in registers.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "formulas.h"
#include "lanes.h"
#include "moments.h"

namespace tiermem {
namespace TM_LEVEL {

// The loop goes row by row and asks for a row far ahead: the hardware alone follows ten streams less well. It asks for
// one stream after the other, a row of it at a time, which gained more than the same lines in any other order, and for
// the second-level cache: to bring them into the first occupies the few buffers that loads need, too. Without it the
// pass took 1.3 times as long with AVX2. Addresses past the end do no harm: a prefetch never faults.
constexpr int64_t row_groups = TM_VECTOR_BYTES == 16 ? 1 : 64 / group_numel;
constexpr int64_t row_numel = row_groups * group_numel;
constexpr int64_t prefetch_numel = 1280;

template <class Value>
TM_INLINE void prefetch_row(Value* row) {
    constexpr int64_t line_numel = 64 / sizeof(Value);
    for (int64_t i = 0; i < row_numel; i += line_numel) {
        __builtin_prefetch(row + prefetch_numel + i, !std::is_const_v<Value>, 2);
    }
}

TM_INLINE void load_group(const uint16_t* from, Floats (&values)[registers]) {
    interleave(Halves{}, load<Halves>(from), values);
}
TM_INLINE void load_group(const float* from, Floats (&values)[registers]) {
    for (int r = 0; r < registers; ++r) values[r] = load<Floats>(from + r * register_numel);
}

// How masters lie in memory: in two halves (numbers.h says how), or as plain fp32.
class SplitMaster {
public:
    TM_INLINE explicit SplitMaster(const UpdateTask& task)
        : weight_(static_cast<uint16_t*>(task.weight)), residual_(task.residual) {}

    TM_INLINE void load_group(int64_t i, Floats (&values)[registers]) const {
        const Halves low = load<Halves>(residual_ + i);
        interleave(low, load<Halves>(weight_ + i) - (low >> 15), values);
    }
    TM_INLINE void store_group(int64_t i, const Floats (&values)[registers]) const {
        Bits bits[registers];
        for (int r = 0; r < registers; ++r) bits[r] = cast<Bits>(values[r]);
        const Halves low = low_halves(bits);
        store(residual_ + i, low);
        store(weight_ + i, high_halves(bits) + (low >> 15));
    }
    TM_INLINE void move(int64_t numel) {
        weight_ += numel;
        residual_ += numel;
    }
    template <class Body>
    TM_INLINE void for_each_stream(Body body) {
        body(weight_);
        body(residual_);
    }

private:
    uint16_t* weight_;
    uint16_t* residual_;
};

class PlainMaster {
public:
    TM_INLINE explicit PlainMaster(const UpdateTask& task) : weight_(static_cast<float*>(task.weight)) {}

    TM_INLINE void load_group(int64_t i, Floats (&values)[registers]) const {
        TM_LEVEL::load_group(weight_ + i, values);
    }
    TM_INLINE void store_group(int64_t i, const Floats (&values)[registers]) const {
        for (int r = 0; r < registers; ++r) store(weight_ + i + r * register_numel, values[r]);
    }
    TM_INLINE void move(int64_t numel) { weight_ += numel; }
    template <class Body>
    TM_INLINE void for_each_stream(Body body) {
        body(weight_);
    }

private:
    float* weight_;
};

template <class Step, class Master, class Grad, class Moments>
class Pass {
    using State = typename Moments::State;

    // What the pass goes along, all by one index.
    struct Streams {
        Master master;
        const Grad* grad;
        float grad_scale;
        Moments moments;

        TM_INLINE void move(int64_t numel) {
            master.move(numel);
            grad += numel;
            moments.move(numel);
        }
        template <class Body>
        TM_INLINE void for_each(Body body) {
            master.for_each_stream(body);
            body(grad);
            moments.for_each_stream(body);
        }
    };

    // A group between the two halves of the formula.
    struct Begun {
        Floats p[registers];
        Quotient left[registers];

        // Written out: the compiler copies a struct that is as large through memory.
        TM_INLINE void operator=(const Begun& other) {
            for (int r = 0; r < registers; ++r) {
                p[r] = other.p[r];
                left[r].dividend = other.left[r].dividend;
                left[r].divisor = other.left[r].divisor;
            }
        }
    };

public:
    static TM_INLINE void run(const UpdateTask& task, int64_t begin, int64_t numel) {
        typename Moments::Room room;
        Streams at{Master(task), static_cast<const Grad*>(task.grad), task.grad_scale, Moments(task, room)};
        at.move(begin);
        run(Step(task), at, numel);
    }

private:
    static TM_INLINE void run(const Step& step, const Streams& at, int64_t numel) {
        State state;
        Begun group{};
        int64_t i = 0;
        for (; i + row_numel <= numel; i += row_numel) {
            row(step, at, i, group, state, std::make_integer_sequence<int64_t, row_groups>());
        }
        if (i > 0) end(step, at, i - group_numel, group);
        for (; i < numel; i += group_numel) {
            state = part_of_row(step, at, i, std::min(group_numel, numel - i), state);
        }
        Moments(at.moments).end(numel, state);
    }

    template <int64_t... turns>
    static TM_INLINE void row(const Step& step, const Streams& at, int64_t i, Begun& group, State& state,
                              std::integer_sequence<int64_t, turns...>) {
        (advance<turns>(step, at, i + turns * group_numel, group, state), ...);
    }

    // Begins group i and ends the one before.
    template <int64_t turn>
    static TM_INLINE void advance(const Step& step, const Streams& at, int64_t i, Begun& group, State& state) {
        prefetch<turn>(at, i - turn * group_numel);
        Begun next;
        begin(step, at, i, next, state);
        if (turn > 0 || i > 0) end(step, at, i - group_numel, group);
        at.moments.after_group(i, state);
        group = next;
    }

    // Streams take turns over the groups of a row.
    template <int64_t turn>
    static TM_INLINE void prefetch(Streams at, int64_t row) {
        int64_t stream = 0;
        at.for_each([&](auto* values) __attribute__((always_inline)) {
            if (stream++ % row_groups == turn) prefetch_row(values + row);
        });
    }

    static TM_INLINE void begin(const Step& step, const Streams& at, int64_t i, Begun& group, State& state) {
        Floats g[registers];
        Values m{};
        at.master.load_group(i, group.p);
        load_group(at.grad + i, g);
        at.moments.load_group(i, m);
        for (int r = 0; r < registers; ++r) {
            group.left[r] = step.begin(group.p[r], g[r] * at.grad_scale, m[0][r], m[1][r], m[2][r]);
        }
        at.moments.store_group(i, m, state);
    }

    static TM_INLINE void end(const Step& step, const Streams& at, int64_t i, Begun& group) {
        for (int r = 0; r < registers; ++r) step.end(group.p[r], group.left[r]);
        keep_one_nan(group.p);
        at.master.store_group(i, group.p);
    }

    // What is less than a row, a group at a time, on copies that end in zeros. A zero's moments are no larger than any
    // other element's: the scale of its block does not depend on it.
    static __attribute__((noinline)) State part_of_row(Step step, Streams at, int64_t i, int64_t numel, State state) {
        constexpr int streams_max = 3 + moments_max;
        alignas(64) unsigned char values[streams_max][group_numel * sizeof(float)] = {};
        Streams group_at = at;
        group_at.move(i);
        Streams copies = group_at;
        int n = 0;
        copies.for_each([&](auto*& stream) {
            void* copy = std::memcpy(values[n++], stream, size_t(numel) * sizeof *stream);
            stream = static_cast<std::remove_reference_t<decltype(stream)>>(copy);
        });
        Begun group;
        begin(step, copies, 0, group, state);
        end(step, copies, 0, group);
        n = 0;
        group_at.for_each([&](auto* stream) {
            using Value = std::remove_pointer_t<decltype(stream)>;
            if constexpr (!std::is_const_v<Value>) std::memcpy(stream, values[n], size_t(numel) * sizeof *stream);
            ++n;
        });
        if (numel == group_numel) at.moments.after_group(i, state);
        return state;
    }
};

}  // namespace TM_LEVEL
}  // namespace tiermem
