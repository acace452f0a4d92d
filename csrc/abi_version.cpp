#include "megarl_kernels.h"

extern "C" int megarl_abi_version(void) { return MEGARL_ABI_VERSION; }
