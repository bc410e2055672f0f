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

// The loop goes row by row and asks for rows to come: the hardware alone follows ten streams less well. At 512 elements
// ahead that gained 12 % with AVX2 and 4 % with AVX-512; 256 ahead gained less, longer rows lose it again. Addresses past the
// end do no harm: a prefetch never faults.
constexpr int64_t row_numel = 64;
constexpr int64_t prefetch_numel = 512;

template <class Value>
TM_INLINE void prefetch_row(Value* row) {
    constexpr int64_t line_numel = 64 / sizeof(Value);
    for (int64_t i = 0; i < row_numel; i += line_numel) {
        __builtin_prefetch(row + prefetch_numel + i, !std::is_const_v<Value>);
    }
}

// How masters lie in memory: in two halves, or as plain fp32.
struct SplitMaster {
    using Weight = uint16_t;
    uint16_t* weight;
    uint16_t* residual;

    TM_INLINE void prefetch(int64_t row) const {
        prefetch_row(weight + row);
        prefetch_row(residual + row);
    }
    TM_INLINE float load(int64_t i) const { return join(weight[i], residual[i]); }
    TM_INLINE void store(int64_t i, float value) const { split(value, weight[i], residual[i]); }
};

struct PlainMaster {
    using Weight = float;
    float* weight;
    uint16_t* residual;  // there is none

    TM_INLINE void prefetch(int64_t row) const { prefetch_row(weight + row); }
    TM_INLINE float load(int64_t i) const { return weight[i]; }
    TM_INLINE void store(int64_t i, float value) const { weight[i] = value; }
};

template <class Step, class Master, class Grad>
struct UpdateLoop {
    using Weight = typename Master::Weight;
    using Function = void (*)(Step, float, Weight*, uint16_t*, float*, float*, float*, const Grad*, int64_t);

    static constexpr bool has(int moment) { return moment < Step::moments; }

    static TM_INLINE void run(const Step step, float grad_scale, Weight* __restrict weight,
                              uint16_t* __restrict residual, float* __restrict first, float* __restrict second,
                              float* __restrict third, const Grad* __restrict grad, int64_t numel) {
        const Master master{weight, residual};
        uint32_t nans = 0;
        for (int64_t row = 0; row < numel; row += row_numel) {
            master.prefetch(row);
            if constexpr (has(0)) prefetch_row(first + row);
            if constexpr (has(1)) prefetch_row(second + row);
            if constexpr (has(2)) prefetch_row(third + row);
            prefetch_row(grad + row);
            const int64_t end = std::min(row + row_numel, numel);
            TM_INDEPENDENT
            for (int64_t i = row; i < end; ++i) {
                float p = master.load(i);
                float m0 = 0.0f, m1 = 0.0f, m2 = 0.0f;
                if constexpr (has(0)) m0 = first[i];
                if constexpr (has(1)) m1 = second[i];
                if constexpr (has(2)) m2 = third[i];
                step(p, widen(grad[i]) * grad_scale, m0, m1, m2);
                nans |= is_nan(p);
                master.store(i, p);
                if constexpr (has(0)) first[i] = m0;
                if constexpr (has(1)) second[i] = m1;
                if constexpr (has(2)) third[i] = m2;
            }
        }
        if (!nans) return;
        // To look is cheaper than to select in the loop above, which has to keep up with memory.
        for (int64_t i = 0; i < numel; ++i) {
            master.store(i, one_nan(master.load(i)));
            if constexpr (has(0)) first[i] = one_nan(first[i]);
            if constexpr (has(1)) second[i] = one_nan(second[i]);
            if constexpr (has(2)) third[i] = one_nan(third[i]);
        }
    }
};

// Part of a task: what lies within a tile.
struct Tile {
    int32_t isa;
    const UpdateTask& task;
    int64_t begin;
    int64_t numel;
};

// What a tile is decoded to. Noise is not needed where nothing is rounded by chance.
struct Decoded {
    static constexpr int64_t tile_numel = 1024;  // all of it in the first-level cache, and whole blocks
    static_assert(tile_numel % block_numel == 0);

    float moments[moments_max][tile_numel];
    uint32_t noise[tile_numel];
};

// The codes of the tile after this one.
template <class Code>
void prefetch_tile(const Code* codes) {
    constexpr int64_t line_numel = 64 / sizeof(Code);
    for (int64_t i = 0; i < Decoded::tile_numel; i += line_numel) {
        __builtin_prefetch(codes + Decoded::tile_numel + i, true);
    }
}

struct Bf16Moments {
    static void prefetch(const Tile& tile, int moment) { prefetch_tile(codes(tile, moment)); }
    static void decode(const Tile& tile, int moment, bool, float* values) {
        select<DecodeBf16Loop>(tile.isa)(codes(tile, moment), values, tile.numel);
    }
    static void encode(const Tile& tile, int moment, bool, float* values, const uint32_t* noise) {
        select<EncodeBf16Loop>(tile.isa)(values, noise, moment % 2 * 16, codes(tile, moment), tile.numel);
    }
    static constexpr uint32_t half = half_bf16;

private:
    static uint16_t* codes(const Tile& tile, int moment) {
        return static_cast<uint16_t*>(tile.task.moments[moment]) + tile.begin;
    }
};

struct Int8Moments {
    static void prefetch(const Tile& tile, int moment) { prefetch_tile(codes<int8_t>(tile, moment)); }
    static void decode(const Tile& tile, int moment, bool non_negative, float* values) {
        if (non_negative) {
            select<DecodeInt8Loop<true>>(tile.isa)(codes<uint8_t>(tile, moment), scales(tile, moment), values, tile.numel);
        } else {
            select<DecodeInt8Loop<false>>(tile.isa)(codes<int8_t>(tile, moment), scales(tile, moment), values, tile.numel);
        }
    }
    static void encode(const Tile& tile, int moment, bool non_negative, float* values, const uint32_t* noise) {
        const int32_t shift = moment % 2 * 16;
        if (non_negative) {
            select<EncodeInt8Loop<true>>(tile.isa)(values, noise, shift, codes<uint8_t>(tile, moment),
                                                   scales(tile, moment), tile.numel);
        } else {
            select<EncodeInt8Loop<false>>(tile.isa)(values, noise, shift, codes<int8_t>(tile, moment),
                                                    scales(tile, moment), tile.numel);
        }
    }
    static constexpr uint32_t half = half_int8;

private:
    template <class Code>
    static Code* codes(const Tile& tile, int moment) {
        return static_cast<Code*>(tile.task.moments[moment]) + tile.begin;
    }
    static float* scales(const Tile& tile, int moment) { return tile.task.scales[moment] + tile.begin / block_numel; }
};

struct Update {
    using Task = UpdateTask;

    static constexpr int64_t unit_numel = 32 * 1024;
    static constexpr int64_t tile_numel = 4096;  // what is gone through again for one NaN

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const UpdateTask& task, int64_t unit) {
        const int64_t end = std::min((unit + 1) * unit_numel, task.numel);
        const int64_t step = task.moment_dtype == F32 ? tile_numel : Decoded::tile_numel;
        for (int64_t begin = unit * unit_numel; begin < end; begin += step) {
            run_tile({isa, task, begin, std::min(step, end - begin)});
        }
    }

    static void run_tile(const Tile& tile) {
        const bool l2 = tile.task.weight_decay != 0.0f;
        switch (tile.task.formula) {
            case ADAMW: return adam<false, false>(tile);
            case ADAM: return l2 ? adam<true, false>(tile) : adam<false, false>(tile);
            case AMSGRADW: return adam<false, true>(tile);
            case AMSGRAD: return l2 ? adam<true, true>(tile) : adam<false, true>(tile);
            case SGD: return sgd<Momentum::NONE>(tile, l2);
            case SGD_MOMENTUM: return sgd<Momentum::CLASSIC>(tile, l2);
            case SGD_NESTEROV: return sgd<Momentum::NESTEROV>(tile, l2);
            case LION: return with_moments<Lion>(tile);
            case ADAGRAD: return l2 ? with_moments<Adagrad<true>>(tile) : with_moments<Adagrad<false>>(tile);
        }
    }

    template <bool l2, bool amsgrad>
    static void adam(const Tile& tile) {
        tile.task.one_minus_beta1 >= 0.5f ? with_moments<Adam<l2, true, amsgrad>>(tile)
                                          : with_moments<Adam<l2, false, amsgrad>>(tile);
    }

    template <Momentum momentum>
    static void sgd(const Tile& tile, bool l2) {
        l2 ? with_moments<Sgd<true, momentum>>(tile) : with_moments<Sgd<false, momentum>>(tile);
    }

    template <class Step>
    static void with_moments(const Tile& tile) {
        if (tile.task.moment_dtype == BF16 && Step::moments > 0) {
            compact<Step, Bf16Moments>(tile);
        } else if (tile.task.moment_dtype == INT8 && Step::moments > 0) {
            compact<Step, Int8Moments>(tile);
        } else {
            float* moments[moments_max] = {};
            for (int k = 0; k < Step::moments; ++k) moments[k] = static_cast<float*>(tile.task.moments[k]) + tile.begin;
            with_grad<Step>(tile, moments);
        }
    }

    template <class Step, class Format>
    static void compact(const Tile& tile) {
        alignas(64) Decoded decoded;
        float* moments[moments_max] = {decoded.moments[0], decoded.moments[1], decoded.moments[2]};
        for (int k = 0; k < Step::moments; ++k) {
            Format::prefetch(tile, k);
            Format::decode(tile, k, Step::non_negative[k], moments[k]);
        }
        with_grad<Step>(tile, moments);
        select<NoiseLoop>(tile.isa)(tile.task.noise + uint32_t(tile.begin), decoded.noise, tile.numel);
        for (int k = 0; k < Step::moments; ++k) {
            // A maximum has no mean that chance would keep: it would only climb.
            if (k == 2) std::fill_n(decoded.noise, tile.numel, Format::half);
            Format::encode(tile, k, Step::non_negative[k], moments[k], decoded.noise);
        }
    }

    template <class Step>
    static void with_grad(const Tile& tile, float* const* moments) {
        if (tile.task.grad_dtype == BF16) {
            with_master<Step, uint16_t>(tile, moments);
        } else {
            with_master<Step, float>(tile, moments);
        }
    }

    template <class Step, class Grad>
    static void with_master(const Tile& tile, float* const* moments) {
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
