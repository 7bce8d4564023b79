// Loops whose indices are compile-time constants, so that arrays indexed by them stay in registers. `#pragma GCC
// unroll` does not guarantee this.
#pragma once

#include "vec.hpp"

#define FISSILE_INLINED __attribute__((always_inline))

namespace FISSILE_ISA {

template <int VALUE>
struct Constant {
  constexpr operator int() const { return VALUE; }
};

// Calls `body` for each number below COUNT. The body may use the number as a template argument.
template <int COUNT, int FIRST = 0, class Body>
FISSILE_INLINE void each(const Body& body) {
  if constexpr (FIRST < COUNT) {
    body(Constant<FIRST>{});
    each<COUNT, FIRST + 1>(body);
  }
}

}  // namespace FISSILE_ISA
