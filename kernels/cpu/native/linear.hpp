// Matrix products; see linear.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

void pack_panel(const fissile::Packing& work, int64_t task);
int64_t linear_scratch(const fissile::Linear& work);
int64_t linear_pack_tasks(const fissile::Linear& work);
void linear_pack(const fissile::Linear& work, int64_t task);
int64_t linear_tasks(const fissile::Linear& work);
void linear(const fissile::Linear& work, int64_t task);

}  // namespace FISSILE_ISA
