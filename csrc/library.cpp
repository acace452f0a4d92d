#include "token_rules.h"

extern "C" int megarl_abi_version(void) { return MEGARL_ABI_VERSION; }

extern "C" const char* megarl_rule_digest(const char* rule) {
#define MEGARL_COMPARE(name, digest) \
  if (strcmp(rule, name) == 0) return digest;
  MEGARL_RULE_DIGESTS(MEGARL_COMPARE)
#undef MEGARL_COMPARE
  return nullptr;
}
