// What attention computes by tiles of AMX where queries, keys and values are bfloat16. A tile of scores has a key in each
// row and a query in each column: keys are used as they lie in the cache, and a query tile's largest scores, weights and
// sums are those of sixteen rows in the lanes of vectors, whichever rows these are. Weights, of two bfloat16 each, which
// together are nearly as good as float32, are then turned to tiles with a query in each row, and multiply pairs of
// neighbouring values.
//
// Sums of values, and weights, of fewer than sixteen rows are in tiles of that many; what else is computed of rows that
// there are not is left alone.
#pragma once

#include "kv_pairs.hpp"
#include "tiles.hpp"

namespace FISSILE_ISA {

#define FISSILE_INLINED __attribute__((always_inline))

// Words of a tile, and what one instruction sums over: numbers of a query and a key, or keys.
constexpr int64_t TILE_WORDS = TILE_ROWS * TILE_PAIRS;
constexpr int64_t TILE_STEP = 2 * TILE_PAIRS;
constexpr int KEY_TILES = fissile::KV_TILE / TILE_ROWS;
// Of sixteen rows: scores of a KV tile, and then in their place the weights as tiles [steps][halves].
constexpr int64_t SCORES = fissile::KV_TILE * TILE_ROWS;
constexpr int64_t STEP_SCORES = TILE_STEP * TILE_ROWS;
static_assert(STEP_SCORES == 2 * TILE_WORDS);

// This thread's tile registers, for a task with query tiles of so many rows. The first four are for rows; where there are
// more tiles of rows than one, the others may be, too.
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

template <int VALUE>
struct Constant {
  constexpr operator int() const { return VALUE; }
};

// `body` of each number below COUNT, which it can use as an argument of templates.
template <int COUNT, int FIRST = 0, class Body>
FISSILE_INLINE void each(const Body& body) {
  if constexpr (FIRST < COUNT) {
    body(Constant<FIRST>{});
    each<COUNT, FIRST + 1>(body);
  }
}

// Sixteen rows of words, the i-th of each in row i of a tile.
FISSILE_INLINE void store_turned(Words* rows, uint32_t* tile) {
  turn(rows);
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) store_words(tile + r * TILE_PAIRS, rows[r]);
}

// Keys of a KV tile, sixteen by sixteen.
struct KeyTiles {
  const Bf16* at[KEY_TILES];
  int64_t stride;
};

// Fetches the rows of a KV tile line by line, which memory gives faster than the same lines in another order.
class Fetching {
 public:
  Fetching(Rows<Bf16> rows, int64_t width) : rows_(rows), width_(width) {}

  // All that are left, or so many.
  FISSILE_INLINED void lines(int64_t count = INT64_MAX) {
    for (; count > 0 && key_ < fissile::KV_TILE; count--) {
      fetch(rows_[key_] + i_);
      i_ += 2 * WIDTH;
      if (i_ < width_) continue;
      i_ = 0;
      key_++;
    }
  }

 private:
  const Rows<Bf16> rows_;
  const int64_t width_;
  int64_t key_ = 0;
  int64_t i_ = 0;
};

// scores[row tile][key][row] of two tiles of keys and ROWS tiles of queries, which are [width / 32][pairs][rows] each;
// meanwhile fetches as many lines as the keys have.
template <int ROWS>
void score_tiles(const Bf16* const* keys, int64_t stride, const uint32_t* queries, int64_t width,
                                Fetching& ahead, float* scores) {
  // One tile of rows may be too small for sums of sixteen keys.
  constexpr int SUMS = ROWS == 1 ? 4 : 0, KEYS = ROWS == 1 ? 6 : 4, QUERIES = ROWS == 1 ? 7 : 6;
  const int64_t row_tile = width / 2 * TILE_ROWS;
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_zero<SUMS + sums>(); });
  for (int64_t i = 0; i < width; i += TILE_STEP, queries += TILE_WORDS) {
    each<ROWS>([&](auto r) FISSILE_INLINED { tile_load<QUERIES + r>(queries + r * row_tile); });
    each<2>([&](auto key_tile) FISSILE_INLINED {
      constexpr int k = key_tile, HERE = KEYS + k * (ROWS - 1);
      ahead.lines(TILE_ROWS);
      tile_load<HERE>(keys[k] + i, stride);
      each<ROWS>([&](auto r) FISSILE_INLINED { tile_multiply<SUMS + k * ROWS + r, HERE, QUERIES + r>(); });
    });
  }
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED {
    tile_store<SUMS + sums>(scores + sums % ROWS * SCORES + sums / ROWS * TILE_WORDS);
  });
}

// What sixteen rows see of a KV tile.
struct SeenBy {
  Ints begin;
  Ints end;
  // Whether all of them see all of it.
  bool whole;
};

template <bool WHOLE>
FISSILE_INLINE Floats seen_or(const SeenBy& seen, int64_t k, Floats value, Floats otherwise) {
  if (WHOLE) return value;
  const Ints key = (Ints)splat_word(static_cast<uint32_t>(k));
  return (key >= seen.begin) & (key < seen.end) ? value : otherwise;
}

// Of sixteen rows, the largest of the scores [KV_TILE][TILE_ROWS] that they see.
template <bool WHOLE>
FISSILE_INLINE Floats highest_of(const float* scores, const SeenBy& seen, Floats scale) {
  Floats best[4];
  for (int part = 0; part < 4; part++) best[part] = splat(lowest());
  for (int64_t k = 0; k < fissile::KV_TILE; k += 4)
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
      const Floats score = load(scores + (k + part) * TILE_ROWS) * scale;
      best[part] = maximum(best[part], seen_or<WHOLE>(seen, k + part, score, splat(lowest())));
    }
  return maximum(maximum(best[0], best[1]), maximum(best[2], best[3]));
}

// A pair of weights as one of bfloat16, and what these leave out as another: cut off first, then rounded.
FISSILE_INLINE void split_pair(Floats even, Floats odd, Words* first, Words* second) {
  const Words upper = splat_word(0xFFFF0000u), half = splat_word(0x8000u);
  const Words a = (Words)even & upper, b = (Words)odd & upper;
  *first = a >> 16 | b;
  *second = ((Words)(even - (Floats)a) + half) >> 16 | (((Words)(odd - (Floats)b) + half) & upper);
}

// Scores of one step of keys, from `first_key` on, to weights, which are zeros for keys that are not seen; adds those of
// keys at even and at odd places to `totals`.
template <bool WHOLE>
void weigh_step(float* scores, const SeenBy& seen, int64_t first_key, Floats scale, Floats highest, Two& totals) {
  Words first[TILE_PAIRS], second[TILE_PAIRS];
  auto weight = [&](int64_t k) FISSILE_INLINED {
    return seen_or<WHOLE>(seen, first_key + k, exp(fma(load(scores + k * TILE_ROWS), scale, -highest)), zeros());
  };
  for (int64_t pair = 0; pair < TILE_PAIRS; pair++) {
    const Floats even = weight(2 * pair), odd = weight(2 * pair + 1);
    totals.first += even;
    totals.second += odd;
    split_pair(even, odd, first + pair, second + pair);
  }
  uint32_t* const tiles = reinterpret_cast<uint32_t*>(scores);
  store_turned(first, tiles);
  store_turned(second, tiles + TILE_WORDS);
}

// Turns the scores of sixteen rows into weights and brings their largest score and their sums up to date; what their
// values have to be multiplied by.
template <bool WHOLE>
Floats weigh_rows(float* scores, const SeenBy& seen, float scale, float* highest, float* sums) {
  const Floats before = load(highest), best = highest_of<WHOLE>(scores, seen, splat(scale));
  const Floats now = best > before ? best : before;
  // Rows that have seen nothing before have nothing but zeros to be scaled.
  const Floats factor = now > before ? exp(before - now) : splat(1.0f);
  Two totals{zeros(), zeros()};
  for (int64_t k = 0; k < fissile::KV_TILE; k += TILE_STEP)
    weigh_step<WHOLE>(scores + k * TILE_ROWS, seen, k, splat(scale), now, totals);
  store(highest, now);
  store(sums, fma(load(sums), factor, totals.first + totals.second));
  return factor;
}

// Weights and values of some steps of keys: [row tile][step][half] tiles, and pairs [KV_TILE / 2][width].
struct Weighted {
  const uint32_t* weights;
  const uint32_t* values;
  int64_t width;
  int64_t begin;
  int64_t end;
};

// Columns of values that are multiplied at a time: a line of each key, as few as `pair_up` takes.
constexpr int64_t COLUMNS = 2 * WIDTH;
constexpr int64_t COLUMNS_BYTES = COLUMNS * 4;

// values[row] += weights[row] * V, of ROWS tiles of rows, over the steps [begin, end) of weights [row tile][step][half] and
// of pairs [KV_TILE / 2][COLUMNS]: first halves of a step's weights before second ones, whatever ROWS.
template <int ROWS>
void add_weighted(
    const uint32_t* weights, const uint32_t* pairs, int64_t begin, int64_t end, float* values, int64_t width) {
  constexpr int WEIGHTS = 2 * ROWS;
  const int64_t bytes = width * 4;
  auto at = [&](int sums) { return values + sums / 2 * TILE_ROWS * width + sums % 2 * WIDTH; };
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_load<sums>(at(sums), bytes); });
  for (int64_t step = begin; step < end; step++) {
    each<2>([&](auto c) FISSILE_INLINED { tile_load<6 + c>(pairs + step * TILE_PAIRS * COLUMNS + c * WIDTH, COLUMNS_BYTES); });
    for (int64_t half = 0; half < 2; half++)
      each<ROWS>([&](auto row_tile) FISSILE_INLINED {
        constexpr int r = row_tile;
        tile_load<WEIGHTS + r>(weights + r * SCORES + step * STEP_SCORES + half * TILE_WORDS);
        each<2>([&](auto c) FISSILE_INLINED { tile_multiply<2 * r + c, WEIGHTS + r, 6 + c>(); });
      });
  }
  each<2 * ROWS>([&](auto sums) FISSILE_INLINED { tile_store<sums>(at(sums), bytes); });
}

// Whether all of these values are finite numbers, `dim` of each key.
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

#undef FISSILE_INLINED
