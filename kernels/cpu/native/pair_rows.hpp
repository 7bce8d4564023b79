// Copies rows of bfloat16 to tiles [pairs of k][rows of the tile], as VDPBF16PS multiplies them.
#pragma once

#include "kernels.hpp"
#include "row_tiles.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

using Words4 = uint32_t __attribute__((vector_size(16)));

FISSILE_INLINE Words4 load_4(const Bf16* from) {
  Words4 words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

// Copies four pairs of each of four rows, `stride` numbers apart, to [pairs][count].
FISSILE_INLINE void pack_square(const Bf16* from, int64_t stride, uint32_t* to, int64_t count) {
  const Words4 a = load_4(from), b = load_4(from + stride);
  const Words4 c = load_4(from + 2 * stride), d = load_4(from + 3 * stride);
  const Words4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Words4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Words4 pairs[4] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) __builtin_memcpy(to + i * count, &pairs[i], sizeof pairs[i]);
}

// Copies the rows of a tile of x to `count` pairs, the last of which are zeros where x has fewer numbers.
static void pack_pairs(const fissile::Linear& work, const RowTile& tile, uint32_t* to, int64_t count) {
  const int64_t inner = work.weight.inner, squares = tile.rows < 4 ? 0 : inner / 8;
  const Bf16* const x = static_cast<const Bf16*>(work.x) + tile.first * work.x_stride;
  for (int64_t r = 0; r < tile.rows && squares; r += 4) {
    // The last square may repeat rows of the one before.
    const int64_t first = at_most(r, tile.rows - 4);
    for (int64_t s = 0; s < squares; s++)
      pack_square(x + first * work.x_stride + s * 8, work.x_stride, to + s * 4 * tile.rows + first, tile.rows);
  }
  for (int64_t r = 0; r < tile.rows; r++) {
    const Bf16* const from = x + r * work.x_stride;
    for (int64_t k = squares * 4; k < inner / 2; k++)
      __builtin_memcpy(to + k * tile.rows + r, from + 2 * k, sizeof *to);
    if (inner % 2) to[inner / 2 * tile.rows + r] = from[inner - 1].bits;
    for (int64_t k = (inner + 1) / 2; k < count; k++) to[k * tile.rows + r] = 0;
  }
}

}  // namespace FISSILE_ISA
