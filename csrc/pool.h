// Work shared by a fixed number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>

namespace tiermem {

// Calls body(context) on this thread and on up to `helpers` others at once, and returns when all of them have returned.
// The body must take its share from a common counter: any number of helpers may come, also none.
void share(int32_t helpers, void (*body)(void*), void* context);

// Round to nearest, denormals kept: what the bits of a result rest on, whatever the calling thread has set.
class DefaultFloatEnvironment {
public:
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

private:
    std::fenv_t saved_;
};

// Below this many elements per thread, waking a thread costs more than it gains.
constexpr int64_t numel_per_thread_min = 64 * 1024;

// Runs a kernel over every task. A task is cut in units (Kernel::units), which the threads take in order and hand to
// Kernel::run.
template <class Kernel>
void run_tasks(int32_t isa, const typename Kernel::Task* tasks, int64_t count, int32_t threads) {
    struct Share {
        int32_t isa;
        const typename Kernel::Task* tasks;
        int64_t units;
        std::atomic<int64_t> next;

        void take() {
            const DefaultFloatEnvironment environment;
            int64_t task = 0;
            int64_t units_before = 0;  // of tasks[task]
            for (int64_t unit = next++; unit < units; unit = next++) {
                while (unit - units_before >= Kernel::units(tasks[task])) units_before += Kernel::units(tasks[task++]);
                Kernel::run(isa, tasks[task], unit - units_before);
            }
        }
    };
    Share share_{isa, tasks, 0, {0}};
    int64_t numel = 0;
    for (int64_t task = 0; task < count; ++task) {
        share_.units += Kernel::units(tasks[task]);
        numel += tasks[task].numel;
    }
    const int64_t useful = std::min({int64_t(threads), numel / numel_per_thread_min, share_.units});
    share(int32_t(std::max<int64_t>(useful, 1) - 1), [](void* context) { static_cast<Share*>(context)->take(); },
          &share_);
}

}  // namespace tiermem
