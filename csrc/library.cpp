#include "token_rules.h"

extern "C" int megarl_abi_version(void) { return MEGARL_ABI_VERSION; }

extern "C" int megarl_has_rule(const char* rule) { return megarl::find_rule(rule) >= 0; }
