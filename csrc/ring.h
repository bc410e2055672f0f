// A bare io_uring over the raw system calls, so that a build needs neither liburing nor root.
//
// One thread makes a ring, and only that thread uses it. Functions return 0 or a count, or a negative errno.
#pragma once

#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define TM_HAS_URING 1

#include <linux/io_uring.h>
#include <sys/types.h>

#include <cstddef>

namespace tiermem {

// A range shared with the kernel.
class Mapping {
public:
    Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    int map(int fd, size_t size, off_t what);

    template <class T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(start_ + offset);
    }

private:
    char* start_ = nullptr;
    size_t size_ = 0;
};

class Ring {
public:
    Ring() = default;
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    int open(unsigned entries);

    // Puts an entry, to be given to the kernel by the next `submit_and_wait`. Never more than `entries` are put and not
    // completed. file_slot, buffer_slot: where the file and the memory are registered, or -1.
    void put_move(bool write, int file, int file_slot, const void* memory, uint32_t nbytes, uint64_t offset,
                  int buffer_slot, uint64_t tag);

    // Gives the kernel what was put, and returns when there are completions.
    int submit_and_wait();

    // Calls `each(tag, result)` for what has completed.
    template <class Each>
    void reap(Each&& each) {
        unsigned head = *cq_head_;  // only this side writes it
        for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head) {
            const io_uring_cqe done = cqes_[head & cq_mask_];
            __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
            each(done.user_data, done.res);
        }
    }

    // A table with so many empty slots.
    int make_file_slots(unsigned count);
    int make_buffer_slots(unsigned count);

    // Puts a descriptor, or -1 for none, into a slot.
    int set_file(unsigned slot, int file);

    // Puts a range of at most 1 GiB, or none if it is empty, into a slot. It stays in memory while it is there.
    int set_buffer(unsigned slot, uint64_t address, uint64_t nbytes);

private:
    int fd_ = -1;
    Mapping sq_mapping_;
    Mapping cq_mapping_;
    Mapping sqe_mapping_;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
};

}  // namespace tiermem

#endif
