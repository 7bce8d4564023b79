// Products by instructions that only some processors of an instruction set have (linear_amx.cpp, linear_bf16.cpp).
#pragma once

#include "kernels.hpp"

namespace FISSILE_ISA {

// Puts them into the table of FISSILE_BASE, which does everything else.
void use_own_linear(fissile::Kernels& table);

}  // namespace FISSILE_ISA
