// How moments rest when they take less than fp32: decoded before the formula, encoded after it, a tile at a time in the
// first-level cache.
//
// bf16: the high half of the fp32 value.
//
// int8: codes in blocks of 128 that share an fp32 scale (Dettmers et al., "8-bit optimizers via block-wise
// quantization"). Signed moments: code / 127 of the scale, the largest magnitude of the block. Sums of squares: the
// root is (code + 1) / 256 of the scale, the largest root; so codes span twice as many orders of magnitude, and none is
// zero, as what is divided by the root must not vanish (Li, Chen and Zhu, "Memory efficient optimizers with 4-bit
// states", 4.1). The largest value of a block comes back exactly, hence all codes and scales do when decoded values are
// encoded again: a state survives its export to fp32.
//
// Values are rounded up or down by chance, in proportion to how near they are, so that changes smaller than a digit add
// up over the steps: at beta2 = 0.999 a second moment moves by less than half a bf16 digit a step, and rounded to
// nearest it would never shrink. The chance is a function of the element's number and the task's `noise`, so that it
// depends on neither chunks, threads nor placement.
#pragma once

#include <cmath>
#include <type_traits>

#include "abi.h"
#include "numbers.h"

namespace tiermem {

// How many values are decoded and encoded at once: all of them in the first-level cache, and few, so that one loop can
// begin while the one before still divides. Measured on Zen 4, one thread: with 1024, bf16 took 1.33 and int8 1.06 times
// as long; with 256, int8 took 1.06 times as long. Whole blocks.
constexpr int64_t bf16_tile_numel = 256;
constexpr int64_t int8_tile_numel = 512;
static_assert(int8_tile_numel % block_numel == 0);

// In place of noise: rounds to nearest.
constexpr uint16_t half_bf16 = 0x8000;
constexpr uint16_t half_int8 = 0x80;

// Number n gets a step of a Weyl sequence, mixed (the finalizer of MurmurHash3, shortened: its low and high halves are
// used as two small random numbers, no more is asked of it). `mask` says which bits of the halves are wanted.
struct NoiseLoop {
    using Function = void (*)(uint32_t, uint16_t, uint16_t*, uint16_t*, int64_t);

    static TM_INLINE void run(uint32_t first, uint16_t mask, uint16_t* __restrict low, uint16_t* __restrict high,
                              int64_t numel) {
        uint32_t weyl = first * 0x9e3779b9u;
        for (int64_t i = 0; i < numel; ++i) {
            const uint32_t mixed = (weyl ^ (weyl >> 16)) * 0x85ebca6bu;
            const uint16_t upper = uint16_t(mixed >> 16);
            low[i] = (uint16_t(mixed) ^ upper) & mask;
            high[i] = upper & mask;
            weyl += 0x9e3779b9u;
        }
    }
};

struct DecodeBf16Loop {
    using Function = void (*)(const uint16_t*, float*, int64_t);

    static TM_INLINE void run(const uint16_t* codes, float* values, int64_t numel) { widen(codes, values, numel); }
};

// The noise is 16 bits. Values went through one_nan().
struct EncodeBf16Loop {
    using Function = void (*)(const float*, const uint16_t*, uint16_t*, int64_t);

    static TM_INLINE void run(const float* __restrict values, const uint16_t* __restrict noise,
                              uint16_t* __restrict codes, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) codes[i] = uint16_t((to_bits(values[i]) + noise[i]) >> 16);
    }
};

// From a tile's first element on, which begins a block.
template <bool non_negative>
struct DecodeInt8Loop {
    using Code = std::conditional_t<non_negative, uint8_t, int8_t>;
    using Function = void (*)(const Code*, const float*, float*, int64_t);

    static TM_INLINE void block(const Code* __restrict codes, float scale, float* __restrict values, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) {
            if constexpr (non_negative) {
                const float root = float(int32_t(codes[i]) + 1) * (scale * (1.0f / 256.0f));
                values[i] = root * root;
            } else {
                values[i] = float(int32_t(codes[i])) * (1.0f / 127.0f) * scale;
            }
        }
    }

    static TM_INLINE void run(const Code* codes, const float* scales, float* values, int64_t numel) {
        int64_t i = 0;
        for (; i + block_numel <= numel; i += block_numel) block(codes + i, *scales++, values + i, block_numel);
        if (i < numel) block(codes + i, *scales, values + i, numel - i);
    }
};

// Takes the roots of sums of squares, which their formulas have at hand, of a tile. The noise is 8 bits. Digits are
// computed as whole numbers of 256ths and rounded to nearest there, so that a ratio that should be whole, but for its
// last bits, is. An infinity counts as the largest number, a NaN makes the scale, and so the block, NaN. Signed values
// below 2^-108 are zero: the reciprocal of their scale would overflow.
//
// In two goes, as no code of a block can be made before its largest value is known: the next blocks' are looked for
// meanwhile.
template <bool non_negative>
struct EncodeInt8Loop {
    using Code = std::conditional_t<non_negative, uint8_t, int8_t>;
    using Function = void (*)(float*, const uint16_t*, Code*, float*, int64_t);

    static constexpr float smallest = non_negative ? 0x1p-76f : 0x1p-108f;
    static constexpr float largest = non_negative ? 0x1.fffffep+63f : 0x1.fffffep+127f;  // a root's square is finite
    static constexpr float digits = non_negative ? 256.0f * 256.0f : 127.0f * 256.0f;
    // Added to a number of 256ths, it leaves the whole number in the low bits: the first byte is the fraction, the
    // second the code.
    static constexpr float magic = 0x1.8p23f;

    static TM_INLINE void run(float* values, const uint16_t* noise, Code* codes, float* scales, int64_t numel) {
        float digits_per_unit[int8_tile_numel / block_numel];
        const int64_t whole = numel / block_numel;
        for (int64_t b = 0; b < whole; ++b) {
            digits_per_unit[b] = measure(values + b * block_numel, scales[b], block_numel);
        }
        const int64_t rest = whole * block_numel;
        if (rest < numel) digits_per_unit[whole] = measure(values + rest, scales[whole], numel - rest);
        for (int64_t b = 0; b < whole; ++b) {
            const int64_t i = b * block_numel;
            quantise(values + i, digits_per_unit[b], noise + i, codes + i, block_numel);
        }
        if (rest < numel) quantise(values + rest, digits_per_unit[whole], noise + rest, codes + rest, numel - rest);
    }

    // Sets the scale of a block.
    static TM_INLINE float measure(float* __restrict values, float& scale, int64_t numel) {
        uint32_t magnitude = 0;
        for (int64_t i = 0; i < numel; ++i) {
            const uint32_t bits = to_bits(values[i]) & 0x7fffffffu;
            magnitude = bits > magnitude ? bits : magnitude;
        }
        float maximum = from_bits(magnitude);
        scale = maximum;
        if (magnitude >= to_bits(largest)) {
            scale = maximum == maximum ? largest : maximum;
            maximum = largest;
            for (int64_t i = 0; i < numel; ++i) values[i] = clamped(values[i]);
        }
        if (maximum < smallest) scale = 0.0f;
        return maximum < smallest ? 0.0f : digits / maximum;
    }

    static TM_INLINE float clamped(float value) {
        if (value > largest) return largest;
        if (value < -largest) return -largest;
        return value == value ? value : 0.0f;
    }

    static TM_INLINE void quantise(const float* __restrict values, float digits_per_unit,
                                   const uint16_t* __restrict noise, Code* __restrict codes, int64_t numel) {
        const int32_t zero = int32_t(to_bits(magic));
        for (int64_t i = 0; i < numel; ++i) {
            int32_t digit = int32_t(to_bits(values[i] * digits_per_unit + (non_negative ? magic - 256.0f : magic)));
            if constexpr (non_negative) digit = digit > zero ? digit : zero;
            codes[i] = Code(uint8_t(uint16_t(uint16_t(digit) + noise[i]) >> 8));
        }
    }
};

}  // namespace tiermem
