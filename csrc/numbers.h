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

}  // namespace tiermem
