// int8 weights in products by instructions for bfloat16.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

// A block of a panel of int8 (kernels.hpp): its scales, and its numbers behind them.
FISSILE_INLINE const float* scales_of(const char* block) { return reinterpret_cast<const float*>(block); }

// The numbers of such a block, `depth` of each column, in pairs of bfloat16 [K_BLOCK / 2][PANEL][2], exactly, zeros behind.
static void widen_block(const char* block, int64_t depth, Bf16* to) {
  static_assert(WIDTH == fissile::PANEL);
  const char* from = block + fissile::BLOCK_SCALES;
  for (int64_t k = 0; k < depth; k += 4, from += sizeof(Words), to += 4 * fissile::PANEL) {
    Words words;
    __builtin_memcpy(&words, from, sizeof words);
    // An integer of 8 bits is a float32 whose lower half is zeros.
    Words numbers[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++)
      numbers[g] = (Words)__builtin_convertvector((Ints)(words << (24 - 8 * g)) >> 24, Floats);
    const Words pairs[2] = {numbers[0] >> 16 | numbers[1], numbers[2] >> 16 | numbers[3]};
    __builtin_memcpy(to, pairs, sizeof pairs);
  }
  if (depth < fissile::K_BLOCK) __builtin_memset(to, 0, (fissile::K_BLOCK - depth) * fissile::PANEL * sizeof *to);
}

// Asks for a block that comes next.
FISSILE_INLINE void prefetch_block(const char* block) {
#pragma GCC unroll 33
  for (int64_t byte = 0; byte <= fissile::K_BLOCK * fissile::PANEL; byte += 64) __builtin_prefetch(block + byte, 0, 2);
}

}  // namespace FISSILE_ISA
