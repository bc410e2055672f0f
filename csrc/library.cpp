// What Python asks before it uses the rest.

#include "abi.h"
#include "isa.h"

namespace tiermem {

TM_EXPORT int32_t tm_abi_version() { return abi_version; }

TM_EXPORT int32_t tm_isa_count() { return ISA_COUNT; }
TM_EXPORT const char* tm_isa_name(int32_t isa) { return isa_names[isa]; }
TM_EXPORT int32_t tm_isa_supported(int32_t isa) { return supported(isa); }

}  // namespace tiermem
