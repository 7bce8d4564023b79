// Which instruction set serves.
#pragma once

#include "kernels.hpp"

namespace fissile {

// The best table that this processor and its operating system can run, or the one called `name`; null if there is none.
const Kernels* select_kernels(const char* name);

// The one in use: the last that fissile_select has found.
const Kernels& kernels();

}  // namespace fissile
