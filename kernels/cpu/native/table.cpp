// The micro-kernels of the instruction set that this is compiled for.
#include "linear.hpp"

#define FISSILE_TEXT_OF(name) #name
#define FISSILE_TEXT(name) FISSILE_TEXT_OF(name)

namespace FISSILE_ISA {

extern const fissile::Kernels kernels;
const fissile::Kernels kernels = {
    .name = FISSILE_TEXT(FISSILE_ISA),
    .pack_panel = pack_panel,
    .linear_pack_tasks = linear_pack_tasks,
    .linear_pack = linear_pack,
    .linear_tasks = linear_tasks,
    .linear = linear,
};

}  // namespace FISSILE_ISA
