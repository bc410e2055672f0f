// The limit that the optimizer pass is measured against: its memory traffic, and next to no arithmetic.

#include <algorithm>

#include "abi.h"
#include "isa.h"
#include "pool.h"

namespace tiermem {
namespace {

constexpr int64_t unit_numel = 32 * 1024;

// A split master and two moments: 26 bytes per element. `none` is zero, which the compiler does not know: the values
// stay.
struct SplitTraffic {
    using Function = void (*)(uint16_t*, uint16_t*, uint32_t*, uint32_t*, const uint16_t*, uint16_t, int64_t);

    static TM_INLINE void run(uint16_t* __restrict weight, uint16_t* __restrict residual, uint32_t* __restrict first,
                              uint32_t* __restrict second, const uint16_t* __restrict grad, uint16_t none,
                              int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) {
            const uint16_t g = grad[i] & none;
            weight[i] = uint16_t(weight[i] + g);
            residual[i] = uint16_t(residual[i] + g);
            first[i] += none;
            second[i] += none;
        }
    }
};

// An fp32 master, two moments and an fp32 gradient: 28 bytes per element.
struct PlainTraffic {
    using Function = void (*)(uint32_t*, uint32_t*, uint32_t*, const uint32_t*, uint32_t, int64_t);

    static TM_INLINE void run(uint32_t* __restrict weight, uint32_t* __restrict first, uint32_t* __restrict second,
                              const uint32_t* __restrict grad, uint32_t none, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) {
            weight[i] += grad[i] & none;
            first[i] += none;
            second[i] += none;
        }
    }
};

struct Traffic {
    using Task = UpdateTask;

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const UpdateTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        const int64_t numel = std::min(unit_numel, task.numel - begin);
        uint32_t* first = static_cast<uint32_t*>(task.moments[0]) + begin;
        uint32_t* second = static_cast<uint32_t*>(task.moments[1]) + begin;
        volatile uint16_t zero = 0;
        const uint16_t none = zero;
        if (task.weight_dtype == BF16) {
            select<SplitTraffic>(isa)(static_cast<uint16_t*>(task.weight) + begin, task.residual + begin, first, second,
                                      static_cast<const uint16_t*>(task.grad) + begin, none, numel);
        } else {
            select<PlainTraffic>(isa)(static_cast<uint32_t*>(task.weight) + begin, first, second,
                                      static_cast<const uint32_t*>(task.grad) + begin, none, numel);
        }
    }
};

}  // namespace

// Reads and writes what tm_update does, and changes nothing, for tasks whose masters and gradients have one dtype and
// whose moments are two in fp32.
TM_EXPORT void tm_traffic(int32_t isa, const UpdateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Traffic>(isa, tasks, count, threads);
}

}  // namespace tiermem
