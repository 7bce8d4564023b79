// VDPBF16PS: multiplies pairs of bfloat16. With FISSILE_EMULATED, AVX2 instructions emulate it by the pseudo-code of
// Intel's manual (volume 2, VDPBF16PS), for tests.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

#ifdef FISSILE_EMULATED

// Not inlined: inlining would take the compiler half a minute.
__attribute__((noinline, unused)) static Floats add_pairs(Floats sum, Words a, Words b) {
  const Words upper = splat_word(0xFFFF0000u);
  sum = flushed(fma(flushed((Floats)(a & upper)), flushed((Floats)(b & upper)), flushed(sum)));
  return flushed(fma(flushed((Floats)(a << 16)), flushed((Floats)(b << 16)), sum));
}

#else

// Adds the products of the second numbers of a's and b's pairs, then those of the first numbers.
FISSILE_INLINE Floats add_pairs(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#endif

}  // namespace FISSILE_ISA
