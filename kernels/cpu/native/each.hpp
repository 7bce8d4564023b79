// Loops whose numbers are constants of the compiler's from the beginning: arrays that they index are registers, which
// `#pragma GCC unroll` does not promise.
#pragma once

#include "vec.hpp"

#define FISSILE_INLINED __attribute__((always_inline))

namespace FISSILE_ISA {

template <int VALUE>
struct Constant {
  constexpr operator int() const { return VALUE; }
};

// `body` of each number below COUNT, which it can use as an argument of templates.
template <int COUNT, int FIRST = 0, class Body>
FISSILE_INLINE void each(const Body& body) {
  if constexpr (FIRST < COUNT) {
    body(Constant<FIRST>{});
    each<COUNT, FIRST + 1>(body);
  }
}

}  // namespace FISSILE_ISA
