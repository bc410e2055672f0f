// The optimizer pass for processors with AVX-512.

#if defined(__x86_64__)

// GCC 12 warns of what its own header leaves undefined on purpose.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Before the target is set: functions in standard headers are shared with other files.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "isa.h"

TM_BEGIN_TARGET(TM_FEATURES_V4)
#define TM_LEVEL v4
#define TM_VECTOR_BYTES 64
#include "dispatch.h"
TM_END_TARGET

#endif
