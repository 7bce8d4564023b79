// The way of finished sums into y.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

// The sums of a panel's columns, `column` and following, for one row, plus the bias, rounded.
template <class Number>
FISSILE_INLINE void write_row(const fissile::Linear& work, const float* sums, int64_t column, Number* y) {
  for (int64_t c = 0; c < fissile::PANEL && column + c < work.weight.columns; c += WIDTH) {
    const int64_t left = work.weight.columns - column - c;
    Floats value = load(sums + c);
    if (work.weight.bias) value += load_up_to(work.weight.bias + column + c, left);
    store_up_to(y + c, value, left);
  }
}

}  // namespace FISSILE_ISA
