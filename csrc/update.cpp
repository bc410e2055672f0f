// The fused optimizer pass: gradient in; weight, residual and moments in and out.

#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "formulas.h"
#include "moments.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

// The loop goes row by row and asks for rows to come: the hardware alone follows ten streams less well. At 640 elements
// ahead that gained 20 % with AVX2 and 15 % with AVX-512; 256 and 2048 ahead gained less. Addresses past the end do no
// harm: a prefetch never faults.
constexpr int64_t row_numel = 64;
constexpr int64_t prefetch_numel = 640;

template <class Value>
TM_INLINE void prefetch_row(Value* row) {
    constexpr int64_t line_numel = 64 / sizeof(Value);
    for (int64_t i = 0; i < row_numel; i += line_numel) {
        __builtin_prefetch(row + prefetch_numel + i, !std::is_const_v<Value>);
    }
}

// The fp32 values of a row of gradients: in `scratch` or where they lie.
TM_INLINE const float* load_row(const uint16_t* grad, float* scratch, int64_t numel) {
    widen(grad, scratch, numel);
    return scratch;
}

TM_INLINE const float* load_row(const float* grad, float*, int64_t) { return grad; }

// How masters lie in memory: in two halves, or as plain fp32.
struct SplitMaster {
    using Weight = uint16_t;
    uint16_t* weight;
    uint16_t* residual;

    TM_INLINE void prefetch(int64_t row) const {
        prefetch_row(weight + row);
        prefetch_row(residual + row);
    }
    TM_INLINE float* load_row(int64_t row, float* scratch, int64_t numel) const {
        join(weight + row, residual + row, scratch, numel);
        return scratch;
    }
    TM_INLINE void store_row(int64_t row, const float* masters, int64_t numel) const {
        split(masters, weight + row, residual + row, numel);
    }
};

struct PlainMaster {
    using Weight = float;
    float* weight;
    uint16_t* residual;  // there is none

    TM_INLINE void prefetch(int64_t row) const { prefetch_row(weight + row); }
    TM_INLINE float* load_row(int64_t row, float*, int64_t) const { return weight + row; }
    TM_INLINE void store_row(int64_t, const float*, int64_t) const {}
};

TM_INLINE bool any_nan(const float* values, int64_t numel) {
    const int64_t half = numel / 2;
    uint32_t found = numel % 2 ? is_nan(values[numel - 1]) : 0;
    for (int64_t i = 0; i < half; ++i) found |= is_nan(values[i], values[half + i]);
    return found != 0;
}

template <class Step, class Master, class Grad>
struct UpdateLoop {
    using Weight = typename Master::Weight;
    using Function = void (*)(Step, float, Weight*, uint16_t*, float*, float*, float*, const Grad*, int64_t);

    static constexpr bool has(int moment) { return moment < Step::moments; }

    static TM_INLINE void run(const Step step, float grad_scale, Weight* weight, uint16_t* residual, float* first,
                              float* second, float* third, const Grad* grad, int64_t numel) {
        const Master master{weight, residual};
        int64_t row = 0;
        for (; row + row_numel <= numel; row += row_numel) {
            master.prefetch(row);
            if constexpr (has(0)) prefetch_row(first + row);
            if constexpr (has(1)) prefetch_row(second + row);
            if constexpr (has(2)) prefetch_row(third + row);
            prefetch_row(grad + row);
            run_row(step, grad_scale, master, row, first + row, second + row, third + row, grad + row, row_numel);
        }
        run_row(step, grad_scale, master, row, first + row, second + row, third + row, grad + row, numel - row);
    }

    static TM_INLINE void run_row(const Step& step, float grad_scale, const Master& master, int64_t row,
                                  float* __restrict first, float* __restrict second, float* __restrict third,
                                  const Grad* grad, int64_t numel) {
        alignas(64) float masters[row_numel];
        alignas(64) float grads[row_numel];
        float* __restrict p = master.load_row(row, masters, numel);
        const float* __restrict g = load_row(grad, grads, numel);
        TM_INDEPENDENT
        for (int64_t i = 0; i < numel; ++i) {
            float m0 = 0.0f, m1 = 0.0f, m2 = 0.0f;
            if constexpr (has(0)) m0 = first[i];
            if constexpr (has(1)) m1 = second[i];
            if constexpr (has(2)) m2 = third[i];
            step(p[i], g[i] * grad_scale, m0, m1, m2);
            if constexpr (has(0)) first[i] = m0;
            if constexpr (has(1)) second[i] = m1;
            if constexpr (has(2)) third[i] = m2;
        }
        // To look is cheaper than to select in the loop above, which has to keep up with memory.
        if (any_nan(p, numel)) {
            for (int64_t i = 0; i < numel; ++i) {
                p[i] = one_nan(p[i]);
                if constexpr (has(0)) first[i] = one_nan(first[i]);
                if constexpr (has(1)) second[i] = one_nan(second[i]);
                if constexpr (has(2)) third[i] = one_nan(third[i]);
            }
        }
        master.store_row(row, p, numel);
    }
};

// Part of a task that is gone through at once.
struct Tile {
    int32_t isa;
    const UpdateTask& task;
    int64_t begin;
    int64_t numel;
};

// What a tile is decoded to.
template <int64_t tile_numel>
struct Decoded {
    float moments[moments_max][tile_numel];
    uint16_t noise[2][tile_numel];
};

// The codes of the tile after this one.
template <int64_t tile_numel, class Code>
void prefetch_tile(const Code* codes) {
    constexpr int64_t line_numel = 64 / sizeof(Code);
    for (int64_t i = 0; i < tile_numel; i += line_numel) __builtin_prefetch(codes + tile_numel + i, true);
}

// How moments lie in memory. Those in fp32 are worked on where they lie.
struct Fp32Moments {
    static constexpr bool roots = false;
};

struct Bf16Moments {
    static constexpr bool roots = false;
    static constexpr int64_t tile_numel = bf16_tile_numel;
    static constexpr uint16_t noise_mask = 0xffff;
    static constexpr uint16_t half = half_bf16;

    static void prefetch(const Tile& tile, int moment) { prefetch_tile<tile_numel>(codes(tile, moment)); }
    static void decode(const Tile& tile, int moment, bool, float* values) {
        select<DecodeBf16Loop>(tile.isa)(codes(tile, moment), values, tile.numel);
    }
    static void encode(const Tile& tile, int moment, bool, float* values, const uint16_t* noise) {
        select<EncodeBf16Loop>(tile.isa)(values, noise, codes(tile, moment), tile.numel);
    }

private:
    static uint16_t* codes(const Tile& tile, int moment) {
        return static_cast<uint16_t*>(tile.task.moments[moment]) + tile.begin;
    }
};

struct Int8Moments {
    static constexpr bool roots = true;
    static constexpr int64_t tile_numel = int8_tile_numel;
    static constexpr uint16_t noise_mask = 0xff;
    static constexpr uint16_t half = half_int8;

    static void prefetch(const Tile& tile, int moment) { prefetch_tile<tile_numel>(codes<int8_t>(tile, moment)); }
    static void decode(const Tile& tile, int moment, bool non_negative, float* values) {
        non_negative ? decode_as<true>(tile, moment, values) : decode_as<false>(tile, moment, values);
    }
    static void encode(const Tile& tile, int moment, bool non_negative, float* values, const uint16_t* noise) {
        non_negative ? encode_as<true>(tile, moment, values, noise) : encode_as<false>(tile, moment, values, noise);
    }

private:
    template <bool non_negative>
    static void decode_as(const Tile& tile, int moment, float* values) {
        using Loop = DecodeInt8Loop<non_negative>;
        select<Loop>(tile.isa)(codes<typename Loop::Code>(tile, moment), scales(tile, moment), values, tile.numel);
    }
    template <bool non_negative>
    static void encode_as(const Tile& tile, int moment, float* values, const uint16_t* noise) {
        using Loop = EncodeInt8Loop<non_negative>;
        select<Loop>(tile.isa)(values, noise, codes<typename Loop::Code>(tile, moment), scales(tile, moment),
                               tile.numel);
    }
    template <class Code>
    static Code* codes(const Tile& tile, int moment) {
        return static_cast<Code*>(tile.task.moments[moment]) + tile.begin;
    }
    static float* scales(const Tile& tile, int moment) { return tile.task.scales[moment] + tile.begin / block_numel; }
};

struct Update {
    using Task = UpdateTask;

    static constexpr int64_t unit_numel = 32 * 1024;

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const UpdateTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        const Tile tile{isa, task, begin, std::min(unit_numel, task.numel - begin)};
        switch (task.moment_dtype) {
            case F32: return by_formula<Fp32Moments>(tile);
            case BF16: return by_formula<Bf16Moments>(tile);
            case INT8: return by_formula<Int8Moments>(tile);
        }
    }

    template <class Moments>
    static void by_formula(const Tile& tile) {
        const bool l2 = tile.task.weight_decay != 0.0f;
        switch (tile.task.formula) {
            case ADAMW: return adam<Moments, false, false>(tile);
            case ADAM: return l2 ? adam<Moments, true, false>(tile) : adam<Moments, false, false>(tile);
            case AMSGRADW: return adam<Moments, false, true>(tile);
            case AMSGRAD: return l2 ? adam<Moments, true, true>(tile) : adam<Moments, false, true>(tile);
            case SGD: return sgd<Moments, Momentum::NONE>(tile, l2);
            case SGD_MOMENTUM: return sgd<Moments, Momentum::CLASSIC>(tile, l2);
            case SGD_NESTEROV: return sgd<Moments, Momentum::NESTEROV>(tile, l2);
            case LION: return by_format<Lion>(tile, Moments());
            case ADAGRAD:
                return l2 ? by_format<Adagrad<true, Moments::roots>>(tile, Moments())
                          : by_format<Adagrad<false, Moments::roots>>(tile, Moments());
        }
    }

    template <class Moments, bool l2, bool amsgrad>
    static void adam(const Tile& tile) {
        tile.task.one_minus_beta1 >= 0.5f ? by_format<Adam<l2, true, amsgrad, Moments::roots>>(tile, Moments())
                                          : by_format<Adam<l2, false, amsgrad, Moments::roots>>(tile, Moments());
    }

    template <class Moments, Momentum momentum>
    static void sgd(const Tile& tile, bool l2) {
        l2 ? by_format<Sgd<true, momentum>>(tile, Moments()) : by_format<Sgd<false, momentum>>(tile, Moments());
    }

    template <class Step>
    static void by_format(const Tile& tile, Fp32Moments) {
        float* moments[moments_max] = {};
        for (int k = 0; k < Step::moments; ++k) moments[k] = static_cast<float*>(tile.task.moments[k]) + tile.begin;
        by_grad<Step>(tile, moments);
    }

    template <class Step, class Moments>
    static void by_format(const Tile& whole, Moments) {
        if constexpr (Step::moments == 0) return by_format<Step>(whole, Fp32Moments());
        constexpr int64_t tile_numel = Moments::tile_numel;
        alignas(64) Decoded<tile_numel> decoded;
        float* moments[moments_max] = {decoded.moments[0], decoded.moments[1], decoded.moments[2]};
        const int64_t end = whole.begin + whole.numel;
        for (int64_t begin = whole.begin; begin < end; begin += tile_numel) {
            const Tile tile{whole.isa, whole.task, begin, std::min(tile_numel, end - begin)};
            for (int k = 0; k < Step::moments; ++k) {
                Moments::prefetch(tile, k);
                Moments::decode(tile, k, Step::non_negative[k], moments[k]);
            }
            by_grad<Step>(tile, moments);
            select<NoiseLoop>(tile.isa)(tile.task.noise + uint32_t(begin), Moments::noise_mask, decoded.noise[0],
                                        decoded.noise[1], tile.numel);
            for (int k = 0; k < Step::moments; ++k) {
                // A maximum has no mean that chance would keep: it would only climb.
                if (k == 2) std::fill_n(decoded.noise[0], tile.numel, Moments::half);
                Moments::encode(tile, k, Step::non_negative[k], moments[k], decoded.noise[k % 2]);
            }
        }
    }

    template <class Step>
    static void by_grad(const Tile& tile, float* const* moments) {
        if (tile.task.grad_dtype == BF16) {
            by_master<Step, uint16_t>(tile, moments);
        } else {
            by_master<Step, float>(tile, moments);
        }
    }

    template <class Step, class Grad>
    static void by_master(const Tile& tile, float* const* moments) {
        if (tile.task.weight_dtype == BF16) {
            run_loop<Step, Grad, SplitMaster>(tile, tile.task.residual + tile.begin, moments);
        } else {
            run_loop<Step, Grad, PlainMaster>(tile, nullptr, moments);
        }
    }

    template <class Step, class Grad, class Master>
    static void run_loop(const Tile& tile, uint16_t* residual, float* const* moments) {
        select<UpdateLoop<Step, Master, Grad>>(tile.isa)(
            Step(tile.task), tile.task.grad_scale, static_cast<typename Master::Weight*>(tile.task.weight) + tile.begin,
            residual, moments[0], moments[1], moments[2], static_cast<const Grad*>(tile.task.grad) + tile.begin,
            tile.numel);
    }
};

}  // namespace

TM_EXPORT void tm_update(int32_t isa, const UpdateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Update>(isa, tasks, count, threads);
}

}  // namespace tiermem
