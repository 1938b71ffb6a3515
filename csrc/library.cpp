// Functions that Python calls before it uses a library: version of the interface, digest of the sources, target,
// and whether the processor can run the kernels. Compiled to run on any processor of the family.
#include "frame.hpp"

// Version of the interface. Raise it when Python and the library must change together and no field list changes.
EXPTILT_EXPORT int64_t exptilt_abi() { return 1; }

EXPTILT_EXPORT const char* exptilt_source() { return EXPTILT_SOURCE; }

EXPTILT_EXPORT const char* exptilt_target() { return EXPTILT_TARGET; }

EXPTILT_EXPORT int64_t exptilt_runs_here() {
#if defined(EXPTILT_TARGET_v2) || defined(EXPTILT_TARGET_v3) || defined(EXPTILT_TARGET_v4)
  __builtin_cpu_init();
  bool runs = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("popcnt");
#if defined(EXPTILT_TARGET_v3) || defined(EXPTILT_TARGET_v4)
  runs = runs && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
#endif
#if defined(EXPTILT_TARGET_v4)
  runs = runs && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return runs;
#else
  return 1;
#endif
}
