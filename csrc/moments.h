// How moments rest, by format: all moments of a formula, a group of elements at a time, in and out of registers.
//
// fp32: as they are. bf16: the high half of the fp32 value.
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
// depends on neither chunks, threads nor placement. The third moment is rounded to nearest: a maximum has no mean that
// chance would keep, it would only climb.
//
// A format has `State`, what it knows of the groups that passed, and `Room`, what it needs beside registers.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "abi.h"
#include "lanes.h"

namespace tiermem {
namespace TM_LEVEL {

// All moments of a group.
using Values = Floats[moments_max][registers];

// Calls body(k) for each moment, with k a constant.
template <class Step, class Body>
TM_INLINE void for_each_moment(Body body) {
    if constexpr (Step::moments > 0) body(std::integral_constant<int, 0>());
    if constexpr (Step::moments > 1) body(std::integral_constant<int, 1>());
    if constexpr (Step::moments > 2) body(std::integral_constant<int, 2>());
}

// A step of a Weyl sequence per number, mixed (the finalizer of MurmurHash3, shortened: no more is asked of it).
constexpr uint32_t weyl_step = 0x9e3779b9u;

TM_INLINE Bits mixed(Bits weyl) { return (weyl ^ (weyl >> 16)) * 0x85ebca6bu; }

// Random bits for the elements of a group, from the number of its first: 16 for each of two moments, the low and the
// high half of an element's hash.
class Noise {
public:
    TM_INLINE explicit Noise(uint32_t first) {
        for (int r = 0; r < registers; ++r) mixed_[r] = mixed(steps(r) + first * weyl_step);
    }
    TM_INLINE Bits halves(int moment, int r) const {
        return moment == 1 ? mixed_[r] >> 16 : (mixed_[r] ^ (mixed_[r] >> 16)) & 0xffff;
    }

private:
    static TM_INLINE Bits steps(int r) {
        uint32_t each[register_numel];
        for (int64_t i = 0; i < register_numel; ++i) each[i] = uint32_t(r * register_numel + i) * weyl_step;
        return load<Bits>(each);
    }

    Bits mixed_[registers];
};

// 8 for each of two moments, in words in the order of to_words(): two elements, of which the first has an even place in
// the task, share a hash.
class ByteNoise {
public:
    TM_INLINE explicit ByteNoise(uint32_t first) {
        const Bits hash = mixed(steps() + first * weyl_step);
        words_ = cast<Halves>(hash ^ (hash >> 16));
    }
    TM_INLINE Halves bytes(int moment) const { return moment == 1 ? words_ >> 8 : words_ & 0xff; }

private:
    static TM_INLINE Bits steps() {
        uint32_t each[register_numel];
        for (int64_t i = 0; i < register_numel; ++i) each[i] = pairs[i] * weyl_step;
        return load<Bits>(each);
    }

    Halves words_;
};

struct Fp32 {
    static constexpr bool roots = false;

    template <class Step>
    class Moments {
    public:
        struct State {};
        struct Room {};

        TM_INLINE Moments(const UpdateTask& task, Room&) {
            for (int k = 0; k < Step::moments; ++k) codes_[k] = static_cast<float*>(task.moments[k]);
        }
        TM_INLINE void move(int64_t numel) {
            for (int k = 0; k < Step::moments; ++k) codes_[k] += numel;
        }
        template <class Body>
        TM_INLINE void for_each_stream(Body body) {
            for (int k = 0; k < Step::moments; ++k) body(codes_[k]);
        }

        TM_INLINE void load_group(int64_t i, Values& values) const {
            for (int k = 0; k < Step::moments; ++k) {
                for (int r = 0; r < registers; ++r) values[k][r] = load<Floats>(codes_[k] + i + r * register_numel);
            }
        }
        TM_INLINE void store_group(int64_t i, Values& values, State&) const {
            for (int k = 0; k < Step::moments; ++k) {
                keep_one_nan(values[k]);
                for (int r = 0; r < registers; ++r) store(codes_[k] + i + r * register_numel, values[k][r]);
            }
        }
        TM_INLINE void after_group(int64_t, State&) const {}
        TM_INLINE void end(int64_t, State) const {}

    private:
        float* codes_[moments_max] = {};
    };
};

struct Bf16 {
    static constexpr bool roots = false;

    template <class Step>
    class Moments {
    public:
        struct State {};
        struct Room {};

        TM_INLINE Moments(const UpdateTask& task, Room&) : noise_(task.noise) {
            for (int k = 0; k < Step::moments; ++k) codes_[k] = static_cast<uint16_t*>(task.moments[k]);
        }
        TM_INLINE void move(int64_t numel) {
            for (int k = 0; k < Step::moments; ++k) codes_[k] += numel;
            noise_ += uint32_t(numel);
        }
        template <class Body>
        TM_INLINE void for_each_stream(Body body) {
            for (int k = 0; k < Step::moments; ++k) body(codes_[k]);
        }

        TM_INLINE void load_group(int64_t i, Values& values) const {
            for (int k = 0; k < Step::moments; ++k) interleave(Halves{}, load<Halves>(codes_[k] + i), values[k]);
        }
        TM_INLINE void store_group(int64_t i, Values& values, State&) const {
            const Noise noise(noise_ + uint32_t(i));
            for (int k = 0; k < Step::moments; ++k) {
                keep_one_nan(values[k]);
                Bits bits[registers];
                for (int r = 0; r < registers; ++r) {
                    bits[r] = cast<Bits>(values[k][r]) + (k == 2 ? Bits{} + half : noise.halves(k, r));
                }
                store(codes_[k] + i, high_halves(bits));
            }
        }
        TM_INLINE void after_group(int64_t, State&) const {}
        TM_INLINE void end(int64_t, State) const {}

    private:
        static constexpr uint32_t half = 0x8000;  // in place of noise: rounds to nearest

        uint16_t* codes_[moments_max] = {};
        uint32_t noise_;
    };
};

// The codes and the scale of one moment. Takes the roots of sums of squares, which their formulas have at hand. Digits
// are computed as whole numbers of 256ths and rounded to nearest there, so that a ratio that should be whole, but for
// its last bits, is. An infinity counts as the largest number, a NaN makes the scale, and so the block, NaN. Signed
// values below 2^-108 are zero: the reciprocal of their scale would overflow.
template <bool non_negative>
struct Int8Code {
    using Signed = std::conditional_t<non_negative, uint8_t, int8_t>;

    static constexpr float smallest = non_negative ? 0x1p-76f : 0x1p-108f;
    // A root's square is finite.
    static constexpr float largest_value = non_negative ? 0x1.fffffep+63f : 0x1.fffffep+127f;
    static constexpr float digits = non_negative ? 256.0f * 256.0f : 127.0f * 256.0f;
    static constexpr uint16_t half = 0x80;  // in place of noise: rounds to nearest

    static TM_INLINE Floats decode(Ints code, float scale) {
        if constexpr (non_negative) {
            const float unit = scale * (1.0f / 256.0f);
            // The code has 8 bits: (code + 1) * unit has one rounding, too.
            const Floats root =
                TM_VECTOR_BYTES == 16 ? to_floats(code + 1) * unit : multiply_add(unit, to_floats(code), splat(unit));
            return root * root;
        } else {
            return to_floats(code) * (1.0f / 127.0f) * scale;
        }
    }

    static TM_INLINE Bits magnitude(Floats value) {
        return non_negative ? cast<Bits>(value) : cast<Bits>(value) & 0x7fffffffu;
    }

    // The scale of a block with that largest magnitude, and how many 256ths of a digit there are per unit.
    static TM_INLINE float measure(uint32_t magnitude, float* block, float& scale) {
        float maximum = from_bits(magnitude);
        scale = maximum;
        if (__builtin_expect(magnitude >= to_bits(largest_value), false)) {
            scale = maximum == maximum ? largest_value : from_bits(0x7fc00000);
            maximum = largest_value;
            for (int64_t i = 0; i < block_numel; ++i) block[i] = clamped(block[i]);
        }
        if (maximum < smallest) scale = 0.0f;
        return maximum < smallest ? 0.0f : digits / maximum;
    }

    static TM_INLINE float clamped(float value) {
        if (value > largest_value) return largest_value;
        if (value < -largest_value) return -largest_value;
        return value == value ? value : 0.0f;
    }

    // Codes in words.
    static TM_INLINE Halves encode(const float* values, float digits_per_unit, Halves noise) {
        Ints parts[registers];
        for (int r = 0; r < registers; ++r) {
            parts[r] = nearest(load<Floats>(values + r * register_numel) * digits_per_unit);
            if constexpr (non_negative) parts[r] -= 256;
        }
        return ((non_negative ? to_words(parts) : to_signed_words(parts)) + noise) >> 8;
    }
};

// No code of a block can be made before its largest value is known. So new values wait, and become codes while the next
// block's come in, whose square roots and divisions leave time for it.
struct Int8 {
    static constexpr bool roots = true;

    template <class Step>
    class Moments {
    public:
        // Of the block that comes in, the largest magnitudes so far; of the one before, what Int8Code::measure() gave.
        struct State {
            Bits magnitudes[moments_max] = {};
            float digits_per_unit[moments_max] = {};
        };
        // A ring of two blocks.
        struct Room {
            alignas(64) float waiting[Step::moments][2 * block_numel];
        };

        TM_INLINE Moments(const UpdateTask& task, Room& room) : noise_(task.noise) {
            for (int k = 0; k < Step::moments; ++k) {
                codes_[k] = static_cast<uint8_t*>(task.moments[k]);
                scales_[k] = task.scales[k];
                waiting_[k] = room.waiting[k];
            }
        }
        // From one block's first element to another's, or into it for one group.
        TM_INLINE void move(int64_t numel) {
            for (int k = 0; k < Step::moments; ++k) {
                codes_[k] += numel;
                scales_[k] += numel / block_numel;
                waiting_[k] += numel % ring_numel;
            }
            noise_ += uint32_t(numel);
        }
        template <class Body>
        TM_INLINE void for_each_stream(Body body) {
            for (int k = 0; k < Step::moments; ++k) body(codes_[k]);
        }

        TM_INLINE void load_group(int64_t i, Values& values) const {
            for_each_moment<Step>([&](auto k) __attribute__((always_inline)) {
                const auto* codes = reinterpret_cast<const typename Code<k>::Signed*>(codes_[k]) + i;
                const float scale = scales_[k][i / block_numel];
                for (int r = 0; r < registers; ++r) {
                    values[k][r] = Code<k>::decode(from_bytes(codes + r * register_numel), scale);
                }
            });
        }
        TM_INLINE void store_group(int64_t i, const Values& values, State& state) const {
            for_each_moment<Step>([&](auto k) __attribute__((always_inline)) {
                for (int r = 0; r < registers; ++r) {
                    state.magnitudes[k] = larger(state.magnitudes[k], Code<k>::magnitude(values[k][r]));
                    store(waiting_[k] + i % ring_numel + r * register_numel, values[k][r]);
                }
            });
        }
        // Makes codes of the group one block before group i; after the last one of its block, measures the next.
        TM_INLINE void after_group(int64_t i, State& state) const {
            if (i >= block_numel) {
                encode_group(i - block_numel, state, [&](auto k, Halves words) __attribute__((always_inline)) {
                    to_bytes(words, codes_[k] + i - block_numel);
                });
            }
            if ((i + group_numel) % block_numel == 0) measure_block(i, state);
        }
        // Makes the codes that are left of `numel` elements.
        __attribute__((noinline)) void end(int64_t numel, State state) const {
            const int64_t whole = numel / group_numel * group_numel;
            const int64_t last_block = (numel - 1) / block_numel * block_numel;
            for (int64_t i = std::max<int64_t>(0, whole - block_numel); i < numel; i += group_numel) {
                if (i == last_block && numel % block_numel != 0) measure_block(i, state);
                encode_group(i, state, [&](auto k, Halves words) {
                    uint8_t codes[group_numel];
                    to_bytes(words, codes);
                    std::memcpy(codes_[k] + i, codes, size_t(std::min(group_numel, numel - i)));
                });
            }
        }

    private:
        template <int k>
        using Code = Int8Code<Step::non_negative[k]>;

        static constexpr int64_t ring_numel = 2 * block_numel;
        static_assert(block_numel % group_numel == 0);

        TM_INLINE void measure_block(int64_t i, State& state) const {
            const int64_t block = i / block_numel;
            for_each_moment<Step>([&](auto k) __attribute__((always_inline)) {
                float* values = waiting_[k] + block * block_numel % ring_numel;
                const uint32_t magnitude = largest(state.magnitudes[k]);
                state.digits_per_unit[k] = Code<k>::measure(magnitude, values, scales_[k][block]);
                state.magnitudes[k] = Bits{};
            });
        }
        template <class Take>
        TM_INLINE void encode_group(int64_t i, const State& state, Take take) const {
            const ByteNoise noise(noise_ + uint32_t(i));
            for_each_moment<Step>([&](auto k) __attribute__((always_inline)) {
                const Halves chance = k == 2 ? Halves{} + Code<k>::half : noise.bytes(k);
                take(k, Code<k>::encode(waiting_[k] + i % ring_numel, state.digits_per_unit[k], chance));
            });
        }

        uint8_t* codes_[moments_max] = {};
        float* scales_[moments_max] = {};
        float* waiting_[moments_max] = {};
        uint32_t noise_;
    };
};

}  // namespace TM_LEVEL
}  // namespace tiermem
