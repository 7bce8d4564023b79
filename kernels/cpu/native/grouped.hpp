// Products with weights in codes; see code_product.hpp.
#pragma once

#include "kernels.hpp"

namespace FISSILE_ISA {

int64_t grouped_scratch(const fissile::Linear& work);
int64_t grouped_pack_tasks(const fissile::Linear& work);
void grouped_pack(const fissile::Linear& work, int64_t task);
int64_t grouped_tasks(const fissile::Linear& work);
void grouped(const fissile::Linear& work, int64_t task);

}  // namespace FISSILE_ISA
