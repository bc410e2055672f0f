// The optimizer pass for processors with AVX2.

#if defined(__x86_64__)

// Before the target is set: functions in standard headers are shared with other files.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "isa.h"

TM_BEGIN_TARGET(TM_FEATURES_V3)
#define TM_LEVEL v3
#define TM_VECTOR_BYTES 32
#include "dispatch.h"
TM_END_TARGET

#endif
