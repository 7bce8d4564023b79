#include "scratch.hpp"

#include <cstdlib>

namespace fissile {
namespace {

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
    const uint64_t bytes = (static_cast<uint64_t>(count) * sizeof(float) + 64) / 64 * 64;
    memory = static_cast<float*>(std::aligned_alloc(64, bytes));
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
