// Selection of experts; see routing.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

int64_t route_tasks(const fissile::Route& work);
void route(const fissile::Route& work, int64_t task);

}  // namespace FISSILE_ISA
