#include "dispatch.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(FISSILE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define FISSILE_TABLE(name) \
  namespace name { \
  extern const fissile::Kernels kernels; \
  }
#define FISSILE_LINEAR(name) \
  namespace name { \
  void use_own_linear(fissile::Kernels& table); \
  void use_own_codes(fissile::Kernels& table); \
  }
#define FISSILE_ATTENTION(name) \
  namespace name { \
  void use_own_attention(fissile::Kernels& table); \
  }

FISSILE_TABLE(plain)
#if defined(__x86_64__)
FISSILE_TABLE(avx2)
FISSILE_TABLE(avx2x16)
FISSILE_TABLE(avx512)
FISSILE_LINEAR(amx_emulated)
FISSILE_ATTENTION(amx_emulated)
FISSILE_LINEAR(avx512bf16_emulated)
FISSILE_ATTENTION(avx512bf16_emulated)
#endif
#if defined(FISSILE_AVX512BF16)
FISSILE_LINEAR(avx512bf16)
FISSILE_ATTENTION(avx512bf16)
#endif
#if defined(FISSILE_AMX)
FISSILE_LINEAR(amx)
FISSILE_ATTENTION(amx)
#endif

namespace fissile {
namespace {

#if defined(__x86_64__)

// A copy of `base`, named `name`, with the matrix products that the functions set.
Kernels with_linear(
    const Kernels& base, const char* name, void (*use_own_linear)(Kernels&), void (*use_own_codes)(Kernels&)) {
  Kernels table = base;
  table.name = name;
  use_own_linear(table);
  use_own_codes(table);
  return table;
}

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

// Checked separately from AVX2, since a virtual machine may hide F16C.
bool has_f16c() { return Leaf(1, 0).c >> 29 & 1; }

#if defined(FISSILE_AVX512BF16) || defined(FISSILE_AMX)
bool has_avx512bf16() { return Leaf(7, 1).a >> 5 & 1; }
#endif

#if defined(FISSILE_AMX)
// From <asm/prctl.h>, which older headers lack: requests the right to use a feature with a large state, for this
// process.
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;
constexpr int XFEATURE_XTILEDATA = 18;

bool has_amx() {
  const unsigned features = Leaf(7, 0).d;
  return (features >> 24 & 1) && (features >> 22 & 1);
}

// True if the operating system saves a thread's tiles and lets this process use them.
bool may_use_tiles() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3 && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

struct All {
  static constexpr int64_t COUNT = 8;
  Kernels amx, avx512bf16, amx_emulated, avx512bf16_emulated;
  InstructionSet sets[COUNT];

  All() {
    // __builtin_cpu_supports also checks that the operating system saves the wide registers.
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    // bfloat16 products convert int8 weights with VBMI. The functions that fill a table are compiled with the set's own
    // instructions too, so they may run only where the processor has them.
    [[maybe_unused]] const bool has_vbmi = has_avx512 && __builtin_cpu_supports("avx512vbmi");
    Ability amx_ability = ABSENT, bf16_ability = ABSENT;
#if defined(FISSILE_AMX)
    const bool has_vnni = has_vbmi && __builtin_cpu_supports("avx512vnni");
    if (has_vnni && has_avx512bf16() && has_amx()) amx_ability = may_use_tiles() ? USABLE : DENIED;
    if (amx_ability == USABLE) {
      amx = with_linear(avx512::kernels, "amx", amx::use_own_linear, amx::use_own_codes);
      amx::use_own_attention(amx);
    }
#endif
#if defined(FISSILE_AVX512BF16)
    if (has_vbmi && has_avx512bf16()) {
      bf16_ability = USABLE;
      avx512bf16 = with_linear(avx512::kernels, "avx512bf16", avx512bf16::use_own_linear, avx512bf16::use_own_codes);
      avx512bf16::use_own_attention(avx512bf16);
    }
#endif
    if (has_avx2) {
      amx_emulated = with_linear(avx2x16::kernels, "amx_emulated", amx_emulated::use_own_linear, amx_emulated::use_own_codes);
      amx_emulated::use_own_attention(amx_emulated);
      avx512bf16_emulated =
          with_linear(avx2x16::kernels, "avx512bf16_emulated", avx512bf16_emulated::use_own_linear, avx512bf16_emulated::use_own_codes);
      avx512bf16_emulated::use_own_attention(avx512bf16_emulated);
    }
    const InstructionSet best_first[COUNT] = {
        {"amx", amx_ability, &amx},
        {"avx512bf16", bf16_ability, &avx512bf16},
        {"avx512", has_avx512 ? USABLE : ABSENT, &avx512::kernels},
        {"avx2", has_avx2 ? USABLE : ABSENT, &avx2::kernels},
        {"plain", USABLE, &plain::kernels},
        {"avx2x16", has_avx2 ? TESTED : ABSENT, &avx2x16::kernels},
        {"amx_emulated", has_avx2 ? TESTED : ABSENT, &amx_emulated},
        {"avx512bf16_emulated", has_avx2 ? TESTED : ABSENT, &avx512bf16_emulated},
    };
    std::memcpy(sets, best_first, sizeof sets);
  }
};

#else

struct All {
  static constexpr int64_t COUNT = 1;
  InstructionSet sets[COUNT] = {{"plain", USABLE, &plain::kernels}};
};

#endif

}  // namespace

const InstructionSet* instruction_sets(int64_t* count) {
  static const All all;
  *count = All::COUNT;
  return all.sets;
}

const Kernels* select_kernels(const char* name) {
  int64_t count;
  const InstructionSet* sets = instruction_sets(&count);
  for (int64_t i = 0; i < count; i++)
    if (std::strcmp(name, sets[i].name) == 0 && sets[i].ability >= TESTED) return sets[i].kernels;
  return nullptr;
}

}  // namespace fissile
