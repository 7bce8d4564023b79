// Attention by AMX tiles for bfloat16 queries, keys and values. A tile of scores has one key per row and one query per
// column. So keys are used as they lie in the cache. The largest scores, weights and sums of 16 query rows are in the
// lanes of vectors, whichever rows these are. Each weight is two bfloat16, which together are nearly as precise as
// float32. Weights are transposed to tiles with one query per row, and multiply pairs of adjacent values.
//
// If a query tile has fewer than 16 rows, its tiles of weights and of summed values have only as many rows. Other
// results for missing rows are computed and ignored.
#pragma once

#include "each.hpp"
#include "kv_pairs.hpp"
#include "tiles.hpp"

namespace FISSILE_ISA {

// Words of a tile, and the numbers that one instruction sums over: numbers of a query and a key, or keys.
constexpr int64_t TILE_WORDS = TILE_ROWS * TILE_PAIRS;
constexpr int64_t TILE_STEP = 2 * TILE_PAIRS;
// Up to this number of rows of a tile, weighing row by row is faster than in the lanes of vectors.
constexpr int64_t FEW_ROWS = 8;
constexpr int KEY_TILES = fissile::KV_TILE / TILE_ROWS;
// Floats of 16 rows' scores of a KV tile, and of one step. Weights replace the scores, as tiles [steps][halves].
constexpr int64_t SCORES = fissile::KV_TILE * TILE_ROWS;
constexpr int64_t STEP_SCORES = TILE_STEP * TILE_ROWS;
static_assert(STEP_SCORES == 2 * TILE_WORDS);

// Configures this thread's tile registers for a task whose query tiles have `rows` rows. Registers 0-3 have min(rows,
// 16) rows and always hold rows of queries; the others have 16 rows, and may hold rows of queries only if there are 16
// or more.
class Tiles {
 public:
  explicit Tiles(int64_t rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
      shapes.bytes[tile] = TILE_BYTES;
      shapes.rows[tile] = static_cast<uint8_t>(tile < 4 ? at_most(rows, TILE_ROWS) : TILE_ROWS);
    }
    load_tile_shapes(shapes);
  }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Transposes 16 rows of words: word i of each row goes to row i of the tile.
FISSILE_INLINE void store_turned(Words* rows, uint32_t* tile) {
  turn(rows);
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) store_words(tile + r * TILE_PAIRS, rows[r]);
}

// The keys of a KV tile as tiles of 16 keys, with `stride` numbers from key to key.
struct KeyTiles {
  const Bf16* at[KEY_TILES];
  int64_t stride;
};

// Prefetches the keys and values of a KV tile, row by row, because memory delivers adjacent lines sooner than scattered
// ones. Rows of several pages alternate, because the hardware prefetcher works page by page. Each turn prefetches only
// a few rows, since few lines can be outstanding at a time.
class Fetching {
 public:
  Fetching(Rows<Bf16> keys, int64_t key_width, Rows<Bf16> values, int64_t value_width, int64_t turns)
      : keys_(keys), values_(values), key_width_(key_width), value_width_(value_width), turns_(turns) {}

  FISSILE_INLINED void turn() {
    for (due_ += fissile::KV_TILE; due_ >= turns_ && next_ < fissile::KV_TILE; due_ -= turns_) fetch_next();
  }

  void fetch_rest() {
    while (next_ < fissile::KV_TILE) fetch_next();
  }

 private:
  static constexpr int64_t LINE = 2 * WIDTH;
  // Rows of a stripe; the stripes of a KV tile take turns.
  static constexpr int64_t STRIPE = TILE_ROWS;

  FISSILE_INLINED void fetch_next() {
    const int64_t row = next_ % KEY_TILES * STRIPE + next_ / KEY_TILES;
    fetch_row(keys_[row], key_width_);
    fetch_row(values_[row], value_width_);
    next_++;
  }

  FISSILE_INLINED static void fetch_row(const Bf16* row, int64_t width) {
    int64_t i = 0;
    for (; i + 4 * LINE <= width; i += 4 * LINE)
#pragma GCC unroll 4
      for (int64_t line = 0; line < 4; line++) fetch(row + i + line * LINE);
    for (; i < width; i += LINE) fetch(row + i);
  }

  const Rows<Bf16> keys_;
  const Rows<Bf16> values_;
  const int64_t key_width_;
  const int64_t value_width_;
  const int64_t turns_;
  int64_t due_ = 0;
  int64_t next_ = 0;
};

// Computes scores[row tile][key][row] for two tiles of keys and ROWS tiles of queries [width / 32][pairs][rows].
// Prefetches rows of `ahead` meanwhile.
template <int ROWS>
void score_tiles(const Bf16* const* keys, int64_t stride, const uint32_t* queries, int64_t width, Fetching& ahead,
                 float* scores) {
  // A single row tile may have fewer than 16 rows, so tiles 0-3 are too small for sums of 16 keys.
  constexpr int SUMS = ROWS == 1 ? 4 : 0, KEYS = ROWS == 1 ? 6 : 4, QUERIES = ROWS == 1 ? 7 : 6;
  const int64_t row_tile = width / 2 * TILE_ROWS;
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_zero<SUMS + sums>(); });
  for (int64_t i = 0; i < width; i += TILE_STEP, queries += TILE_WORDS) {
    ahead.turn();
    each<ROWS>([&](auto r) FISSILE_INLINED { tile_load<QUERIES + r>(queries + r * row_tile); });
    each<2>([&](auto key_tile) FISSILE_INLINED {
      constexpr int k = key_tile, HERE = KEYS + k * (ROWS - 1);
      tile_load<HERE>(keys[k] + i, stride);
      each<ROWS>([&](auto r) FISSILE_INLINED { tile_multiply<SUMS + k * ROWS + r, HERE, QUERIES + r>(); });
    });
  }
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED {
    tile_store<SUMS + sums>(scores + sums % ROWS * SCORES + sums / ROWS * TILE_WORDS);
  });
}

// The keys of a KV tile that each of 16 rows sees.
struct SeenBy {
  Ints begin;
  Ints end;
  // True if all rows see the whole tile.
  bool whole;
};

template <bool WHOLE>
FISSILE_INLINE Floats seen_or(const SeenBy& seen, int64_t k, Floats value, Floats otherwise) {
  if (WHOLE) return value;
  const Ints key = (Ints)splat_word(static_cast<uint32_t>(k));
  return (key >= seen.begin) & (key < seen.end) ? value : otherwise;
}

// Per row, the largest of the scores [KV_TILE][TILE_ROWS] that the row sees. NaN is ignored.
template <bool WHOLE>
FISSILE_INLINE Floats highest_of(const float* scores, const SeenBy& seen, Floats scale) {
  Floats best[4];
  for (int part = 0; part < 4; part++) best[part] = splat(lowest());
  for (int64_t k = 0; k < fissile::KV_TILE; k += 4)
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
      const Floats score = load(scores + (k + part) * TILE_ROWS) * scale;
      best[part] = maximum(seen_or<WHOLE>(seen, k + part, score, splat(lowest())), best[part]);
    }
  return maximum(maximum(best[0], best[1]), maximum(best[2], best[3]));
}

// A weight is two bfloat16. The first is the weight, truncated; the second is the rest, rounded. Returns the second in
// the upper half of each word.
FISSILE_INLINE Words rest_of(Floats weight) {
  const Floats first = (Floats)((Words)weight & splat_word(0xFFFF0000u));
  return (Words)(weight - first) + splat_word(0x8000u);
}

// Combines the upper halves of two words to pairs.
FISSILE_INLINE Words pair_uppers(Words even, Words odd) { return even >> 16 | (odd & splat_word(0xFFFF0000u)); }

// Turns the scores of one step of keys, from `first_key` on, into weights; keys that are not seen get zeros. Adds the
// weights of keys i and i + 16 to totals[i].
template <bool WHOLE>
void weigh_step(float* scores, const SeenBy& seen, int64_t first_key, Floats scale, Floats highest, Floats* totals) {
  Words first[TILE_PAIRS], second[TILE_PAIRS];
  for (int64_t k = 0; k < TILE_STEP; k += 2) {
    Floats weights[2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; i++) {
      const Floats score = fma(load(scores + (k + i) * TILE_ROWS), scale, -highest);
      weights[i] = seen_or<WHOLE>(seen, first_key + k + i, exp(score), zeros());
      totals[(k + i) % WIDTH] += weights[i];
    }
    first[k / 2] = pair_uppers((Words)weights[0], (Words)weights[1]);
    second[k / 2] = pair_uppers(rest_of(weights[0]), rest_of(weights[1]));
  }
  uint32_t* const tiles = reinterpret_cast<uint32_t*>(scores);
  store_turned(first, tiles);
  store_turned(second, tiles + TILE_WORDS);
}

// Sums the totals by the same tree of additions as `sum`, per lane.
FISSILE_INLINE Floats sum_of(Floats* totals) {
  for (int left = WIDTH / 2; left > 1; left /= 2)
    for (int i = 0; i < left; i++) totals[i] += totals[i + left];
  return totals[0] + totals[1];
}

// Factor for the sums and values so far if the largest score rises from `before` to `now`. If nothing was seen before,
// they are zeros and any finite factor will do.
FISSILE_INLINE Floats factor_for(Floats before, Floats now) {
  return now > before ? exp(before - now) : splat(1.0f);
}

// Turns the scores of 16 rows into weights, and updates the rows' largest scores and sums of weights. Returns the
// factors for the rows' values so far.
template <bool WHOLE>
Floats weigh_rows(float* scores, const SeenBy& seen, float scale, float* highest, float* sums) {
  const Floats before = load(highest), now = maximum(highest_of<WHOLE>(scores, seen, splat(scale)), before);
  Floats totals[WIDTH];
  for (int i = 0; i < WIDTH; i++) totals[i] = zeros();
  for (int64_t k = 0; k < fissile::KV_TILE; k += TILE_STEP)
    weigh_step<WHOLE>(scores + k * TILE_ROWS, seen, k, splat(scale), now, totals);
  const Floats factor = factor_for(before, now);
  store(highest, now);
  store(sums, fma(load(sums), factor, sum_of(totals)));
  return factor;
}

// The upper halves of two vectors, in order, as pairs of adjacent numbers.
FISSILE_INLINE Words uppers_of(Words a, Words b) {
  using Numbers = uint16_t __attribute__((vector_size(sizeof(Words))));
  return (Words)__builtin_shufflevector((Numbers)a, (Numbers)b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}

// Weighs one row with scores [KV_TILE]. Writes weights [row of a tile][TILE_PAIRS] with the same bits as `weigh_rows`.
static float weigh_row(
    const float* scores, Range seen, float scale, float* highest, float* sum_so_far, uint32_t* weights) {
  Floats products[KEY_TILES], best = splat(lowest()), total = zeros();
  Ints inside[KEY_TILES];
  for (int v = 0; v < KEY_TILES; v++) {
    const Ints place = lane_numbers() + (Ints)splat_word(static_cast<uint32_t>(v * WIDTH));
    inside[v] = (place >= (Ints)splat_word(static_cast<uint32_t>(seen.begin))) &
                (place < (Ints)splat_word(static_cast<uint32_t>(seen.end)));
    products[v] = load(scores + v * WIDTH);
    best = maximum(inside[v] ? products[v] * splat(scale) : splat(lowest()), best);
  }
  const Floats before = splat(*highest), now = maximum(splat(largest(best)), before);
  for (int v = 0; v < KEY_TILES; v++) {
    products[v] = inside[v] ? exp(fma(products[v], splat(scale), -now)) : zeros();
    total += products[v];
  }
  for (int v = 0; v < KEY_TILES; v += 2, weights += STEP_SCORES) {
    store_words(weights, uppers_of((Words)products[v], (Words)products[v + 1]));
    store_words(weights + TILE_WORDS, uppers_of(rest_of(products[v]), rest_of(products[v + 1])));
  }
  const Floats factor = factor_for(before, now);
  *highest = now[0];
  *sum_so_far = fma(splat(*sum_so_far), factor, splat(sum(total)))[0];
  return factor[0];
}

// Transposes scores [KV_TILE][TILE_ROWS] to [rows][KV_TILE].
static void turn_scores(const float* scores, int64_t rows, Fetching& fetching, float* to) {
  for (int64_t k = 0; k < fissile::KV_TILE; k += TILE_ROWS) {
    Words words[TILE_ROWS];
    fetching.turn();
    for (int i = 0; i < TILE_ROWS; i++) words[i] = load_words(scores + (k + i) * TILE_ROWS);
    turn(words);
    for (int64_t r = 0; r < rows; r++) store_words(to + r * fissile::KV_TILE + k, words[r]);
  }
}

// Columns of values that are multiplied at a time: one cache line of each key, the least that `pair_up` takes.
constexpr int64_t COLUMNS = 2 * WIDTH;
constexpr int64_t COLUMNS_BYTES = COLUMNS * 4;

// Does the work of `pack_neighbours` for 16 keys that are all seen and have all COLUMNS numbers.
FISSILE_INLINE void pack_whole(Rows<Bf16> values, int64_t first, int64_t column, uint32_t* to) {
#pragma GCC unroll 8
  for (int64_t k = 0; k < TILE_PAIRS; k += 2) {
    Words pairs[2];
    pair_up(load_words(values[first + k] + column), load_words(values[first + k + 1] + column), pairs);
    store_words(to + k / 2 * COLUMNS, pairs[0]);
    store_words(to + k / 2 * COLUMNS + WIDTH, pairs[1]);
  }
}

// Words of one step's pairs of values in COLUMNS columns.
constexpr int64_t STEP_PAIRS = TILE_PAIRS * COLUMNS;

// Address of the sums of tile register `sums`: COLUMNS columns have two registers per row tile.
FISSILE_INLINE float* sums_at(float* values, int sums, int64_t width) {
  return values + sums / 2 * TILE_ROWS * width + sums % 2 * WIDTH;
}

template <int ROWS>
FISSILE_INLINE void load_sums(float* values, int64_t width) {
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_load<sums>(sums_at(values, sums, width), width * 4); });
}

template <int ROWS>
FISSILE_INLINE void store_sums(float* values, int64_t width) {
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_store<sums>(sums_at(values, sums, width), width * 4); });
}

// Adds one step's weights [row tile][half] times its pairs [TILE_PAIRS][COLUMNS] to the sums of ROWS row tiles. First
// halves of weights come before second halves, whatever ROWS is.
template <int ROWS>
FISSILE_INLINE void multiply_step(const uint32_t* weights, const uint32_t* pairs) {
  constexpr int WEIGHTS = 2 * ROWS;
  each<2>([&](auto c) FISSILE_INLINED { tile_load<6 + c>(pairs + c * WIDTH, COLUMNS_BYTES); });
  for (int64_t half = 0; half < 2; half++)
    each<ROWS>([&](auto row_tile) FISSILE_INLINED {
      constexpr int r = row_tile;
      tile_load<WEIGHTS + r>(weights + r * SCORES + half * TILE_WORDS);
      each<2>([&](auto c) FISSILE_INLINED { tile_multiply<2 * r + c, WEIGHTS + r, 6 + c>(); });
    });
}

// values[row] += weights[row] * V for ROWS row tiles over the steps [begin, end). The weights are [row
// tile][step][half], the pairs [KV_TILE / 2][COLUMNS].
template <int ROWS>
void add_weighted(
    const uint32_t* weights, const uint32_t* pairs, int64_t begin, int64_t end, float* values, int64_t width) {
  load_sums<ROWS>(values, width);
  for (int64_t step = begin; step < end; step++)
    multiply_step<ROWS>(weights + step * STEP_SCORES, pairs + step * STEP_PAIRS);
  store_sums<ROWS>(values, width);
}

// True if all `dim` numbers of the values of `keys` are finite.
static bool are_finite(Rows<Bf16> values, int64_t dim, Range keys) {
  const Words lower = splat_word(0x7F80u), upper = lower << 16;
  Words bad = splat_word(0);
  for (int64_t k = keys.begin; k < keys.end; k++)
    for (int64_t i = 0; i < dim; i += 2 * WIDTH) {
      const Words pairs = load_pairs(values[k] + i, dim - i);
      bad |= (Words)((pairs & lower) == lower) | (Words)((pairs & upper) == upper);
    }
  for (int lane = 0; lane < WIDTH; lane++)
    if (bad[lane]) return false;
  return true;
}

}  // namespace FISSILE_ISA
