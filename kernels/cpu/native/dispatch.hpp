// Which instruction sets there are, and which of them can serve here.
#pragma once

#include "kernels.hpp"

namespace fissile {

// ABSENT: the processor lacks it, or this library was compiled without it. DENIED: the processor has it, the operating
// system lets nobody use it. TESTED: can be run, serves only who asks for it.
enum Ability { ABSENT, DENIED, TESTED, USABLE };

struct InstructionSet {
  const char* name;
  Ability ability;
  // Not to be used where it is absent.
  const Kernels* kernels;
};

// The best first. Asks the operating system for the tiles of AMX, once, where the processor has them.
const InstructionSet* instruction_sets(int64_t* count);

// The table called `name`; null where this machine cannot run it.
const Kernels* select_kernels(const char* name);

// The one in use: the last that fissile_select has found.
const Kernels& kernels();

}  // namespace fissile
