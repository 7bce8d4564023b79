// silu(gate) * up, for operations that stand alone and for products that end in it: the same bits.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

// Of numbers of the model's dtype; the activation is rounded to it before the product.
template <class Number>
FISSILE_INLINE Floats silu_and_mul(Floats gate, Floats up, const Number* dtype) {
  return rounded(gate / (splat(1.0f) + exp(-gate)), dtype) * up;
}

}  // namespace FISSILE_ISA
