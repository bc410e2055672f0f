// The optimizers' formulas. Each is a struct made from a task's scalars whose call operator is the whole arithmetic of
// one element: parameter and moments in and out, gradient in. `moments` is how many it has; they come in the order in
// which they rest. `non_negative[k]` says that moment k is a sum of squares; with `roots` its new value is handed
// out as the square root, from which int8 codes are made.
//
// A NaN in a moment must reach the parameter, where the loop around a formula, the same for all, looks for NaNs.
#pragma once

#include <cmath>

#include "abi.h"
#include "numbers.h"

namespace tiermem {

// Kingma and Ba, "Adam", and Loshchilov and Hutter, "Decoupled weight decay regularization", with the operations and
// roundings of torch.optim.Adam(fused=True) and AdamW(fused=True): the same bits. (The last numel % 16 elements of a
// tensor torch leaves to a scalar loop that adds up the second moment with another rounding; here there is one
// formula.) `amsgrad`: Reddi, Kale and Kumar, "On the convergence of Adam and beyond".
//
// `l2`: weight decay is added to the gradient (Adam), else taken off the parameter (AdamW). `from_grad`: the mean is
// computed from its new end, as torch.lerp does for beta1 <= 0.5, so that beta1 = 0 gives the gradient itself.
template <bool l2, bool from_grad, bool amsgrad, bool roots>
struct Adam {
    static constexpr int moments = amsgrad ? 3 : 2;
    static constexpr bool non_negative[] = {false, true, true};

    explicit Adam(const UpdateTask& task)
        : decay(task.formula == ADAMW || task.formula == AMSGRADW ? task.decay : 1.0f),
          weight_decay(task.weight_decay),
          towards_grad(from_grad ? task.one_minus_beta1 - 1.0f : task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size),
          bias_correction2_sqrt(task.bias_correction2_sqrt),
          eps(task.eps) {}

    TM_INLINE void operator()(float& p, float g, float& m, float& v, float& v_max) const {
        if constexpr (l2) {
            g = multiply_add(weight_decay, p, g);
        } else {
            p *= decay;
        }
        m = multiply_add(towards_grad, g - m, from_grad ? g : m);
        v = multiply_add(one_minus_beta2 * g, g, v * beta2);
        if constexpr (amsgrad) v_max = v_max >= v ? v_max : v;
        const float root = std::sqrt(amsgrad ? v_max : v);
        p -= step_size * m / (root / bias_correction2_sqrt + eps);
        if constexpr (roots) {
            v = amsgrad ? std::sqrt(v) : root;
            v_max = root;
        }
    }

    float decay, weight_decay, towards_grad, beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
};

enum class Momentum { NONE, CLASSIC, NESTEROV };

// Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning", with the
// operations of torch.optim.SGD: the same bits. beta1 is the momentum (0 in the first step, whose buffer is the
// gradient), one_minus_beta1 is 1 - dampening (1 in the first step), beta2 is the momentum that Nesterov's look ahead
// takes.
template <bool l2, Momentum momentum>
struct Sgd {
    static constexpr int moments = momentum == Momentum::NONE ? 0 : 1;
    static constexpr bool non_negative[] = {false};

    explicit Sgd(const UpdateTask& task)
        : weight_decay(task.weight_decay),
          keep(task.beta1),
          take(task.one_minus_beta1),
          look_ahead(task.beta2),
          step_size(task.step_size) {}

    TM_INLINE void operator()(float& p, float g, float& buffer, float&, float&) const {
        if constexpr (l2) g = multiply_add(weight_decay, p, g);
        if constexpr (momentum != Momentum::NONE) {
            buffer = multiply_add(take, g, buffer * keep);
            g = momentum == Momentum::NESTEROV ? multiply_add(look_ahead, buffer, g) : buffer;
        }
        p = multiply_add(-step_size, g, p);
    }

    float weight_decay, keep, take, look_ahead, step_size;
};

// Chen et al., "Symbolic discovery of optimization algorithms", algorithm 2; the decay is taken off first, as by AdamW.
struct Lion {
    static constexpr int moments = 1;
    static constexpr bool non_negative[] = {false};

    explicit Lion(const UpdateTask& task)
        : decay(task.decay),
          beta1(task.beta1),
          one_minus_beta1(task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size) {}

    TM_INLINE void operator()(float& p, float g, float& m, float&, float&) const {
        const float direction = multiply_add(one_minus_beta1, g, m * beta1);
        const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;  // zero, or NaN
        p = p * decay - step_size * sign;
        m = multiply_add(one_minus_beta2, g, m * beta2);
    }

    float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size;
};

// Duchi, Hazan and Singer, "Adaptive subgradient methods", with the operations of torch.optim.Adagrad(fused=True): the
// same bits. initial_sum is what the sum starts from in the first step, 0 later; step_size is the learning rate decayed
// to this step.
template <bool l2, bool roots>
struct Adagrad {
    static constexpr int moments = 1;
    static constexpr bool non_negative[] = {true};

    explicit Adagrad(const UpdateTask& task)
        : weight_decay(task.weight_decay), step_size(task.step_size), eps(task.eps), initial_sum(task.initial_sum) {}

    TM_INLINE void operator()(float& p, float g, float& sum, float&, float&) const {
        if constexpr (l2) g = multiply_add(weight_decay, p, g);
        sum = multiply_add(g, g, sum + initial_sum);
        const float root = std::sqrt(sum);
        p -= step_size * g / (root + eps);
        if constexpr (roots) sum = root;
    }

    float weight_decay, step_size, eps, initial_sum;
};

}  // namespace tiermem
