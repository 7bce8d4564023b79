// Memory that a thread keeps from kernel to kernel.
#pragma once

#include <cstdint>

namespace fissile {

// What it is for: memory for one purpose is not given out for another.
enum Purpose { OF_CALL, OF_EXPERTS, OF_LAYERS, OF_HEAD, OF_TASK, PURPOSES };

// `count` floats of this thread, aligned to 64 bytes, or null; the content is what the last user left.
float* scratch(Purpose purpose, int64_t count);

// Whether `scratch` has returned null on this thread since it was last asked.
bool take_scratch_failure();

}  // namespace fissile
