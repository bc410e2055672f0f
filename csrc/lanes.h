// The vector registers of one instruction set, as the optimizer pass uses them: groups of fp32 values, and what rests
// in fewer bits, in and out of them. Each update_*.cpp sets its target, TM_LEVEL and TM_VECTOR_BYTES, and gets its own
// copy.
//
// Written out because compilers vectorise conversions between 8, 16 and 32 bits badly: in loops of their own, through
// memory, which took longer than all square roots and divisions. With 16 bytes there is nothing but the compiler's
// general vectors, which exist everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "numbers.h"

#if TM_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

namespace tiermem {
namespace TM_LEVEL {

using Floats = float __attribute__((vector_size(TM_VECTOR_BYTES)));
using Ints = int32_t __attribute__((vector_size(TM_VECTOR_BYTES)));
using Bits = uint32_t __attribute__((vector_size(TM_VECTOR_BYTES)));

// A group is two registers of fp32 values, or one of their halves.
using Halves = uint16_t __attribute__((vector_size(TM_VECTOR_BYTES)));
constexpr int registers = 2;
constexpr int64_t register_numel = sizeof(Floats) / sizeof(float);
constexpr int64_t group_numel = registers * register_numel;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of an fp32 value comes first");

template <class To, class From>
TM_INLINE To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class Value, class Element>
TM_INLINE Value load(const Element* from) {
    Value value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Value, class Element>
TM_INLINE void store(Element* to, Value value) {
    std::memcpy(to, &value, sizeof value);
}

TM_INLINE Floats splat(float value) { return Floats{} + value; }

// What each instruction set has its own way for:
//
// interleave(): the fp32 values of a group from their low and high halves; low_halves(), high_halves(): back.
// from_bytes(): bytes as whole numbers. to_words(), to_signed_words(): whole numbers in 16 bits, those out of range as
// the nearest in range, in an order of their own that to_bytes() undoes; `pairs` are numbers 0, 2, 4 .. in that order.
// multiply_add(): a * b + c with one rounding. nearest(): whole numbers, ties to even.
// any_nan(), largest(): of all values.
// leave(): before anything that may be compiled for narrower registers, which while the upper halves are in use took up
// to four times as long. Compilers see to it, but not after a call that takes vectors.
#if TM_VECTOR_BYTES == 64

TM_INLINE void interleave(Halves low, Halves high, Floats (&values)[registers]) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24,  //
                                            55, 23, 54, 22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    values[0] = cast<Floats>(_mm512_permutex2var_epi16(cast<__m512i>(low), first, cast<__m512i>(high)));
    values[1] = cast<Floats>(_mm512_permutex2var_epi16(cast<__m512i>(low), second, cast<__m512i>(high)));
}
TM_INLINE Halves low_halves(const Bits (&bits)[registers]) {
    const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,  //
                                          30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return cast<Halves>(_mm512_permutex2var_epi16(cast<__m512i>(bits[0]), even, cast<__m512i>(bits[1])));
}
TM_INLINE Halves high_halves(const Bits (&bits)[registers]) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return cast<Halves>(_mm512_permutex2var_epi16(cast<__m512i>(bits[0]), odd, cast<__m512i>(bits[1])));
}

TM_INLINE Ints from_bytes(const int8_t* bytes) { return cast<Ints>(_mm512_cvtepi8_epi32(load<__m128i>(bytes))); }
TM_INLINE Ints from_bytes(const uint8_t* bytes) { return cast<Ints>(_mm512_cvtepu8_epi32(load<__m128i>(bytes))); }
TM_INLINE Halves to_words(const Ints (&whole)[registers]) {
    return cast<Halves>(_mm512_packus_epi32(cast<__m512i>(whole[0]), cast<__m512i>(whole[1])));
}
TM_INLINE Halves to_signed_words(const Ints (&whole)[registers]) {
    return cast<Halves>(_mm512_packs_epi32(cast<__m512i>(whole[0]), cast<__m512i>(whole[1])));
}
TM_INLINE void to_bytes(Halves words, uint8_t* bytes) {
    const __m512i fours = _mm512_packus_epi16(cast<__m512i>(words), cast<__m512i>(words));
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 9, 5, 1, 12, 8, 4, 0);
    store(bytes, _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, fours)));
}
constexpr uint32_t pairs[] = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};

TM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
TM_INLINE Floats square_root(Floats value) { return _mm512_sqrt_ps(value); }
TM_INLINE Ints nearest(Floats value) { return cast<Ints>(_mm512_cvtps_epi32(value)); }
TM_INLINE bool any_nan(const Floats (&values)[registers]) {
    return _mm512_cmp_ps_mask(values[0], values[1], _CMP_UNORD_Q) != 0;
}
TM_INLINE Bits larger(Bits a, Bits b) { return cast<Bits>(_mm512_max_epu32(cast<__m512i>(a), cast<__m512i>(b))); }
TM_INLINE uint32_t largest(Bits bits) { return _mm512_reduce_max_epu32(cast<__m512i>(bits)); }
TM_INLINE void leave() { _mm256_zeroupper(); }

#elif TM_VECTOR_BYTES == 32

// Most of AVX2 works on the two halves of a register: quarters 0 1 | 2 3 to 0 2 | 1 3, and back.
TM_INLINE __m256i middle_swapped(__m256i quarters) { return _mm256_permute4x64_epi64(quarters, 0xd8); }

TM_INLINE void interleave(Halves low, Halves high, Floats (&values)[registers]) {
    const __m256i l = middle_swapped(cast<__m256i>(low));
    const __m256i h = middle_swapped(cast<__m256i>(high));
    values[0] = cast<Floats>(_mm256_unpacklo_epi16(l, h));
    values[1] = cast<Floats>(_mm256_unpackhi_epi16(l, h));
}
TM_INLINE Halves halves(Bits first, Bits second) {
    return cast<Halves>(middle_swapped(_mm256_packus_epi32(cast<__m256i>(first), cast<__m256i>(second))));
}
TM_INLINE Halves low_halves(const Bits (&bits)[registers]) { return halves(bits[0] & 0xffff, bits[1] & 0xffff); }
TM_INLINE Halves high_halves(const Bits (&bits)[registers]) { return halves(bits[0] >> 16, bits[1] >> 16); }

TM_INLINE Ints from_bytes(const int8_t* bytes) {
    return cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(bytes))));
}
TM_INLINE Ints from_bytes(const uint8_t* bytes) {
    return cast<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(bytes))));
}
TM_INLINE Halves to_words(const Ints (&whole)[registers]) {
    return cast<Halves>(_mm256_packus_epi32(cast<__m256i>(whole[0]), cast<__m256i>(whole[1])));
}
TM_INLINE Halves to_signed_words(const Ints (&whole)[registers]) {
    return cast<Halves>(_mm256_packs_epi32(cast<__m256i>(whole[0]), cast<__m256i>(whole[1])));
}
TM_INLINE void to_bytes(Halves words, uint8_t* bytes) {
    const __m256i fours = _mm256_packus_epi16(cast<__m256i>(words), cast<__m256i>(words));
    const __m256i order = _mm256_set_epi32(0, 0, 0, 0, 5, 1, 4, 0);
    store(bytes, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(fours, order)));
}
constexpr uint32_t pairs[] = {0, 2, 8, 10, 4, 6, 12, 14};

TM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
TM_INLINE Floats square_root(Floats value) { return _mm256_sqrt_ps(value); }
TM_INLINE Ints nearest(Floats value) { return cast<Ints>(_mm256_cvtps_epi32(value)); }
TM_INLINE bool any_nan(const Floats (&values)[registers]) {
    return _mm256_movemask_ps(_mm256_cmp_ps(values[0], values[1], _CMP_UNORD_Q)) != 0;
}
TM_INLINE Bits larger(Bits a, Bits b) { return cast<Bits>(_mm256_max_epu32(cast<__m256i>(a), cast<__m256i>(b))); }
TM_INLINE uint32_t largest(Bits bits) {
    const __m256i eight = cast<__m256i>(bits);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return uint32_t(_mm_cvtsi128_si32(four));
}
TM_INLINE void leave() { _mm256_zeroupper(); }

#else

#if defined(__clang__)
#define TM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Halves{__VA_ARGS__})
#endif

TM_INLINE void interleave(Halves low, Halves high, Floats (&values)[registers]) {
    values[0] = cast<Floats>(TM_SHUFFLE(low, high, 0, 8, 1, 9, 2, 10, 3, 11));
    values[1] = cast<Floats>(TM_SHUFFLE(low, high, 4, 12, 5, 13, 6, 14, 7, 15));
}
TM_INLINE Halves low_halves(const Bits (&bits)[registers]) {
    return TM_SHUFFLE(cast<Halves>(bits[0]), cast<Halves>(bits[1]), 0, 2, 4, 6, 8, 10, 12, 14);
}
TM_INLINE Halves high_halves(const Bits (&bits)[registers]) {
    return TM_SHUFFLE(cast<Halves>(bits[0]), cast<Halves>(bits[1]), 1, 3, 5, 7, 9, 11, 13, 15);
}

TM_INLINE Ints from_bytes(const int8_t* bytes) {
    using Four = int8_t __attribute__((vector_size(4)));
    return __builtin_convertvector(load<Four>(bytes), Ints);
}
TM_INLINE Ints from_bytes(const uint8_t* bytes) {
    using Four = uint8_t __attribute__((vector_size(4)));
    return __builtin_convertvector(load<Four>(bytes), Ints);
}
// For numbers in range, as those of int8 moments are: no code needs more.
TM_INLINE Halves to_signed_words(const Ints (&whole)[registers]) {
    return low_halves({cast<Bits>(whole[0]), cast<Bits>(whole[1])});
}
// For numbers up to 0xffff.
TM_INLINE Halves to_words(const Ints (&whole)[registers]) {
    return to_signed_words({whole[0] > 0 ? whole[0] : Ints{}, whole[1] > 0 ? whole[1] : Ints{}});
}
TM_INLINE void to_bytes(Halves words, uint8_t* bytes) {
    using Bytes = uint8_t __attribute__((vector_size(8)));
    store(bytes, __builtin_convertvector(words, Bytes));
}
constexpr uint32_t pairs[] = {0, 2, 4, 6};

TM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    for (int64_t i = 0; i < register_numel; ++i) c[i] = tiermem::multiply_add(a[i], b[i], c[i]);
    return c;
}
TM_INLINE Floats square_root(Floats value) {
    for (int64_t i = 0; i < register_numel; ++i) value[i] = std::sqrt(value[i]);
    return value;
}
// For values below 2^22.
TM_INLINE Ints nearest(Floats value) {
    const Floats magic = splat(0x1.8p23f);
    return cast<Ints>(value + magic) - cast<Ints>(magic);
}
TM_INLINE bool any_nan(const Floats (&values)[registers]) {
    using Pair = uint64_t __attribute__((vector_size(TM_VECTOR_BYTES)));
    const Pair found = cast<Pair>((values[0] != values[0]) | (values[1] != values[1]));
    return (found[0] | found[1]) != 0;
}
TM_INLINE Bits larger(Bits a, Bits b) { return a > b ? a : b; }
TM_INLINE uint32_t largest(Bits bits) {
    uint32_t found = bits[0];
    for (int64_t i = 1; i < register_numel; ++i) found = bits[i] > found ? bits[i] : found;
    return found;
}
TM_INLINE void leave() {}

#endif

TM_INLINE Floats multiply_add(float a, Floats b, Floats c) { return multiply_add(splat(a), b, c); }
TM_INLINE Floats to_floats(Ints ints) { return __builtin_convertvector(ints, Floats); }
TM_INLINE Floats one_nan(Floats value) { return value == value ? value : splat(from_bits(0x7fc00000)); }

// To look is cheaper than to select.
TM_INLINE void keep_one_nan(Floats (&values)[registers]) {
    if (__builtin_expect(any_nan(values), false)) {
        for (Floats& value : values) value = one_nan(value);
    }
}

}  // namespace TM_LEVEL
}  // namespace tiermem
