// The fused optimizer pass: gradient in; weight, residual and both moments in and out.
//
// A formula is a struct made from a task's scalars; its call operator is the whole arithmetic of one element. A NaN in
// a moment must reach the parameter, where the loop around it, the same for all, looks for NaNs.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "abi.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

// Kingma and Ba, "Adam", and Loshchilov and Hutter, "Decoupled weight decay regularization", with the operations and
// roundings of torch.optim.Adam(fused=True) and AdamW(fused=True): the same bits. (The last numel % 16 elements of a tensor
// torch leaves to a scalar loop that adds up the second moment with another rounding; here there is one formula.)
//
// `l2`: weight decay is added to the gradient (Adam), else taken off the parameter (AdamW). `from_grad`: the mean is
// computed from its new end, as torch.lerp does for beta1 <= 0.5, so that beta1 = 0 gives the gradient itself.
template <bool l2, bool from_grad>
struct Adam {
    explicit Adam(const UpdateTask& task)
        : decay(task.formula == ADAM ? 1.0f : task.decay),
          weight_decay(task.weight_decay),
          towards_grad(from_grad ? task.one_minus_beta1 - 1.0f : task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size),
          bias_correction2_sqrt(task.bias_correction2_sqrt),
          eps(task.eps) {}

    TM_INLINE void operator()(float& p, float g, float& m, float& v) const {
        if constexpr (l2) {
            g = multiply_add(weight_decay, p, g);
        } else {
            p *= decay;
        }
        m = multiply_add(towards_grad, g - m, from_grad ? g : m);
        v = multiply_add(one_minus_beta2 * g, g, v * beta2);
        p -= step_size * m / (std::sqrt(v) / bias_correction2_sqrt + eps);
    }

    float decay, weight_decay, towards_grad, beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
};

// The loop goes row by row and asks for rows to come: the hardware alone follows ten streams less well. At 512 elements
// ahead that gained 12 % with AVX2 and 4 % with AVX-512; 256 ahead gained less, longer rows lose it again. Addresses past the
// end do no harm: a prefetch never faults.
constexpr int64_t row_numel = 64;
constexpr int64_t prefetch_numel = 512;

template <class Value>
TM_INLINE void prefetch_row(Value* row) {
    constexpr int64_t line_numel = 64 / sizeof(Value);
    for (int64_t i = 0; i < row_numel; i += line_numel) {
        __builtin_prefetch(row + prefetch_numel + i, !std::is_const_v<Value>);
    }
}

// How masters lie in memory: in two halves, or as plain fp32.
struct SplitMaster {
    using Weight = uint16_t;
    uint16_t* weight;
    uint16_t* residual;

    TM_INLINE void prefetch(int64_t row) const {
        prefetch_row(weight + row);
        prefetch_row(residual + row);
    }
    TM_INLINE float load(int64_t i) const { return join(weight[i], residual[i]); }
    TM_INLINE void store(int64_t i, float value) const { split(value, weight[i], residual[i]); }
};

struct PlainMaster {
    using Weight = float;
    float* weight;
    uint16_t* residual;  // there is none

    TM_INLINE void prefetch(int64_t row) const { prefetch_row(weight + row); }
    TM_INLINE float load(int64_t i) const { return weight[i]; }
    TM_INLINE void store(int64_t i, float value) const { weight[i] = value; }
};

template <class Step, class Master, class Grad>
struct UpdateLoop {
    using Weight = typename Master::Weight;
    using Function = void (*)(Step, float, Weight*, uint16_t*, float*, float*, const Grad*, int64_t);

    static TM_INLINE void run(const Step step, float grad_scale, Weight* __restrict weight,
                              uint16_t* __restrict residual, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                              const Grad* __restrict grad, int64_t numel) {
        const Master master{weight, residual};
        uint32_t nans = 0;
        for (int64_t row = 0; row < numel; row += row_numel) {
            master.prefetch(row);
            prefetch_row(exp_avg + row);
            prefetch_row(exp_avg_sq + row);
            prefetch_row(grad + row);
            const int64_t end = std::min(row + row_numel, numel);
            for (int64_t i = row; i < end; ++i) {
                float p = master.load(i);
                float m = exp_avg[i];
                float v = exp_avg_sq[i];
                step(p, widen(grad[i]) * grad_scale, m, v);
                nans |= is_nan(p);
                master.store(i, p);
                exp_avg[i] = m;
                exp_avg_sq[i] = v;
            }
        }
        if (!nans) return;
        // To look is cheaper than to select in the loop above, which has to keep up with memory.
        for (int64_t i = 0; i < numel; ++i) {
            master.store(i, one_nan(master.load(i)));
            exp_avg[i] = one_nan(exp_avg[i]);
            exp_avg_sq[i] = one_nan(exp_avg_sq[i]);
        }
    }
};

struct Update {
    using Task = UpdateTask;

    static constexpr int64_t unit_numel = 32 * 1024;
    static constexpr int64_t tile_numel = 4096;  // what is gone through again for one NaN

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const UpdateTask& task, int64_t unit) {
        const int64_t end = std::min((unit + 1) * unit_numel, task.numel);
        for (int64_t begin = unit * unit_numel; begin < end; begin += tile_numel) {
            run_tile(isa, task, begin, std::min(tile_numel, end - begin));
        }
    }

    static void run_tile(int32_t isa, const UpdateTask& task, int64_t begin, int64_t numel) {
        const bool from_grad = task.one_minus_beta1 >= 0.5f;
        if (task.formula == ADAM && task.weight_decay != 0.0f) {
            from_grad ? with_grad<Adam<true, true>>(isa, task, begin, numel)
                      : with_grad<Adam<true, false>>(isa, task, begin, numel);
        } else {
            from_grad ? with_grad<Adam<false, true>>(isa, task, begin, numel)
                      : with_grad<Adam<false, false>>(isa, task, begin, numel);
        }
    }

    template <class Step>
    static void with_grad(int32_t isa, const UpdateTask& task, int64_t begin, int64_t numel) {
        if (task.grad_dtype == BF16) {
            with_master<Step, uint16_t>(isa, task, begin, numel);
        } else {
            with_master<Step, float>(isa, task, begin, numel);
        }
    }

    template <class Step, class Grad>
    static void with_master(int32_t isa, const UpdateTask& task, int64_t begin, int64_t numel) {
        if (task.weight_dtype == BF16) {
            run_loop<Step, Grad, SplitMaster>(isa, task, task.residual + begin, begin, numel);
        } else {
            run_loop<Step, Grad, PlainMaster>(isa, task, nullptr, begin, numel);
        }
    }

    template <class Step, class Grad, class Master>
    static void run_loop(int32_t isa, const UpdateTask& task, uint16_t* residual, int64_t begin, int64_t numel) {
        const float grad_scale = task.maximize ? -task.grad_scale : task.grad_scale;
        select<UpdateLoop<Step, Master, Grad>>(isa)(
            Step(task), grad_scale, static_cast<typename Master::Weight*>(task.weight) + begin, residual,
            task.exp_avg + begin, task.exp_avg_sq + begin, static_cast<const Grad*>(task.grad) + begin, numel);
    }
};

}  // namespace

TM_EXPORT void tm_update(int32_t isa, const UpdateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Update>(isa, tasks, count, threads);
}

}  // namespace tiermem
