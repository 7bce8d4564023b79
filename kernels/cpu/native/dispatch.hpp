// The instruction sets that this library has, and which of them this machine can run.
#pragma once

#include "kernels.hpp"

namespace fissile {

// ABSENT: the processor or this library lacks the instruction set. DENIED: the processor has it, but the operating
// system does not let this process use it. TESTED: it runs, but is used only if selected by name. USABLE: it may be
// selected as the best.
enum Ability { ABSENT, DENIED, TESTED, USABLE };

struct InstructionSet {
  const char* name;
  Ability ability;
  // Use it only if `ability` is TESTED or USABLE.
  const Kernels* kernels;
};

// All instruction sets, the best first. The first call asks the operating system for AMX tiles if the processor has
// them.
const InstructionSet* instruction_sets(int64_t* count);

// The table of instruction set `name`; null if this machine cannot run it.
const Kernels* select_kernels(const char* name);

// The table in use: the last one that fissile_select found.
const Kernels& kernels();

}  // namespace fissile
