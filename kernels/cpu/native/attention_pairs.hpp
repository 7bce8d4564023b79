// Attention by VDPBF16PS for bfloat16 queries, keys and values. A score is a sum over pairs of numbers of a key, in
// order, by one chain per row and key. A value is a sum over pairs of adjacent keys, in order. Each weight is two
// bfloat16, which together are nearly as precise as float32. Keys of a tile are transposed, so that one vector holds a
// pair of numbers of each of 16 keys. One vector of values holds 16 numbers of each of two keys.
#pragma once

#include "each.hpp"
#include "kv_pairs.hpp"
#include "pairs.hpp"

namespace FISSILE_ISA {

// Rows and vectors that are summed at a time: as many sums as registers hold.
constexpr int PAIRED_ROWS = 6;
constexpr int PAIRED_VECTORS = 4;
// With at most FEW_ROWS rows, keys and values are used as loaded, for FEW_AT_ONCE rows at a time. For more rows they
// are packed.
constexpr int FEW_ROWS = 24;
constexpr int FEW_AT_ONCE = 12;
constexpr int64_t KEY_VECTORS = fissile::KV_TILE / WIDTH;
static_assert(KEY_VECTORS == PAIRED_VECTORS);

// Loads the numbers from i on of 16 keys. Prefetches the same numbers of `ahead`.
FISSILE_INLINE void load_keys(Rows<Bf16> keys, Rows<Bf16> ahead, int64_t first, int64_t i, int64_t dim, Words* rows) {
#pragma GCC unroll 16
  for (int k = 0; k < WIDTH; k++) {
    fetch(ahead[first + k] + i);
    rows[k] = load_pairs(keys[first + k] + i, dim - i);
  }
}

// Packs the first `count` keys of `dim` numbers, rounded up to whole vectors of keys, as pairs [width / 2][KV_TILE].
// Prefetches the same keys of `ahead`.
static void pack_keys(
    Rows<Bf16> keys, Rows<Bf16> ahead, int64_t dim, int64_t width, int64_t count, uint32_t* to) {
  for (int64_t first = 0; first < count; first += WIDTH)
    for (int64_t i = 0; i < width; i += 2 * WIDTH) {
      Words rows[WIDTH];
      load_keys(keys, ahead, first, i, dim, rows);
      turn(rows);
      uint32_t* column = to + i / 2 * fissile::KV_TILE + first;
#pragma GCC unroll 16
      for (int c = 0; c < WIDTH; c++) store_words(column + c * fissile::KV_TILE, rows[c]);
    }
}

// Packs the first `count` values of `dim` numbers as pairs of adjacent keys [KV_TILE / 2][width]. An odd last value is
// paired with zeros. Prefetches the same values of `ahead`.
static void pack_values(
    Rows<Bf16> values, Rows<Bf16> ahead, int64_t dim, int64_t width, int64_t count, uint32_t* to) {
  for (int64_t k = 0; k < count; k += 2, to += width)
    for (int64_t i = 0; i < width; i += 2 * WIDTH) {
      fetch(ahead[k] + i);
      fetch(ahead[k + 1] + i);
      pack_neighbours(values, {0, count}, k, i, dim, to + i);
    }
}

// Vectors of keys that are scored at a time, and vectors of values that are summed at a time, for `rows` rows without
// packing: enough sums to hide the latency of VDPBF16PS, and no more than registers hold.
constexpr int vectors_of_keys(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
constexpr int vectors_of_values(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

// Computes scores[row][key] for ROWS rows and VECTORS vectors of keys from `first` on. The queries are [pairs][ROWS].
template <int ROWS, int VECTORS>
FISSILE_INLINE void score_turned(const uint32_t* q, Rows<Bf16> keys, Rows<Bf16> ahead, int64_t first, int64_t width,
                                 int64_t count, float scale, float* scores) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = zeros();
  for (int64_t i = 0; i < width; i += 2 * WIDTH, q += WIDTH * ROWS)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const int64_t key = first + v * WIDTH;
      if (key >= count) {
        // The next tile may have more keys than this one.
        for (int k = 0; k < WIDTH; k++) fetch(ahead[key + k] + i);
        continue;
      }
      Words rows[WIDTH];
      load_keys(keys, ahead, key, i, width, rows);
      turn(rows);
#pragma GCC unroll 16
      for (int c = 0; c < WIDTH; c++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums[r][v] = add_pairs(sums[r][v], splat_word(q[c * ROWS + r]), rows[c]);
    }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
      store(scores + r * fissile::KV_TILE + first + v * WIDTH, sums[r][v] * splat(scale));
}

// Does the work of `pack_keys` and `score_paired` without storing packed keys. Faster for few rows.
template <int ROWS>
void score_turned(const uint32_t* q, Rows<Bf16> keys, Rows<Bf16> ahead, int64_t width, int64_t count, float scale,
                  float* scores) {
  constexpr int VECTORS = vectors_of_keys(ROWS);
  for (int64_t first = 0; first < fissile::KV_TILE; first += VECTORS * WIDTH)
    score_turned<ROWS, VECTORS>(q, keys, ahead, first, width, count, scale, scores);
}

// Computes scores[row][key] for ROWS rows and all packed keys of a tile. The queries are [pairs][ROWS].
template <int ROWS>
void score_paired(const uint32_t* q, const uint32_t* keys, int64_t pairs, float scale, float* scores) {
  Floats sums[ROWS][KEY_VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < KEY_VECTORS; v++) sums[r][v] = zeros();
  for (int64_t p = 0; p < pairs; p++, q += ROWS, keys += fissile::KV_TILE) {
    Words columns[KEY_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < KEY_VECTORS; v++) columns[v] = load_words(keys + v * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Words query = splat_word(q[r]);
#pragma GCC unroll 4
      for (int v = 0; v < KEY_VECTORS; v++) sums[r][v] = add_pairs(sums[r][v], query, columns[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < KEY_VECTORS; v++)
      store(scores + r * fissile::KV_TILE + v * WIDTH, sums[r][v] * splat(scale));
}

// sums[row] += the weights of a pair of keys times their values: first the weights' first halves, then their second
// halves. Rows of weights are KV_TILE words apart; the second halves follow the first halves of all pairs.
template <int ROWS, int VECTORS>
FISSILE_INLINE void add_weighted(const uint32_t* weights, const Words* values, Floats (*sums)[VECTORS]) {
#pragma GCC unroll 2
  for (int64_t half = 0; half < fissile::KV_TILE; half += fissile::KV_TILE / 2)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Words weight = splat_word(weights[r * fissile::KV_TILE + half]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] = add_pairs(sums[r][v], weight, values[v]);
    }
}

// values[row] += weights [rows][KV_TILE words] times values, over the pairs of keys [begin, end), for VECTORS vectors
// of columns.
template <int ROWS, int VECTORS>
void add_paired(
    const uint32_t* weights, const uint32_t* pairs, int64_t begin, int64_t end, float* values, int64_t width) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(values + r * width + v * WIDTH);
  for (int64_t p = begin; p < end; p++) {
    Words columns[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) columns[v] = load_words(pairs + p * width + v * WIDTH);
    add_weighted<ROWS, VECTORS>(weights + p, columns, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(values + r * width + v * WIDTH, sums[r][v]);
}

// Adds the keys `seen` to one row. Clears the other key of a half seen pair, because its value may be NaN.
template <int VECTORS>
void add_seen(const uint32_t* weights, const uint32_t* pairs, Range seen, float* values, int64_t width) {
  Floats sums[1][VECTORS];
  for (int v = 0; v < VECTORS; v++) sums[0][v] = load(values + v * WIDTH);
  for (int64_t p = seen.begin / 2; p < parts(seen.end, 2); p++) {
    const uint32_t part = (2 * p >= seen.begin ? 0xFFFFu : 0) | (2 * p + 1 < seen.end ? 0xFFFF0000u : 0);
    Words columns[VECTORS];
    for (int v = 0; v < VECTORS; v++) columns[v] = load_words(pairs + p * width + v * WIDTH) & splat_word(part);
    add_weighted<1, VECTORS>(weights + p, columns, sums);
  }
  for (int v = 0; v < VECTORS; v++) store(values + v * WIDTH, sums[0][v]);
}

// Loads VECTORS vectors of the values of two adjacent keys as pairs, with zeros for keys outside `seen`.
template <int VECTORS>
FISSILE_INLINE void load_values(Rows<Bf16> values, Range seen, int64_t pair, int64_t column, Words* pairs) {
  const bool first = 2 * pair >= seen.begin, second = 2 * pair + 1 < seen.end;
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v += 2) {
    const int64_t i = column + v * WIDTH;
    pair_up(first ? load_words(values[2 * pair] + i) : splat_word(0),
            second ? load_words(values[2 * pair + 1] + i) : splat_word(0), pairs + v);
  }
}

// Does the work of `pack_values` and `add_paired` without storing packed values. Faster for few rows; all rows must see
// the same keys.
template <int ROWS, int VECTORS>
void add_values_of(const uint32_t* weights, Rows<Bf16> values, Rows<Bf16> ahead, Range seen, int64_t column, float* to,
                   int64_t width) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to + r * width + column + v * WIDTH);
  for (int64_t p = seen.begin / 2; p < parts(seen.end, 2); p++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2) {
      fetch(ahead[2 * p] + column + v * WIDTH);
      fetch(ahead[2 * p + 1] + column + v * WIDTH);
    }
    Words pairs[VECTORS];
    load_values<VECTORS>(values, seen, p, column, pairs);
    add_weighted<ROWS, VECTORS>(weights + p, pairs, sums);
  }
  for (int64_t k = parts(seen.end, 2) * 2; k < fissile::KV_TILE; k++)
    for (int v = 0; v < VECTORS; v += 2) fetch(ahead[k] + column + v * WIDTH);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(to + r * width + column + v * WIDTH, sums[r][v]);
}

}  // namespace FISSILE_ISA
