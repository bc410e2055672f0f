// The fused optimizer pass: gradient in; weight, residual and moments in and out.

#include <algorithm>

#include "abi.h"
#include "isa.h"
#include "pool.h"

namespace tiermem {

// Elements begin .. begin + numel of a task. `begin` is a multiple of block_numel. In update_*.cpp, one per instruction
// set.
namespace baseline {
void update(const UpdateTask& task, int64_t begin, int64_t numel);
}
namespace v3 {
void update(const UpdateTask& task, int64_t begin, int64_t numel);
}
namespace v4 {
void update(const UpdateTask& task, int64_t begin, int64_t numel);
}

namespace {

struct Update {
    using Task = UpdateTask;

    static constexpr int64_t unit_numel = 32 * 1024;

    static int64_t units(const UpdateTask& task) { return (task.numel + unit_numel - 1) / unit_numel; }

    static void run(int32_t isa, const UpdateTask& task, int64_t unit) {
        const int64_t begin = unit * unit_numel;
        const int64_t numel = std::min(unit_numel, task.numel - begin);
#if defined(__x86_64__)
        if (isa == V4) return v4::update(task, begin, numel);
        if (isa == V3) return v3::update(task, begin, numel);
#endif
        (void)isa;
        baseline::update(task, begin, numel);
    }
};

}  // namespace

TM_EXPORT void tm_update(int32_t isa, const UpdateTask* tasks, int64_t count, int32_t threads) {
    run_tasks<Update>(isa, tasks, count, threads);
}

}  // namespace tiermem
