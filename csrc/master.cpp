// fp32 masters to and from their two halves.

#include <algorithm>

#include "abi.h"
#include "numbers.h"
#include "pool.h"

namespace tiermem {
namespace {

struct MasterTask {
    float* master;
    uint16_t* weight;
    uint16_t* residual;
    int64_t numel;
};

constexpr int64_t unit_numel = 64 * 1024;

struct SplitLoop {
    using Function = void (*)(const float*, uint16_t*, uint16_t*, int64_t);

    static TM_INLINE void run(const float* __restrict master, uint16_t* __restrict weight,
                              uint16_t* __restrict residual, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) split(one_nan(master[i]), weight[i], residual[i]);
    }
};

struct JoinLoop {
    using Function = void (*)(const uint16_t*, const uint16_t*, float*, int64_t);

    static TM_INLINE void run(const uint16_t* __restrict weight, const uint16_t* __restrict residual,
                              float* __restrict master, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) master[i] = join(weight[i], residual[i]);
    }
};

template <bool is_split>
struct Convert {
    using Task = MasterTask;

    static int64_t units(const MasterTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const MasterTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        const int64_t numel = std::min(unit_numel, task.numel - begin);
        if constexpr (is_split) {
            select<SplitLoop>(isa)(task.master + begin, task.weight + begin, task.residual + begin, numel);
        } else {
            select<JoinLoop>(isa)(task.weight + begin, task.residual + begin, task.master + begin, numel);
        }
    }
};

}  // namespace

TM_EXPORT void tm_split(int32_t isa, float* master, uint16_t* weight, uint16_t* residual, int64_t numel,
                        int32_t threads) {
    const MasterTask task{master, weight, residual, numel};
    run_tasks<Convert<true>>(isa, &task, 1, threads);
}

TM_EXPORT void tm_join(int32_t isa, uint16_t* weight, uint16_t* residual, float* master, int64_t numel,
                       int32_t threads) {
    const MasterTask task{master, weight, residual, numel};
    run_tasks<Convert<false>>(isa, &task, 1, threads);
}

}  // namespace tiermem
