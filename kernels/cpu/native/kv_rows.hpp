// Keys or values of a tile, and those of it that a row sees.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

// The keys [begin, end) of a KV tile.
struct Range {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  bool has(int64_t k) const { return k >= begin && k < end; }
};

// Keys or values of a KV tile.
template <class Number>
struct Rows {
  const Number* base;
  const int64_t* offsets;

  const Number* operator[](int64_t k) const { return base + offsets[k]; }
};

// Narrow rows are read where they are, and come from memory; float32 ones have mostly been widened just now.
// Into the second cache: the first one has places for fewer lines that are under way.
FISSILE_INLINE void fetch(const Bf16* from) { __builtin_prefetch(from, 0, 2); }
FISSILE_INLINE void fetch(const float*) {}

}  // namespace FISSILE_ISA
