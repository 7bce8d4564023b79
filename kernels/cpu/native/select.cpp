#include "select.hpp"

#include <cstring>

namespace plain {
extern const fissile::Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const fissile::Kernels kernels;
}
namespace avx2x16 {
extern const fissile::Kernels kernels;
}
namespace avx512 {
extern const fissile::Kernels kernels;
}
#endif

namespace fissile {
namespace {

struct Choice {
  const Kernels& kernels;
  bool usable;
  // Taken without being asked for; what is not is there for tests.
  bool preferred;
};

}  // namespace

const Kernels* select_kernels(const char* name) {
#if defined(__x86_64__)
  // These ask the operating system too, whether it keeps the wide registers.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  // The AVX-512 kernels are tested where a machine has it, and no machine of ours had it yet: not taken by themselves.
  const Choice choices[] = {
      {avx512::kernels, has_avx512, false},
      {avx2::kernels, has_avx2, true},
      {avx2x16::kernels, has_avx2, false},
      {plain::kernels, true, true},
  };
#else
  const Choice choices[] = {{plain::kernels, true, true}};
#endif
  for (const Choice& choice : choices)
    if (choice.usable && (name ? std::strcmp(name, choice.kernels.name) == 0 : choice.preferred)) return &choice.kernels;
  return nullptr;
}

}  // namespace fissile
