// The optimizers' formulas. Each is a struct made from a task's scalars with the whole arithmetic of a register of
// elements: parameter and moments in and out, gradient in. `moments` is how many it has; they come in the order in
// which they rest. `non_negative[k]` says that moment k is a sum of squares; with `roots` its new value is handed out
// as the square root, from which int8 codes are made.
//
// It comes in two halves, begin() and end(), with what is left to divide between them: the loop begins the next values
// before it ends these, so that their roots are taken while these are divided. In one half, all that waits for a root
// or a quotient fills the processor's queues, and loads behind it come late.
#pragma once

#include "abi.h"
#include "lanes.h"

namespace tiermem {
namespace TM_LEVEL {

struct Quotient {
    Floats dividend, divisor;
};

// Kingma and Ba, "Adam", and Loshchilov and Hutter, "Decoupled weight decay regularization", with the operations and
// roundings of torch.optim.Adam(fused=True) and AdamW(fused=True): the same bits. (The last numel % 16 elements of a
// tensor torch leaves to a scalar loop that adds up the second moment with another rounding; here there is one
// formula.) `amsgrad`: Reddi, Kale and Kumar, "On the convergence of Adam and beyond".
//
// `l2`: weight decay is added to the gradient (Adam), else taken off the parameter (AdamW). `from_grad`: the mean is
// computed from its new end, as torch.lerp does for beta1 <= 0.5, so that beta1 = 0 gives the gradient itself.
template <bool amsgrad, bool roots>
struct Adam {
    static constexpr int moments = amsgrad ? 3 : 2;
    static constexpr bool non_negative[] = {false, true, true};

    TM_INLINE explicit Adam(const UpdateTask& task)
        : l2((task.formula == ADAM || task.formula == AMSGRAD) && task.weight_decay != 0.0f),
          from_grad(task.one_minus_beta1 >= 0.5f),
          decay(task.formula == ADAMW || task.formula == AMSGRADW ? task.decay : 1.0f),
          weight_decay(task.weight_decay),
          towards_grad(from_grad ? task.one_minus_beta1 - 1.0f : task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size),
          bias_correction2_sqrt(task.bias_correction2_sqrt),
          eps(task.eps) {}

    TM_INLINE Quotient begin(Floats& p, Floats g, Floats& m, Floats& v, Floats& v_max) const {
        p *= decay;
        if (l2) g = multiply_add(weight_decay, p, g);
        m = multiply_add(towards_grad, g - m, from_grad ? g : m);
        v = multiply_add(one_minus_beta2 * g, g, v * beta2);
        if constexpr (amsgrad) v_max = v_max >= v ? v_max : v;
        const Floats root = square_root(amsgrad ? v_max : v);
        if constexpr (roots) {
            v = amsgrad ? square_root(v) : root;
            v_max = root;
        }
        return {step_size * m, root};
    }
    TM_INLINE void end(Floats& p, Quotient left) const {
        p -= left.dividend / (left.divisor / bias_correction2_sqrt + eps);
    }

    bool l2, from_grad;
    float decay, weight_decay, towards_grad, beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
};

// Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning", with the
// operations of torch.optim.SGD: the same bits. beta1 is the momentum (0 in the first step, whose buffer is the
// gradient), one_minus_beta1 is 1 - dampening (1 in the first step), beta2 is the momentum that Nesterov's look ahead
// takes.
template <bool momentum>
struct Sgd {
    static constexpr int moments = momentum ? 1 : 0;
    static constexpr bool non_negative[] = {false};

    TM_INLINE explicit Sgd(const UpdateTask& task)
        : l2(task.weight_decay != 0.0f),
          nesterov(task.formula == SGD_NESTEROV),
          weight_decay(task.weight_decay),
          keep(task.beta1),
          take(task.one_minus_beta1),
          look_ahead(task.beta2),
          step_size(task.step_size) {}

    TM_INLINE Quotient begin(Floats& p, Floats g, Floats& buffer, Floats&, Floats&) const {
        if (l2) g = multiply_add(weight_decay, p, g);
        if constexpr (momentum) {
            buffer = multiply_add(take, g, buffer * keep);
            g = nesterov ? multiply_add(look_ahead, buffer, g) : buffer;
        }
        p = multiply_add(-step_size, g, p);
        return Quotient();
    }
    TM_INLINE void end(Floats&, Quotient) const {}

    bool l2, nesterov;
    float weight_decay, keep, take, look_ahead, step_size;
};

// Chen et al., "Symbolic discovery of optimization algorithms", algorithm 2; the decay is taken off first, as by AdamW.
struct Lion {
    static constexpr int moments = 1;
    static constexpr bool non_negative[] = {false};

    TM_INLINE explicit Lion(const UpdateTask& task)
        : decay(task.decay),
          beta1(task.beta1),
          one_minus_beta1(task.one_minus_beta1),
          beta2(task.beta2),
          one_minus_beta2(task.one_minus_beta2),
          step_size(task.step_size) {}

    TM_INLINE Quotient begin(Floats& p, Floats g, Floats& m, Floats&, Floats&) const {
        const Floats direction = multiply_add(one_minus_beta1, g, m * beta1);
        Floats sign = direction > 0.0f ? splat(1.0f) : direction;  // which may be a zero, or NaN
        sign = direction < 0.0f ? splat(-1.0f) : sign;
        p = p * decay - step_size * sign;
        m = multiply_add(one_minus_beta2, g, m * beta2);
        return Quotient();
    }
    TM_INLINE void end(Floats&, Quotient) const {}

    float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size;
};

// Duchi, Hazan and Singer, "Adaptive subgradient methods", with the operations of torch.optim.Adagrad(fused=True): the
// same bits. initial_sum is what the sum starts from in the first step, 0 later; step_size is the learning rate decayed
// to this step.
template <bool roots>
struct Adagrad {
    static constexpr int moments = 1;
    static constexpr bool non_negative[] = {true};

    TM_INLINE explicit Adagrad(const UpdateTask& task)
        : l2(task.weight_decay != 0.0f),
          weight_decay(task.weight_decay),
          step_size(task.step_size),
          eps(task.eps),
          initial_sum(task.initial_sum) {}

    TM_INLINE Quotient begin(Floats& p, Floats g, Floats& sum, Floats&, Floats&) const {
        if (l2) g = multiply_add(weight_decay, p, g);
        sum = multiply_add(g, g, sum + initial_sum);
        const Floats root = square_root(sum);
        if constexpr (roots) sum = root;
        return {step_size * g, root};
    }
    TM_INLINE void end(Floats& p, Quotient left) const { p -= left.dividend / (left.divisor + eps); }

    bool l2;
    float weight_decay, step_size, eps, initial_sum;
};

}  // namespace TM_LEVEL
}  // namespace tiermem
