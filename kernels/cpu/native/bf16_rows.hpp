// What the products by instructions for bfloat16 share: sizes, and the way of finished sums into y.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

FISSILE_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

FISSILE_INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The sums of a panel's columns for one row, plus the bias, rounded into y.
FISSILE_INLINE void finish_row(const fissile::Linear& work, const float* sums, int64_t row, int64_t panel) {
  const int64_t column = panel * fissile::PANEL;
  Bf16* y = static_cast<Bf16*>(work.y) + row * work.y_stride + column;
  for (int64_t c = 0; c < fissile::PANEL && column + c < work.weight.columns; c += WIDTH) {
    const int64_t left = work.weight.columns - column - c;
    Floats value = load(sums + c);
    if (work.weight.bias) value += load_up_to(work.weight.bias + column + c, left);
    store_up_to(y + c, value, left);
  }
}

}  // namespace FISSILE_ISA
