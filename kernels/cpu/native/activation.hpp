// Gated activations. silu(gate) * up also ends some matrix products, with the same bits.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

// `dtype` only selects the model's dtype: silu(gate) is rounded to it before the product.
template <class Number>
FISSILE_INLINE Floats silu_and_mul(Floats gate, Floats up, const Number* dtype) {
  return rounded(gate / (splat(1.0f) + exp(-gate)), dtype) * up;
}

// gelu(gate) * up with GELU's tanh approximation: 0.5 * (1 + tanh(u)) is 1 / (1 + e^-2u), where u is
// sqrt(2 / pi) * (gate + 0.044715 * gate^3). Rounds as silu_and_mul does.
template <class Number>
FISSILE_INLINE Floats gelu_and_mul(Floats gate, Floats up, const Number* dtype) {
  const Floats twice_u = gate * fma(gate * gate, splat(0.07135481627f), splat(1.59576912161f));
  return rounded(gate / (splat(1.0f) + exp(-twice_u)), dtype) * up;
}

}  // namespace FISSILE_ISA
