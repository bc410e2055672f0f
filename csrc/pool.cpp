#include "pool.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace tiermem {
namespace {

// One call of share(). It lies on the caller's stack: the caller leaves only when no helper holds it.
struct Job {
    void (*body)(void*);
    void* context;
    int32_t wanted;   // helpers that may still join
    int32_t working;  // helpers inside the body
    Job* next;
};

class Pool {
public:
    void share(Job& job) {
        std::unique_lock lock(mutex_);
        grow(job.wanted);
        job.next = jobs_;
        jobs_ = &job;
        const bool many = job.wanted > 1;
        lock.unlock();
        if (many) {
            work_.notify_all();
        } else {
            work_.notify_one();
        }

        job.body(job.context);

        lock.lock();
        withdraw(job);
        idle_.wait(lock, [&] { return job.working == 0; });
    }

    void stop() {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        std::vector<std::thread> workers = std::move(workers_);
        workers_.clear();
        lock.unlock();
        work_.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

private:
    void grow(int32_t helpers) {
        try {
            while (!stopping_ && int32_t(workers_.size()) < helpers) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // No more threads to be had: the caller does the work with those there are.
        }
    }

    void withdraw(Job& job) {
        for (Job** link = &jobs_; *link; link = &(*link)->next) {
            if (*link != &job) continue;
            *link = job.next;
            return;
        }
    }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            work_.wait(lock, [&] { return jobs_ || stopping_; });
            if (stopping_) return;
            Job& job = *jobs_;
            ++job.working;
            if (--job.wanted == 0) jobs_ = job.next;
            lock.unlock();
            job.body(job.context);
            lock.lock();
            if (--job.working == 0) idle_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_;  // a job has come, or the end
    std::condition_variable idle_;  // the last helper has left a job
    Job* jobs_ = nullptr;
    std::vector<std::thread> workers_;
    bool stopping_ = false;
};

// Never deleted: at exit, threads of the interpreter may still be inside a call.
std::atomic<Pool*> current{nullptr};

// A forked child has none of its parent's threads, and perhaps a locked mutex: it starts with a pool of its own.
void forget_after_fork() { current.store(nullptr); }

Pool& pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
    (void)registered;
    Pool* existing = current.load();
    if (existing) return *existing;
    Pool* created = new Pool;
    if (current.compare_exchange_strong(existing, created)) return *created;
    delete created;
    return *existing;
}

// Runs at exit and before the library is unmapped.
__attribute__((destructor)) void stop_threads() {
    if (Pool* existing = current.load()) existing->stop();
}

}  // namespace

void share(int32_t helpers, void (*body)(void*), void* context) {
    if (helpers <= 0) {
        body(context);
        return;
    }
    Job job{body, context, helpers, 0, nullptr};
    pool().share(job);
}

}  // namespace tiermem
