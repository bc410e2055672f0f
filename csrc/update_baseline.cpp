// The optimizer pass for every processor.

#define TM_LEVEL baseline
#define TM_VECTOR_BYTES 16
#include "dispatch.h"
