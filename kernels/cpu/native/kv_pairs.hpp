// Packing of keys and values of a KV tile as pairs of bfloat16, for attention by pairs (attention_pairs.hpp) and by AMX
// tiles (attention_tiles.hpp).
#pragma once

#include "kernels.hpp"
#include "kv_rows.hpp"

namespace FISSILE_ISA {

static_assert(WIDTH == 16);

#define FISSILE_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// Transposes 16 rows of 16 words in place.
FISSILE_INLINE void turn(Words* rows) {
  Words twos[16], fours[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    twos[i] = FISSILE_PICK(rows[i], rows[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    twos[i + 1] = FISSILE_PICK(rows[i], rows[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  // fours[4 i + c] holds columns c, 4 + c, 8 + c and 12 + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const Words *a = twos + i, *b = a + 2;
    fours[i] = FISSILE_PICK(a[0], b[0], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    fours[i + 1] = FISSILE_PICK(a[0], b[0], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    fours[i + 2] = FISSILE_PICK(a[1], b[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    fours[i + 3] = FISSILE_PICK(a[1], b[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const Words a = fours[c], b = fours[4 + c], d = fours[8 + c], e = fours[12 + c];
    // Columns c and 8 + c, then 4 + c and 12 + c, of eight rows each.
    const Words ab = FISSILE_PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const Words de = FISSILE_PICK(d, e, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const Words ab2 = FISSILE_PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const Words de2 = FISSILE_PICK(d, e, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    rows[c] = FISSILE_PICK(ab, de, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    rows[8 + c] = FISSILE_PICK(ab, de, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    rows[4 + c] = FISSILE_PICK(ab2, de2, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    rows[12 + c] = FISSILE_PICK(ab2, de2, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}

// Loads the first `count` of 32 numbers and fills up with zeros.
FISSILE_INLINE Words load_pairs(const Bf16* from, int64_t count) {
  if (count >= 2 * WIDTH) return load_words(from);
  Bf16 buffer[2 * WIDTH] = {};
  for (int64_t i = 0; i < count; i++) buffer[i] = from[i];
  return load_words(buffer);
}

// Pairs the numbers of two rows, in an order that `from_paired` reverses.
FISSILE_INLINE void pair_up(Words even, Words odd, Words* pairs) {
  using Numbers = uint16_t __attribute__((vector_size(sizeof(Words))));
  const Numbers a = (Numbers)even, b = (Numbers)odd;
  pairs[0] = (Words)FISSILE_PICK(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43,
                                 16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
  pairs[1] = (Words)FISSILE_PICK(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47,
                                 20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}

// Pairs the values of keys k and k + 1, numbers from i on. Keys outside `seen` become zeros.
FISSILE_INLINE void pack_neighbours(Rows<Bf16> values, Range seen, int64_t k, int64_t i, int64_t dim, uint32_t* to) {
  Words pairs[2];
  pair_up(seen.has(k) ? load_pairs(values[k] + i, dim - i) : splat_word(0),
          seen.has(k + 1) ? load_pairs(values[k + 1] + i, dim - i) : splat_word(0), pairs);
  store_words(to, pairs[0]);
  store_words(to + WIDTH, pairs[1]);
}

// Restores memory order of 32 sums over paired values.
FISSILE_INLINE Two from_paired(Two sums) {
  return {FISSILE_PICK(sums.first, sums.second, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
          FISSILE_PICK(sums.first, sums.second, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
}

}  // namespace FISSILE_ISA

#undef FISSILE_PICK
