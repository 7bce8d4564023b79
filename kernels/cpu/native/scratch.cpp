#include "scratch.hpp"

#include <sys/mman.h>

#include <cstdlib>

namespace fissile {
namespace {

constexpr uint64_t LINE = 64;
constexpr uint64_t LARGE_PAGE = uint64_t{2} << 20;

// Uses large pages from 2 MiB on, if the system has them, because tiles read many rows at a time.
void* allocate(uint64_t bytes) {
  const uint64_t unit = bytes < LARGE_PAGE ? LINE : LARGE_PAGE, whole = (bytes + unit) / unit * unit;
  void* const memory = std::aligned_alloc(unit, whole);
#ifdef MADV_HUGEPAGE
  if (memory && unit == LARGE_PAGE) madvise(memory, whole, MADV_HUGEPAGE);
#endif
  return memory;
}

struct Kept {
  float* memory[PURPOSES] = {};
  int64_t size[PURPOSES] = {};

  ~Kept() {
    for (float* one : memory) std::free(one);
  }
};

thread_local Kept kept;
thread_local bool failed = false;

}  // namespace

float* scratch(Purpose purpose, int64_t count) {
  float*& memory = kept.memory[purpose];
  int64_t& size = kept.size[purpose];
  if (size < count || !memory) {
    std::free(memory);
    memory = static_cast<float*>(allocate(static_cast<uint64_t>(count) * sizeof(float)));
    size = memory ? count : 0;
    failed |= !memory;
  }
  return memory;
}

bool take_scratch_failure() {
  const bool was = failed;
  failed = false;
  return was;
}

}  // namespace fissile
