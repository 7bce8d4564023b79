// silu(gate) * up, for the separate activation kernel and for matrix products that end in it, with the same bits.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

// `dtype` only selects the model's dtype: silu(gate) is rounded to it before the product.
template <class Number>
FISSILE_INLINE Floats silu_and_mul(Floats gate, Floats up, const Number* dtype) {
  return rounded(gate / (splat(1.0f) + exp(-gate)), dtype) * up;
}

}  // namespace FISSILE_ISA
