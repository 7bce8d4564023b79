// Scratch memory that a thread keeps from kernel to kernel.
#pragma once

#include <cstdint>

namespace fissile {

// Each purpose has its own memory, so nested uses do not overwrite each other.
enum Purpose { OF_CALL, OF_EXPERTS, OF_LAYERS, OF_HEAD, OF_TASK, PURPOSES };

// `count` floats of this thread, aligned to 64 bytes, or null if the allocation failed. The contents are undefined.
float* scratch(Purpose purpose, int64_t count);

// True if `scratch` returned null on this thread since the last call of this function.
bool take_scratch_failure();

}  // namespace fissile
