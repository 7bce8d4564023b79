// Replaces the matrix products of an instruction set's table where a processor also has bfloat16 instructions
// (linear_amx.cpp, linear_bf16.cpp). The other kernels stay those of the base table.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_BASE {
extern const fissile::Kernels kernels;
}

namespace FISSILE_ISA {

FISSILE_INLINE bool takes_bf16(const fissile::Linear& work) {
  return work.dtype == fissile::BFLOAT16 && work.weight.dtype != fissile::FLOAT32 &&
         !fissile::is_grouped(work.weight.dtype);
}

// Calls OWN for products that takes_bf16() accepts, and the base table's kernel for others.
template <auto OWN, auto MEMBER, class... Rest>
auto own_or_base(const fissile::Linear& work, Rest... rest) -> decltype(OWN(work, rest...)) {
  return takes_bf16(work) ? OWN(work, rest...) : (FISSILE_BASE::kernels.*MEMBER)(work, rest...);
}

template <auto SCRATCH, auto PACK_TASKS, auto PACK, auto TASKS, auto RUN>
FISSILE_INLINE void use(fissile::Kernels& table) {
  table.linear_scratch = own_or_base<SCRATCH, &fissile::Kernels::linear_scratch>;
  table.linear_pack_tasks = own_or_base<PACK_TASKS, &fissile::Kernels::linear_pack_tasks>;
  table.linear_pack = own_or_base<PACK, &fissile::Kernels::linear_pack>;
  table.linear_tasks = own_or_base<TASKS, &fissile::Kernels::linear_tasks>;
  table.linear = own_or_base<RUN, &fissile::Kernels::linear>;
}

// Replaces the matrix products in a copy of FISSILE_BASE's table.
void use_own_linear(fissile::Kernels& table);

}  // namespace FISSILE_ISA
