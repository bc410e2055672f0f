// The fused optimizer pass: gradient in; weight, residual and both moments in and out.
//
// A formula is a struct made from a task's scalars; its call operator is the whole arithmetic of one element. The loop
// around it is the same for all.

#include <algorithm>
#include <cmath>

#include "abi.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

// torch.lerp: starts from the nearer end, so that weight 1 gives the end itself.
struct Lerp {
    explicit Lerp(float weight) : from_end(weight >= 0.5f), weight(from_end ? weight - 1.0f : weight) {}

    TM_INLINE float operator()(float start, float end) const {
        return (from_end ? end : start) + weight * (end - start);
    }

    bool from_end;
    float weight;
};

// Kingma and Ba, "Adam", and Loshchilov and Hutter, "Decoupled weight decay regularization", in the order of
// operations of torch.optim's single-tensor path.
template <Formula formula>
struct Adam {
    explicit Adam(const UpdateTask& task)
        : decay(task.decay),
          weight_decay(task.weight_decay),
          towards_grad(task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size),
          bias_correction2_sqrt(task.bias_correction2_sqrt),
          eps(task.eps) {}

    TM_INLINE void operator()(float& p, float g, float& m, float& v) const {
        if constexpr (formula == ADAM) g += weight_decay * p;
        if constexpr (formula == ADAMW) p *= decay;
        m = towards_grad(m, g);
        v = v * beta2 + one_minus_beta2 * g * g;
        p -= step_size * m / (std::sqrt(v) / bias_correction2_sqrt + eps);
    }

    float decay, weight_decay;
    Lerp towards_grad;
    float beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
};

template <class Step, class Grad>
TM_INLINE void update_split(const Step step, float grad_scale, uint16_t* __restrict weight,
                            uint16_t* __restrict residual, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                            const Grad* __restrict grad, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        float p = join(weight[i], residual[i]);
        float m = exp_avg[i];
        float v = exp_avg_sq[i];
        step(p, widen(grad[i]) * grad_scale, m, v);
        p = one_nan(p);
        weight[i] = split_weight(p);
        residual[i] = split_residual(p);
        exp_avg[i] = one_nan(m);
        exp_avg_sq[i] = one_nan(v);
    }
}

template <class Step, class Grad>
TM_INLINE void update_plain(const Step step, float grad_scale, float* __restrict weight, float* __restrict exp_avg,
                            float* __restrict exp_avg_sq, const Grad* __restrict grad, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        float p = weight[i];
        float m = exp_avg[i];
        float v = exp_avg_sq[i];
        step(p, widen(grad[i]) * grad_scale, m, v);
        weight[i] = one_nan(p);
        exp_avg[i] = one_nan(m);
        exp_avg_sq[i] = one_nan(v);
    }
}

struct Update {
    using Task = UpdateTask;
    using Function = void (*)(const UpdateTask&, int64_t);

    static constexpr int64_t unit_numel = 32 * 1024;

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static TM_INLINE void run(const UpdateTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        const int64_t numel = std::min(unit_numel, task.numel - begin);
        if (task.formula == ADAM && task.weight_decay != 0.0f) {
            with_grad(Adam<ADAM>(task), task, begin, numel);
        } else {
            Adam<ADAMW> step(task);
            if (task.formula == ADAM) step.decay = 1.0f;  // without decay the two are one; 0 * infinity must not be added
            with_grad(step, task, begin, numel);
        }
    }

    template <class Step>
    static TM_INLINE void with_grad(const Step& step, const UpdateTask& task, int64_t begin, int64_t numel) {
        if (task.grad_dtype == BF16) {
            with_weight(step, task, static_cast<const uint16_t*>(task.grad), begin, numel);
        } else {
            with_weight(step, task, static_cast<const float*>(task.grad), begin, numel);
        }
    }

    template <class Step, class Grad>
    static TM_INLINE void with_weight(const Step& step, const UpdateTask& task, const Grad* grad, int64_t begin,
                                      int64_t numel) {
        const float grad_scale = task.maximize ? -task.grad_scale : task.grad_scale;
        if (task.weight_dtype == BF16) {
            update_split(step, grad_scale, static_cast<uint16_t*>(task.weight) + begin, task.residual + begin,
                         task.exp_avg + begin, task.exp_avg_sq + begin, grad + begin, numel);
        } else {
            update_plain(step, grad_scale, static_cast<float*>(task.weight) + begin, task.exp_avg + begin,
                         task.exp_avg_sq + begin, grad + begin, numel);
        }
    }
};

}  // namespace

TM_EXPORT void tm_update(int32_t isa, const UpdateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Update>(isa, tasks, count, threads);
}

}  // namespace tiermem
