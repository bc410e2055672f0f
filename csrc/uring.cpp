// A small io_uring: reads and writes at offsets, completions announced by an eventfd.
//
// Over the raw system calls, so that a build needs neither liburing nor root. One thread at a time submits to and reaps
// from a ring. Every function returns 0 or a count, or a negative errno.

#include <cstdint>

#include "abi.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

namespace tiermem {
namespace {

// Not in the headers of older systems, whose kernels answer EINVAL.
constexpr unsigned setup_coop_taskrun = 1U << 8;  // 5.19: completions do not interrupt the submitting thread
constexpr unsigned register_files_update = 6;
constexpr unsigned register_buffers2 = 15;       // 5.13
constexpr unsigned register_buffers_update = 16;
constexpr unsigned register_sparse = 1U << 0;    // 5.19
constexpr int op_read = 22;                      // 5.6
constexpr int op_write = 23;

struct RsrcRegister {
    uint32_t nr;
    uint32_t flags;
    uint64_t resv2;
    uint64_t data;
    uint64_t tags;
};

struct RsrcUpdate2 {
    uint32_t offset;
    uint32_t resv;
    uint64_t data;
    uint64_t tags;
    uint32_t nr;
    uint32_t resv2;
};

struct FilesUpdate {
    uint32_t offset;
    uint32_t resv;
    uint64_t fds;
};

int setup(unsigned entries, io_uring_params* params) {
    return int(syscall(__NR_io_uring_setup, entries, params));
}

int enter(int fd, unsigned to_submit, unsigned min_complete, unsigned flags) {
    return int(syscall(__NR_io_uring_enter, fd, to_submit, min_complete, flags, nullptr, 0));
}

int register_with(int fd, unsigned opcode, const void* argument, unsigned count) {
    return syscall(__NR_io_uring_register, fd, opcode, argument, count) < 0 ? -errno : 0;
}

// A range shared with the kernel.
class Mapping {
public:
    Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        if (start_) munmap(start_, size_);
    }

    int map(int fd, size_t size, off_t what) {
        void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
        if (start == MAP_FAILED) return -errno;
        start_ = static_cast<char*>(start);
        size_ = size;
        return 0;
    }

    template <class T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(start_ + offset);
    }

private:
    char* start_ = nullptr;
    size_t size_ = 0;
};

struct Ring {
    int fd = -1;
    Mapping sq_mapping;
    Mapping cq_mapping;
    Mapping sqe_mapping;
    unsigned* sq_head = nullptr;
    unsigned* sq_tail = nullptr;
    unsigned sq_mask = 0;
    unsigned* cq_head = nullptr;
    unsigned* cq_tail = nullptr;
    unsigned cq_mask = 0;
    io_uring_cqe* cqes = nullptr;
    int64_t in_flight = 0;

    ~Ring() {
        if (fd >= 0) close(fd);
    }

    int open(unsigned depth, int event_fd) {
        io_uring_params params{};
        params.flags = setup_coop_taskrun;
        fd = setup(depth, &params);
        if (fd < 0 && errno == EINVAL) {
            params = {};
            fd = setup(depth, &params);
        }
        if (fd < 0) return -errno;

        const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        if (int error = sq_mapping.map(fd, sq_bytes, IORING_OFF_SQ_RING)) return error;
        if (int error = cq_mapping.map(fd, cq_bytes, IORING_OFF_CQ_RING)) return error;
        if (int error = sqe_mapping.map(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return error;
        sq_head = sq_mapping.at<unsigned>(params.sq_off.head);
        sq_tail = sq_mapping.at<unsigned>(params.sq_off.tail);
        sq_mask = *sq_mapping.at<unsigned>(params.sq_off.ring_mask);
        cq_head = cq_mapping.at<unsigned>(params.cq_off.head);
        cq_tail = cq_mapping.at<unsigned>(params.cq_off.tail);
        cq_mask = *cq_mapping.at<unsigned>(params.cq_off.ring_mask);
        cqes = cq_mapping.at<io_uring_cqe>(params.cq_off.cqes);
        unsigned* order = sq_mapping.at<unsigned>(params.sq_off.array);
        for (unsigned i = 0; i < params.sq_entries; ++i) order[i] = i;
        return register_with(fd, IORING_REGISTER_EVENTFD, &event_fd, 1);
    }

    // The one entry is submitted before this returns, or not at all.
    int submit(const io_uring_sqe& entry) {
        const unsigned tail = *sq_tail;  // only this side writes it
        if (tail - __atomic_load_n(sq_head, __ATOMIC_ACQUIRE) > sq_mask) return -EBUSY;
        *(sqe_mapping.at<io_uring_sqe>(0) + (tail & sq_mask)) = entry;
        __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
        int submitted;
        do {
            submitted = enter(fd, 1, 0, 0);
        } while (submitted < 0 && errno == EINTR);
        if (submitted == 1 || __atomic_load_n(sq_head, __ATOMIC_ACQUIRE) == tail + 1) {
            ++in_flight;  // if the kernel took it and found fault with it, that is a completion too
            return 0;
        }
        const int error = submitted < 0 ? -errno : -EAGAIN;
        __atomic_store_n(sq_tail, tail, __ATOMIC_RELEASE);
        return error;
    }

    int reap(uint64_t* tags, int32_t* results, int room) {
        unsigned head = *cq_head;  // only this side writes it
        const unsigned tail = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
        int count = 0;
        for (; head != tail && count < room; ++head, ++count) {
            const io_uring_cqe& done = cqes[head & cq_mask];
            tags[count] = done.user_data;
            results[count] = done.res;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
        in_flight -= count;
        return count;
    }

    int wait() {
        if (*cq_head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE)) return 0;
        int done;
        do {
            done = enter(fd, 0, 1, IORING_ENTER_GETEVENTS);
        } while (done < 0 && (errno == EINTR || errno == EAGAIN || errno == EBUSY));
        return done < 0 ? -errno : 0;
    }

    void drain() {
        uint64_t tags[64];
        int32_t results[64];
        while (in_flight > 0 && wait() == 0) reap(tags, results, 64);
    }
};

}  // namespace

// Makes a ring of at least `depth` entries that adds to `event_fd` at every completion.
TM_EXPORT int32_t tm_uring_open(uint32_t depth, int32_t event_fd, void** ring) {
    auto made = std::unique_ptr<Ring>(new (std::nothrow) Ring);
    if (!made) return -ENOMEM;
    if (int error = made->open(depth, event_fd)) return error;
    *ring = made.release();
    return 0;
}

// Waits for everything in flight, so that the memory is nobody's afterwards.
TM_EXPORT void tm_uring_close(void* ring) {
    auto closing = std::unique_ptr<Ring>(static_cast<Ring*>(ring));
    closing->drain();
}

// file: a descriptor, or the slot of a registered one if `file_registered`; buffer: a registered buffer's slot, or -1.
TM_EXPORT int32_t tm_uring_submit(void* ring, int32_t write, int32_t file, int32_t file_registered, uint64_t address,
                                  uint32_t nbytes, uint64_t offset, int32_t buffer, uint64_t tag) {
    io_uring_sqe entry;
    std::memset(&entry, 0, sizeof entry);
    if (buffer >= 0) {
        entry.opcode = write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        entry.buf_index = uint16_t(buffer);
    } else {
        entry.opcode = uint8_t(write ? op_write : op_read);
    }
    entry.fd = file;
    if (file_registered) entry.flags = IOSQE_FIXED_FILE;
    entry.addr = address;
    entry.len = nbytes;
    entry.off = offset;
    entry.user_data = tag;
    return static_cast<Ring*>(ring)->submit(entry);
}

// Takes up to `room` completions: what was submitted, by tag, and how many bytes it moved or its negative errno.
TM_EXPORT int32_t tm_uring_reap(void* ring, uint64_t* tags, int32_t* results, int32_t room) {
    return static_cast<Ring*>(ring)->reap(tags, results, room);
}

// Returns when there is a completion to reap. Only while something is in flight.
TM_EXPORT int32_t tm_uring_wait(void* ring) { return static_cast<Ring*>(ring)->wait(); }

// Makes a table with so many empty slots for files.
TM_EXPORT int32_t tm_uring_file_slots(void* ring, const int32_t* minus_ones, uint32_t count) {
    return register_with(static_cast<Ring*>(ring)->fd, IORING_REGISTER_FILES, minus_ones, count);
}

// Puts a descriptor, or -1 for none, into a slot.
TM_EXPORT int32_t tm_uring_set_file(void* ring, uint32_t slot, int32_t file) {
    const FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&file)};
    const int fd = static_cast<Ring*>(ring)->fd;
    return syscall(__NR_io_uring_register, fd, register_files_update, &update, 1) < 0 ? -errno : 0;
}

TM_EXPORT int32_t tm_uring_buffer_slots(void* ring, uint32_t count) {
    const RsrcRegister table{count, register_sparse, 0, 0, 0};
    return register_with(static_cast<Ring*>(ring)->fd, register_buffers2, &table, sizeof table);
}

// Puts a range of at most 1 GiB, or none if it is empty, into a slot. It stays in memory while it is there.
TM_EXPORT int32_t tm_uring_set_buffer(void* ring, uint32_t slot, uint64_t address, uint64_t nbytes) {
    const iovec range{reinterpret_cast<void*>(address), size_t(nbytes)};
    const uint64_t tag = 0;
    const RsrcUpdate2 update{
        slot, 0, reinterpret_cast<uint64_t>(&range), reinterpret_cast<uint64_t>(&tag), 1, 0};
    const int fd = static_cast<Ring*>(ring)->fd;
    return syscall(__NR_io_uring_register, fd, register_buffers_update, &update, sizeof update) < 0 ? -errno : 0;
}

}  // namespace tiermem

#else  // no io_uring on this system

#include <cerrno>

namespace tiermem {

TM_EXPORT int32_t tm_uring_open(uint32_t, int32_t, void**) { return -ENOSYS; }
TM_EXPORT void tm_uring_close(void*) {}
TM_EXPORT int32_t tm_uring_submit(void*, int32_t, int32_t, int32_t, uint64_t, uint32_t, uint64_t, int32_t, uint64_t) {
    return -ENOSYS;
}
TM_EXPORT int32_t tm_uring_reap(void*, uint64_t*, int32_t*, int32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_wait(void*) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_file_slots(void*, const int32_t*, uint32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_set_file(void*, uint32_t, int32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_buffer_slots(void*, uint32_t) { return -ENOSYS; }
TM_EXPORT int32_t tm_uring_set_buffer(void*, uint32_t, uint64_t, uint64_t) { return -ENOSYS; }

}  // namespace tiermem

#endif
