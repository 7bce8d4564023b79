// The rows of keys or values of a KV tile, and ranges of keys in it.
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

// Keys or values of a KV tile, by their offsets in the cache.
template <class Number>
struct Rows {
  const Number* base;
  const int64_t* offsets;

  const Number* operator[](int64_t k) const { return base + offsets[k]; }
};

// Prefetches bfloat16 rows, which are read from the cache in memory. float32 rows are mostly widened copies in L1
// already. Prefetches into L2, because L1 can have fewer outstanding lines.
FISSILE_INLINE void fetch(const Bf16* from) { __builtin_prefetch(from, 0, 2); }
FISSILE_INLINE void fetch(const float*) {}

}  // namespace FISSILE_ISA
