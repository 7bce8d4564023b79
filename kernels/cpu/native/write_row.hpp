// Writes finished sums of a matrix product to y.
#pragma once

#include "activation.hpp"
#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

FISSILE_INLINE Floats with_bias(const fissile::Linear& work, const float* sums, int64_t column, int64_t left) {
  const Floats value = load(sums);
  return work.weight.bias ? value + load_up_to(work.weight.bias + column, left) : value;
}

// Writes one row's sums of a panel, which begins at `column`, plus the bias, rounded to `Number`.
template <class Number>
FISSILE_INLINE void write_row(const fissile::Linear& work, const float* sums, int64_t column, Number* y) {
  for (int64_t c = 0; c < fissile::PANEL && column + c < work.weight.columns; c += WIDTH) {
    const int64_t left = work.weight.columns - column - c;
    store_up_to(y + c, with_bias(work, sums + c, column + c, left), left);
  }
}

// Writes silu(gate) * up for one row of a whole panel of gates, which begins at `column`, and the panel of its ups.
template <class Number>
FISSILE_INLINE void write_gated_row(
    const fissile::Linear& work, const float* gates, const float* ups, int64_t column, Number* y) {
  const int64_t half = work.weight.columns / 2;
  for (int64_t c = 0; c < fissile::PANEL; c += WIDTH) {
    const Floats gate = rounded(with_bias(work, gates + c, column + c, WIDTH), y);
    const Floats up = rounded(with_bias(work, ups + c, half + column + c, WIDTH), y);
    store(y + c, silu_and_mul(gate, up, y));
  }
}

}  // namespace FISSILE_ISA
