// The pass of a task's optimizer, formats and dtypes.
#pragma once

#include "abi.h"
#include "formulas.h"
#include "moments.h"
#include "pass.h"

namespace tiermem {
namespace TM_LEVEL {

struct Dispatch {
    const UpdateTask& task;
    int64_t begin;
    int64_t numel;

    void run() const {
        switch (task.moment_dtype) {
            case F32: return by_formula<Fp32>();
            case BF16: return by_formula<Bf16>();
            case INT8: return by_formula<Int8>();
        }
    }

    template <class Format>
    void by_formula() const {
        switch (task.formula) {
            case ADAMW:
            case ADAM: return by_grad<Format, Adam<false, Format::roots>>();
            case AMSGRADW:
            case AMSGRAD: return by_grad<Format, Adam<true, Format::roots>>();
            case SGD: return by_grad<Fp32, Sgd<false>>();
            case SGD_MOMENTUM:
            case SGD_NESTEROV: return by_grad<Format, Sgd<true>>();
            case LION: return by_grad<Format, Lion>();
            case ADAGRAD: return by_grad<Format, Adagrad<Format::roots>>();
        }
    }

    template <class Format, class Step>
    void by_grad() const {
        task.grad_dtype == BF16 ? by_master<Format, Step, uint16_t>() : by_master<Format, Step, float>();
    }

    template <class Format, class Step, class Grad>
    void by_master() const {
        using Moments = typename Format::template Moments<Step>;
        task.weight_dtype == BF16 ? Pass<Step, SplitMaster, Grad, Moments>::run(task, begin, numel)
                                  : Pass<Step, PlainMaster, Grad, Moments>::run(task, begin, numel);
    }
};

void update(const UpdateTask& task, int64_t begin, int64_t numel) {
    Dispatch{task, begin, numel}.run();
    leave();
}

}  // namespace TM_LEVEL
}  // namespace tiermem
