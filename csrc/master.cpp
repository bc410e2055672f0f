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

struct Split {
    using Task = MasterTask;
    using Function = void (*)(const MasterTask&, int64_t);

    static int64_t units(const MasterTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static TM_INLINE void run(const MasterTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        loop(task.master + begin, task.weight + begin, task.residual + begin,
             std::min(unit_numel, task.numel - begin));
    }

    static TM_INLINE void loop(const float* __restrict master, uint16_t* __restrict weight,
                               uint16_t* __restrict residual, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) split(one_nan(master[i]), weight[i], residual[i]);
    }
};

struct Join {
    using Task = MasterTask;
    using Function = void (*)(const MasterTask&, int64_t);

    static int64_t units(const MasterTask& task) { return Split::units(task); }

    static TM_INLINE void run(const MasterTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        loop(task.weight + begin, task.residual + begin, task.master + begin,
             std::min(unit_numel, task.numel - begin));
    }

    static TM_INLINE void loop(const uint16_t* __restrict weight, const uint16_t* __restrict residual,
                               float* __restrict master, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) master[i] = join(weight[i], residual[i]);
    }
};

}  // namespace

TM_EXPORT void tm_split(int32_t isa, float* master, uint16_t* weight, uint16_t* residual, int64_t numel,
                        int32_t threads) {
    const MasterTask task{master, weight, residual, numel};
    run_tasks<Split>(isa, &task, 1, threads);
}

TM_EXPORT void tm_join(int32_t isa, uint16_t* weight, uint16_t* residual, float* master, int64_t numel,
                       int32_t threads) {
    const MasterTask task{master, weight, residual, numel};
    run_tasks<Join>(isa, &task, 1, threads);
}

}  // namespace tiermem
