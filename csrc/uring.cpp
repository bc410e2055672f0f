// Transfers: reads and writes of any size, moved by a thread of their own that never needs the interpreter.
//
// The thread is the only user of a ring. It cuts transfers into *pieces*, keeps at most `depth` of them in flight over
// all transfers, first come, first served, and continues short ones. A transfer ends when nothing in the kernel
// touches its memory any more; its result is the number of bytes that moved without a gap from its start, or, if there
// are none, 0 at the end of the file or a negative errno. What has ended waits to be taken by `reap`, and a *bell*, an
// eventfd, rings. Functions return 0 or a count, or a negative errno.

#include "abi.h"
#include "ring.h"

#include <cerrno>

#ifdef TM_HAS_URING

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tiermem {
namespace {

class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    operator int() const { return fd_; }

private:
    int fd_;
};

void ring_bell(int fd) {
    const uint64_t one = 1;
    // Fails only when it has rung 2^64 times.
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void silence_bell(int fd) {
    uint64_t rung;
    while (read(fd, &rung, sizeof rung) < 0 && errno == EINTR) {
    }
}

struct Transfer {
    bool write;
    int file;
    int file_slot;  // where the file is registered, or -1
    char* memory;
    uint64_t nbytes;
    uint64_t offset;
    int buffer_slot;  // where the memory is registered, or -1
    uint64_t tag;

    uint64_t begun = 0;       // bytes that have been given to pieces
    unsigned pieces = 0;      // in flight
    uint64_t moved = nbytes;  // without a gap from the start, once it has ended
    int error = 0;            // of the piece behind them

    int64_t result() const { return moved ? int64_t(moved) : error; }
};

using Transfers = std::list<Transfer>;  // spliced from list to list: nothing is allocated on the way

struct Piece {
    Transfers::iterator transfer;
    uint64_t start;  // in the transfer
    uint32_t nbytes;
    uint32_t done;
};

class Mover {
public:
    Mover(unsigned depth, uint32_t piece_bytes, int bell)
        : piece_bytes_(piece_bytes),
          pieces_(depth),
          alarm_(eventfd(0, EFD_CLOEXEC)),
          bell_(fcntl(bell, F_DUPFD_CLOEXEC, 0)) {
        free_.reserve(depth);
        for (unsigned i = depth; i-- > 0;) free_.push_back(i);
    }

    ~Mover() { finish(); }

    // Returns when the thread has its ring.
    int start() {
        if (alarm_ < 0 || bell_ < 0) return -errno;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // the thread inherits it: signals are for the interpreter's own
        int error = 0;
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error& refused) {
            error = -refused.code().value();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error) return error;
        const int opened = call([](Ring&) { return 0; });
        if (opened < 0) thread_.join();
        return opened;
    }

    // Waits for every transfer and ends the thread. What has ended can still be reaped.
    void finish() {
        {
            const std::lock_guard lock(mutex_);
            finishing_ = true;
            wake();
        }
        if (thread_.joinable()) thread_.join();
    }

    int submit(const Transfer& transfer) {
        Transfers one;
        try {
            one.push_back(transfer);
        } catch (const std::bad_alloc&) {
            return -ENOMEM;
        }
        const std::lock_guard lock(mutex_);
        if (refusal_) return refusal_;
        arrived_.splice(arrived_.end(), one);
        return 0;
    }

    void flush() {
        const std::lock_guard lock(mutex_);
        wake();
    }

    void cancel(uint64_t tag) {
        const std::lock_guard lock(mutex_);
        try {
            cancelled_.push_back(tag);
        } catch (const std::bad_alloc&) {
            return;  // it goes on to its end
        }
        wake();
    }

    int reap(uint64_t* tags, int64_t* results, int room) {
        silence_bell(bell_);
        Transfers taken;
        {
            const std::lock_guard lock(mutex_);
            ringing_ = false;
            auto last = ended_.begin();
            for (int i = 0; i < room && last != ended_.end(); ++i) ++last;
            taken.splice(taken.end(), ended_, ended_.begin(), last);
        }
        int count = 0;
        for (const Transfer& transfer : taken) {
            tags[count] = transfer.tag;
            results[count] = transfer.result();
            ++count;
        }
        return count;
    }

    // Has the thread do something with the ring, between two looks at it, and returns what that returned.
    int call(const std::function<int(Ring&)>& job) {
        const std::lock_guard turn(call_turn_);
        std::unique_lock lock(mutex_);
        if (refusal_) return refusal_;
        job_ = &job;
        wake();
        job_done_.wait(lock, [this] { return job_ == nullptr; });
        return job_result_;
    }

    int set_file(unsigned slot, int file) {
        return call([=](Ring& ring) {
            change_all([=](Transfer& transfer) {
                if (transfer.file_slot == int(slot)) transfer.file_slot = -1;
            });
            return ring.set_file(slot, file);
        });
    }

    int set_buffer(unsigned slot, uint64_t address, uint64_t nbytes) {
        return call([=](Ring& ring) {
            change_all([=](Transfer& transfer) {
                if (transfer.buffer_slot == int(slot)) transfer.buffer_slot = -1;
            });
            return ring.set_buffer(slot, address, nbytes);
        });
    }

private:
    static constexpr uint64_t alarm_tag = ~uint64_t(0);  // pieces are tagged by their index

    // With the mutex held.
    void wake() {
        if (asleep_) ring_bell(alarm_);
        asleep_ = false;
    }

    void work() {
        prctl(PR_SET_NAME, "tiermem-uring");
        Ring ring;  // made and given up by the one thread that may use it
        int error = ring.open(unsigned(pieces_.size()) + 1);
        while (!error && take(ring)) {
            begin_pieces(ring);
            listen(ring);
            announce();
            error = ring.submit_and_wait();
            if (!error) error = reap(ring);
        }
        if (!error) stop_listening(ring);
        refuse(error ? error : -ESHUTDOWN);
    }

    // What others left here since the last time. False if nothing is left to do, ever.
    bool take(Ring& ring) {
        std::unique_lock lock(mutex_);
        waiting_.splice(waiting_.end(), arrived_);
        std::vector<uint64_t> cancelled;
        cancelled.swap(cancelled_);
        const std::function<int(Ring&)>* job = job_;
        const bool finishing = finishing_;
        asleep_ = true;
        lock.unlock();

        for (const uint64_t tag : cancelled) stop(tag);
        if (job) {
            const int result = (*job)(ring);
            lock.lock();
            reply(result);
        }
        return !(finishing && waiting_.empty() && underway_.empty());
    }

    void begin_pieces(Ring& ring) {
        while (!free_.empty() && !waiting_.empty()) {
            const auto transfer = waiting_.begin();
            const unsigned index = free_.back();
            free_.pop_back();
            const uint64_t rest = transfer->nbytes - transfer->begun;
            pieces_[index] = {transfer, transfer->begun, uint32_t(std::min<uint64_t>(rest, piece_bytes_)), 0};
            transfer->begun += pieces_[index].nbytes;
            ++transfer->pieces;
            put(ring, index);
            if (transfer->begun == transfer->nbytes) underway_.splice(underway_.end(), waiting_, transfer);
        }
    }

    void put(Ring& ring, unsigned index) {
        const Piece& piece = pieces_[index];
        const Transfer& transfer = *piece.transfer;
        const uint64_t at = piece.start + piece.done;
        const uint32_t rest = piece.nbytes - piece.done;
        ring.put_move(transfer.write, transfer.file, transfer.file_slot, transfer.memory + at, rest,
                      transfer.offset + at, transfer.buffer_slot, index);
    }

    // An error only if the thread could not be woken any more.
    int reap(Ring& ring) {
        int error = 0;
        ring.reap([&](uint64_t tag, int result) {
            if (tag != alarm_tag) {
                account(ring, unsigned(tag), result);
                return;
            }
            listening_ = false;
            if (result < 0 && result != -EINTR) error = result;
        });
        return error;
    }

    void account(Ring& ring, unsigned index, int result) {
        Piece& piece = pieces_[index];
        const auto transfer = piece.transfer;
        if (result > 0) {
            piece.done += uint32_t(result);
            if (piece.done < piece.nbytes) {
                put(ring, index);
                return;
            }
        } else {
            end_at(transfer, piece.start + piece.done, result);
        }
        free_.push_back(index);
        --transfer->pieces;
        if (transfer->begun == transfer->nbytes && !transfer->pieces) {
            leaving_.splice(leaving_.end(), underway_, transfer);
        }
    }

    // Has a read of the alarm in flight, to be woken by.
    void listen(Ring& ring) {
        if (listening_) return;
        ring.put_move(false, alarm_, -1, &alarms_, sizeof alarms_, 0, -1, alarm_tag);
        listening_ = true;
    }

    void stop_listening(Ring& ring) {
        if (listening_) ring_bell(alarm_);
        while (listening_ && !ring.submit_and_wait()) (void)reap(ring);
    }

    // What lies at `at` and behind it does not count, and is not begun if it was not.
    void end_at(Transfers::iterator transfer, uint64_t at, int error) {
        if (at < transfer->moved) {
            transfer->moved = at;
            transfer->error = error;
        }
        if (transfer->begun < transfer->nbytes) underway_.splice(underway_.end(), waiting_, transfer);
        transfer->begun = transfer->nbytes;
    }

    void stop(uint64_t tag) {
        for (auto transfer = waiting_.begin(); transfer != waiting_.end(); ++transfer) {
            if (transfer->tag != tag) continue;
            end_at(transfer, transfer->begun, -ECANCELED);
            if (!transfer->pieces) leaving_.splice(leaving_.end(), underway_, transfer);
            return;
        }
    }

    // Before a slot changes: what was to use it does without.
    template <class Change>
    void change_all(Change change) {
        for (Transfer& transfer : waiting_) change(transfer);
        for (Transfer& transfer : underway_) change(transfer);
    }

    void announce() {
        if (leaving_.empty()) return;
        const std::lock_guard lock(mutex_);
        announce_locked();
    }

    void announce_locked() {
        ended_.splice(ended_.end(), leaving_);
        if (!ringing_) ring_bell(bell_);
        ringing_ = true;
    }

    void reply(int result) {
        job_ = nullptr;
        job_result_ = result;
        job_done_.notify_all();
    }

    // The thread's last act.
    void refuse(int error) {
        const std::lock_guard lock(mutex_);
        refusal_ = error;
        asleep_ = false;
        if (job_) reply(error);
        // Without an error of the ring there are none but those that came too late. With one (somebody closed its
        // descriptor, say) nobody can know what the kernel still does.
        for (Transfers* some : {&underway_, &waiting_, &arrived_}) {
            for (Transfer& transfer : *some) {
                transfer.moved = 0;
                transfer.error = error;
            }
            leaving_.splice(leaving_.end(), *some);
        }
        announce_locked();
    }

    const uint32_t piece_bytes_;
    std::vector<Piece> pieces_;
    const Descriptor alarm_;
    const Descriptor bell_;
    std::thread thread_;

    // The thread's own.
    std::vector<unsigned> free_;  // pieces that are not in flight
    Transfers waiting_;           // some of their bytes have not begun
    Transfers underway_;          // all have
    Transfers leaving_;
    bool listening_ = false;
    uint64_t alarms_ = 0;

    // Between the thread and others.
    std::mutex mutex_;
    Transfers arrived_;
    Transfers ended_;
    std::vector<uint64_t> cancelled_;
    bool asleep_ = false;   // it must be woken to see what has come
    bool ringing_ = false;  // nobody has looked since the bell rang
    bool finishing_ = false;
    int refusal_ = 0;  // why nothing is taken any more
    std::mutex call_turn_;
    const std::function<int(Ring&)>* job_ = nullptr;
    int job_result_ = 0;
    std::condition_variable job_done_;
};

Mover* mover(void* made) { return static_cast<Mover*>(made); }

}  // namespace

// Makes a ring and its thread. `bell` stays the caller's. NULL, elsewhere, is what was closed: -ESHUTDOWN.
TM_EXPORT int32_t tm_uring_open(uint32_t depth, uint32_t piece_bytes, int32_t bell, void** made) {
    try {
        auto opened = std::make_unique<Mover>(depth, piece_bytes, bell);
        if (const int error = opened->start()) return error;
        *made = opened.release();
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

// Waits for everything in flight, so that the memory is nobody's afterwards. Only `reap` and `free` may follow.
TM_EXPORT int32_t tm_uring_finish(void* made) {
    if (made) mover(made)->finish();
    return 0;
}

TM_EXPORT int32_t tm_uring_free(void* made) {
    delete mover(made);
    return 0;
}

// Queues a transfer, for the thread to see at the next `flush`, or before. file_slot, buffer_slot: where the file and
// the memory are registered, or -1.
TM_EXPORT int32_t tm_uring_submit(void* made, int32_t write, int32_t file, int32_t file_slot, uint64_t address,
                                  uint64_t nbytes, uint64_t offset, int32_t buffer_slot, uint64_t tag) {
    if (!made) return -ESHUTDOWN;
    if (!nbytes) return -EINVAL;
    auto* memory = reinterpret_cast<char*>(address);
    return mover(made)->submit({write != 0, file, file_slot, memory, nbytes, offset, buffer_slot, tag});
}

TM_EXPORT int32_t tm_uring_flush(void* made) {
    if (made) mover(made)->flush();
    return 0;
}

// Begins no more pieces of it. It still ends.
TM_EXPORT int32_t tm_uring_cancel(void* made, uint64_t tag) {
    if (made) mover(made)->cancel(tag);
    return 0;
}

// Silences the bell and takes up to `room` of the transfers that have ended: their tags and results.
TM_EXPORT int32_t tm_uring_reap(void* made, uint64_t* tags, int64_t* results, int32_t room) {
    return made ? mover(made)->reap(tags, results, room) : 0;
}

// Makes tables with so many empty slots.
TM_EXPORT int32_t tm_uring_file_slots(void* made, uint32_t count) {
    if (!made) return -ESHUTDOWN;
    return mover(made)->call([=](Ring& ring) { return ring.make_file_slots(count); });
}

TM_EXPORT int32_t tm_uring_buffer_slots(void* made, uint32_t count) {
    if (!made) return -ESHUTDOWN;
    return mover(made)->call([=](Ring& ring) { return ring.make_buffer_slots(count); });
}

// Puts a descriptor, or -1 for none, into a slot. Transfers that were to use what was there do without.
TM_EXPORT int32_t tm_uring_set_file(void* made, uint32_t slot, int32_t file) {
    return made ? mover(made)->set_file(slot, file) : -ESHUTDOWN;
}

// Puts a range of at most 1 GiB, or none if it is empty, into a slot.
TM_EXPORT int32_t tm_uring_set_buffer(void* made, uint32_t slot, uint64_t address, uint64_t nbytes) {
    return made ? mover(made)->set_buffer(slot, address, nbytes) : -ESHUTDOWN;
}

}  // namespace tiermem

#else  // no io_uring on this system

namespace tiermem {

TM_EXPORT int32_t tm_uring_open(uint32_t, uint32_t, int32_t, void**) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_finish(void*) { return 0; }
TM_EXPORT int32_t tm_uring_free(void*) { return 0; }
TM_EXPORT int32_t tm_uring_submit(void*, int32_t, int32_t, int32_t, uint64_t, uint64_t, uint64_t, int32_t, uint64_t) {
    return -ENOSYS;
}
TM_EXPORT int32_t tm_uring_flush(void*) { return 0; }
TM_EXPORT int32_t tm_uring_cancel(void*, uint64_t) { return 0; }
TM_EXPORT int32_t tm_uring_reap(void*, uint64_t*, int64_t*, int32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_file_slots(void*, uint32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_buffer_slots(void*, uint32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_set_file(void*, uint32_t, int32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_set_buffer(void*, uint32_t, uint64_t, uint64_t) { return -ENOSYS; }

}  // namespace tiermem

#endif
