// The records and the interface that Python sees; tiermem/kernels/abi.py mirrors them field by field.
#pragma once

#include <cstdint>

#define TM_EXPORT extern "C" __attribute__((visibility("default")))

namespace tiermem {

constexpr int32_t abi_version = 7;

enum Dtype : int32_t { BF16 = 0, F32 = 1, INT8 = 2 };  // INT8: moments only
enum Formula : int32_t {
    ADAMW = 0,
    ADAM = 1,
    AMSGRADW = 2,
    AMSGRAD = 3,
    SGD = 4,
    SGD_MOMENTUM = 5,
    SGD_NESTEROV = 6,
    LION = 7,
    ADAGRAD = 8,
};

constexpr int64_t piece_numel = 4096;  // one sum of squares each
constexpr int lanes = 16;              // accumulators of one sum of squares
constexpr int moments_max = 3;         // of any formula
constexpr int64_t block_numel = 128;   // int8 codes that share a scale

struct UpdateTask {
    void* weight;
    uint16_t* residual;
    const void* grad;
    void* moments[moments_max];
    float* scales[moments_max];
    int64_t numel;
    int32_t weight_dtype;
    int32_t grad_dtype;
    int32_t moment_dtype;
    int32_t formula;
    uint32_t noise;
    float grad_scale;
    float decay;
    float weight_decay;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;
    float bias_correction2_sqrt;
    float eps;
    float initial_sum;
};

struct AccumulateTask {
    const void* source;
    int32_t source_dtype;
    const void* previous;
    int32_t previous_dtype;
    float previous_scale;
    void* target;
    int32_t target_dtype;
    int64_t numel;
    int64_t first_piece;
    double* partials;
};

}  // namespace tiermem
