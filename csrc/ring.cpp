#include "ring.h"

#ifdef TM_HAS_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

namespace tiermem {
namespace {

// Not in the headers of older systems, whose kernels answer EINVAL.
constexpr unsigned setup_coop_taskrun = 1U << 8;    // 5.19: completions do not interrupt the thread
constexpr unsigned setup_single_issuer = 1U << 12;  // 6.0: one thread uses the ring
constexpr unsigned setup_defer_taskrun = 1U << 13;  // 6.1: completions are worked off when it waits for them
constexpr unsigned register_files_update = 6;
constexpr unsigned register_buffers2 = 15;  // 5.13
constexpr unsigned register_buffers_update = 16;
constexpr unsigned register_sparse = 1U << 0;  // 5.19
constexpr int op_read = 22;                    // 5.6
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

// The best way that this kernel has.
int setup(unsigned entries, io_uring_params* params) {
    for (const unsigned flags : {setup_single_issuer | setup_defer_taskrun, setup_coop_taskrun, 0U}) {
        *params = {};
        params->flags = flags;
        const int fd = int(syscall(__NR_io_uring_setup, entries, params));
        if (fd >= 0) return fd;
        if (errno != EINVAL) break;
    }
    return -errno;
}

// Positive counts, which some operations answer with, are 0 here.
int register_with(int fd, unsigned opcode, const void* argument, size_t count) {
    return syscall(__NR_io_uring_register, fd, opcode, argument, count) < 0 ? -errno : 0;
}

}  // namespace

Mapping::~Mapping() {
    if (start_) munmap(start_, size_);
}

int Mapping::map(int fd, size_t size, off_t what) {
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (start == MAP_FAILED) return -errno;
    start_ = static_cast<char*>(start);
    size_ = size;
    return 0;
}

Ring::~Ring() {
    if (fd_ >= 0) close(fd_);
}

int Ring::open(unsigned entries) {
    io_uring_params params;
    const int fd = setup(entries, &params);
    if (fd < 0) return fd;
    fd_ = fd;

    const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (int error = sq_mapping_.map(fd_, sq_bytes, IORING_OFF_SQ_RING)) return error;
    if (int error = cq_mapping_.map(fd_, cq_bytes, IORING_OFF_CQ_RING)) return error;
    if (int error = sqe_mapping_.map(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return error;
    sq_head_ = sq_mapping_.at<unsigned>(params.sq_off.head);
    sq_tail_ = sq_mapping_.at<unsigned>(params.sq_off.tail);
    sq_mask_ = *sq_mapping_.at<unsigned>(params.sq_off.ring_mask);
    cq_head_ = cq_mapping_.at<unsigned>(params.cq_off.head);
    cq_tail_ = cq_mapping_.at<unsigned>(params.cq_off.tail);
    cq_mask_ = *cq_mapping_.at<unsigned>(params.cq_off.ring_mask);
    cqes_ = cq_mapping_.at<io_uring_cqe>(params.cq_off.cqes);
    unsigned* order = sq_mapping_.at<unsigned>(params.sq_off.array);
    for (unsigned i = 0; i < params.sq_entries; ++i) order[i] = i;
    return 0;
}

void Ring::put_move(bool write, int file, int file_slot, const void* memory, uint32_t nbytes, uint64_t offset,
                    int buffer_slot, uint64_t tag) {
    const unsigned tail = *sq_tail_;  // only this side writes it
    io_uring_sqe& entry = *(sqe_mapping_.at<io_uring_sqe>(0) + (tail & sq_mask_));
    std::memset(&entry, 0, sizeof entry);
    if (buffer_slot >= 0) {
        entry.opcode = write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        entry.buf_index = uint16_t(buffer_slot);
    } else {
        entry.opcode = uint8_t(write ? op_write : op_read);
    }
    entry.fd = file_slot >= 0 ? file_slot : file;
    if (file_slot >= 0) entry.flags = IOSQE_FIXED_FILE;
    entry.addr = reinterpret_cast<uint64_t>(memory);
    entry.len = nbytes;
    entry.off = offset;
    entry.user_data = tag;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
}

int Ring::submit_and_wait() {
    for (;;) {
        // What the kernel found fault with is taken too, and completes with an error.
        const unsigned put = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
        const long done = syscall(__NR_io_uring_enter, fd_, put, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (*cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return 0;
        if (done >= 0 || errno == EINTR) continue;
        if (errno != EAGAIN && errno != EBUSY) return -errno;
        usleep(1000);  // the kernel is short of memory
    }
}

int Ring::make_file_slots(unsigned count) {
    try {
        const std::vector<int32_t> none(count, -1);
        return register_with(fd_, IORING_REGISTER_FILES, none.data(), count);
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int Ring::make_buffer_slots(unsigned count) {
    const RsrcRegister table{count, register_sparse, 0, 0, 0};
    return register_with(fd_, register_buffers2, &table, sizeof table);
}

int Ring::set_file(unsigned slot, int file) {
    const FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&file)};
    return register_with(fd_, register_files_update, &update, 1);
}

int Ring::set_buffer(unsigned slot, uint64_t address, uint64_t nbytes) {
    const iovec range{reinterpret_cast<void*>(address), size_t(nbytes)};
    const uint64_t tag = 0;
    const RsrcUpdate2 update{slot, 0, reinterpret_cast<uint64_t>(&range), reinterpret_cast<uint64_t>(&tag), 1, 0};
    return register_with(fd_, register_buffers_update, &update, sizeof update);
}

}  // namespace tiermem

#endif
