// bf16, fp32 and the split master: an fp32 value kept as its bf16 rounding (`weight`) and its low half (`residual`).
//
// Rounding is to nearest with ties away from zero, so that bit 15 of the low half says whether the weight was rounded
// up, and join() gives the fp32 value back bit for bit. Values from 0x7f7f8000 (3.396e38) up round to an infinite
// weight, as any conversion to bf16 rounds them; the master is finite again after join().
//
// Every NaN becomes one NaN before it is stored: a NaN whose payload lies in the low half would round to infinity, and
// which payload an operation passes on differs between processors and compilers.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace tiermem {

TM_INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

TM_INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

TM_INLINE float widen(uint16_t value) { return from_bits(uint32_t(value) << 16); }
TM_INLINE float widen(float value) { return value; }

// a * b + c with one rounding. Written out wherever torch's vector code has one, and nowhere else: the compiler makes
// none of its own (-ffp-contract=off). Where the instruction set has no such instruction, libm computes the same bits,
// slowly.
TM_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

TM_INLINE uint32_t is_nan(float value) { return value == value ? 0 : ~0u; }

// Either of two, for the price of one.
TM_INLINE uint32_t is_nan(float a, float b) { return __builtin_isunordered(a, b) ? ~0u : 0; }

TM_INLINE float one_nan(float value) { return value == value ? value : from_bits(0x7fc00000); }

TM_INLINE float join(uint16_t weight, uint16_t residual) {
    const uint16_t high = uint16_t(weight - (residual >> 15));
    return from_bits((uint32_t(high) << 16) | residual);
}

// Takes a value that went through one_nan().
TM_INLINE void split(float master, uint16_t& weight, uint16_t& residual) {
    residual = uint16_t(to_bits(master));
    weight = uint16_t(uint16_t(to_bits(master) >> 16) + uint16_t(residual >> 15));
}

// The same for many, as moves of halves: to interleave them takes a vector processor half the instructions that to
// extend and to shift them takes, and arithmetic on fp32 values alone needs fewer registers.
using Half = uint16_t __attribute__((may_alias));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of an fp32 value comes first");

TM_INLINE void widen(const uint16_t* __restrict narrow, float* __restrict wide, int64_t numel) {
    Half* __restrict halves = reinterpret_cast<Half*>(wide);
    for (int64_t i = 0; i < numel; ++i) {
        halves[2 * i] = 0;
        halves[2 * i + 1] = narrow[i];
    }
}

TM_INLINE void join(const uint16_t* __restrict weight, const uint16_t* __restrict residual, float* __restrict master,
                    int64_t numel) {
    Half* __restrict halves = reinterpret_cast<Half*>(master);
    for (int64_t i = 0; i < numel; ++i) {
        halves[2 * i] = residual[i];
        halves[2 * i + 1] = uint16_t(weight[i] - (residual[i] >> 15));
    }
}

TM_INLINE void split(const float* __restrict master, uint16_t* __restrict weight, uint16_t* __restrict residual,
                     int64_t numel) {
    const Half* __restrict halves = reinterpret_cast<const Half*>(master);
    for (int64_t i = 0; i < numel; ++i) {
        residual[i] = halves[2 * i];
        weight[i] = uint16_t(halves[2 * i + 1] + (halves[2 * i] >> 15));
    }
}

}  // namespace tiermem
