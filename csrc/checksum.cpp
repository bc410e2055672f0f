// A fast 64-bit sum that tells whether bytes are those that were written.
//
// Word i (8 bytes, little endian, the last one padded with zeros) is added to `plain`, and, keyed by its position, as
// the product of its halves to `keyed`: NH of Black et al., "UMAC: fast and secure message authentication", with keys
// from a Weyl sequence. One changed word always changes `plain`; exchanged words change `keyed`. Sums of words are
// independent of order, which lets every instruction set take as many at once as it can.

#include <cstring>

#include "abi.h"
#include "isa.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums, and the halves of masters, are defined on little-endian words"
#endif

namespace tiermem {
namespace {

// The finaliser of SplitMix64: every bit of the result depends on every bit of the value.
uint64_t scramble(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

struct ChecksumLoop {
    using Function = uint64_t (*)(const unsigned char*, int64_t);

    static TM_INLINE uint64_t run(const unsigned char* bytes, int64_t nbytes) {
        constexpr uint64_t weyl = 0x9e3779b97f4a7c15;
        const int64_t words = nbytes / 8;
        uint64_t plain = 0;
        uint64_t keyed = 0;
        uint64_t key = weyl;
        for (int64_t i = 0; i < words; ++i, key += weyl) {
            uint64_t word;
            std::memcpy(&word, bytes + 8 * i, sizeof word);
            plain += word;
            word ^= key;
            keyed += (word & 0xffffffff) * (word >> 32);
        }
        uint64_t rest = 0;
        std::memcpy(&rest, bytes + 8 * words, size_t(nbytes % 8));
        plain += rest;
        rest ^= key;
        keyed += (rest & 0xffffffff) * (rest >> 32);
        return scramble(plain ^ scramble(keyed + weyl * uint64_t(nbytes)));
    }
};

}  // namespace

TM_EXPORT uint64_t tm_checksum(int32_t isa, const unsigned char* bytes, int64_t nbytes) {
    return select<ChecksumLoop>(isa)(bytes, nbytes);
}

}  // namespace tiermem
