// Batch-invariant attention over a paged KV cache.
//
// A query row is multiplied by its keys in KV tiles of KV_TILE keys at absolute positions, in order. For each tile the
// task computes the scores, their exponentials relative to the largest score so far, and the values weighted by them.
// Each split of KV_SPLIT keys, also at absolute positions, produces its own state: largest score, sum of weights,
// weighted values. The states of a row are merged in order. So the bits are the same whether one task computes all
// splits of a row or several tasks compute one each. They do not depend on the number of rows of a step, on where its
// chunks end, or on which rows share a query tile. A decode is a prefill of one row.
//
// Keys that a row does not see never enter its arithmetic, not even multiplied by zero: unwritten slots and later
// tokens may hold NaN.
//
// All query heads of a key head share one pass over its keys and values. If a query tile has few rows, they read keys
// and values in the cache, and prefetch the next tile meanwhile: its keys while using keys, its values while using
// values. Values that are prefetched together with their own tile's keys would arrive too late. If the tile has many
// rows, keys and values are first widened to float32, and the data to widen next are prefetched. After the last KV tile
// of a head, the first tile of the task's next head is prefetched, and then the first tile of the next task. Within a
// row, queries and sums use load_two's order, as it is the cheapest to widen. Products and sums do not depend on the
// order within a row; write() restores memory order.
//
// If the processor multiplies pairs of bfloat16, attention_pairs.hpp computes the tiles of a bfloat16 cache instead.
// Queries are then [pairs][rows] and each weight is two bfloat16. For many rows, the tile's keys and values are packed
// instead of widened. For few rows (a decode, or a step that verifies drafts), they are used from registers without
// packing. Only values of a tile of which the rows see different parts are packed then.
//
// If the processor has AMX, attention_tiles.hpp computes the tiles, with queries and weights of the same kinds.
#include "attention.hpp"

#include "kv_rows.hpp"
#include "scratch.hpp"

#if defined(FISSILE_PAIRS)
#include "attention_pairs.hpp"
#elif defined(FISSILE_TILES)
#include "attention_tiles.hpp"
#endif

namespace FISSILE_ISA {
namespace {

using fissile::BFLOAT16;
using fissile::FLOAT16;
using fissile::FLOAT32;
using fissile::FLOAT8;
using fissile::KV_SPLIT;
using fissile::KV_TILE;

// From this number of rows on, bfloat16 keys and values are widened once for all rows instead of by each group of rows.
// Narrower formats are always widened.
constexpr int64_t WIDEN_FROM = WIDTH == 16 ? 25 : 11;
// Pairs of vectors of values that are summed at a time, and pairs of bfloat16 vectors per 64-byte cache line.
constexpr int VALUE_PAIRS = 2;
constexpr int LINE_PAIRS = 32 / TWO;
// The number of row places is a multiple of this: an AMX tile always has TILE_ROWS rows.
#ifdef FISSILE_TILES
constexpr int64_t ROWS_TOGETHER = TILE_ROWS;
#else
constexpr int64_t ROWS_TOGETHER = 1;

// A task needs no setup without AMX.
struct Tiles {
  explicit Tiles(int64_t) {}
};
#endif

int64_t places_of(int64_t rows) { return parts(rows, ROWS_TOGETHER) * ROWS_TOGETHER; }

float scalar_exp(float x) { return exp(splat(x))[0]; }

// Sizes that all tasks of one call share.
struct Shape {
  int64_t group;        // query heads per key head
  int64_t width;        // numbers of a key, rounded up to whole pairs of vectors
  int64_t value_width;  // numbers of a value, rounded up likewise
  int64_t stride;       // floats between widened rows: an odd number of cache lines, so that columns use all cache sets
  int64_t most_rows;    // row places of the largest query tile

  explicit Shape(const fissile::Attention& work)
      : group(work.heads / work.kv_heads),
        width(parts(work.dim, TWO) * TWO),
        value_width(parts(work.value_dim, TWO) * TWO),
        stride(width | 16),
        most_rows(places_of(work.tile_tokens * group)) {}

  int64_t state_size(int64_t places) const { return places * (value_width + 2); }
};

// Running result of the rows of a query tile, with room for `places` rows.
struct State {
  float* highest;
  float* sums;
  float* values;

  State(int64_t places, float* memory) : highest(memory), sums(memory + places), values(memory + 2 * places) {}

  void clear(const Shape& shape, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) highest[r] = lowest();
    for (int64_t r = 0; r < rows; r++) sums[r] = 0.0f;
    __builtin_memset(values, 0, static_cast<uint64_t>(rows * shape.value_width) * sizeof(float));
  }
};

void scale(float* values, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += WIDTH) store(values + i, load(values + i) * splat(factor));
}

// Raises the largest score of row r to `highest`, if that is larger, and rescales the row's sums to it.
void raise(const Shape& shape, const State& state, int64_t r, float highest) {
  if (!(highest > state.highest[r])) return;
  if (state.highest[r] != lowest()) {
    float factor = scalar_exp(state.highest[r] - highest);
    state.sums[r] *= factor;
    scale(state.values + r * shape.value_width, shape.value_width, factor);
  }
  state.highest[r] = highest;
}

// Merges the state of the keys that follow those of `into`.
void merge(const Shape& shape, const State& into, const State& next, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    if (next.highest[r] == lowest()) continue;
    raise(shape, into, r, next.highest[r]);
    float factor = scalar_exp(next.highest[r] - into.highest[r]);
    into.sums[r] += next.sums[r] * factor;
    float *to = into.values + r * shape.value_width, *from = next.values + r * shape.value_width;
    for (int64_t i = 0; i < shape.value_width; i += WIDTH)
      store(to + i, fma(load(from + i), splat(factor), load(to + i)));
  }
}

// The keys of a KV tile that the row at `position` sees, relative to `first_key`.
Range seen_by(const fissile::Attention& work, int64_t position, int64_t first_key) {
  int64_t begin = work.window ? position - work.window + 1 - first_key : 0;
  return {at_least(begin, 0), at_most(position + 1 - first_key, KV_TILE)};
}

// Adds the products of the TWO numbers at i to the sums. Each lane adds its products in sequence, whatever ROWS and
// KEYS are.
template <int ROWS, int KEYS>
FISSILE_INLINE void multiply(
    const float* q, int64_t width, const float* const* keys, const float* const*, int64_t i, Floats (*sums)[KEYS]) {
#pragma GCC unroll 2
  for (int64_t part = i; part < i + TWO; part += WIDTH) {
    Floats queries[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) queries[r] = kept(load(q + r * width + part));
#pragma GCC unroll 8
    for (int k = 0; k < KEYS; k++) {
      Floats key = kept(load(keys[k] + part));
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[r][k] = fma(queries[r], key, sums[r][k]);
    }
  }
}

// Multiplies bfloat16 keys in the cache; prefetches the same numbers of the rows `ahead`.
template <int ROWS, int KEYS>
FISSILE_INLINE void multiply(
    const float* q, int64_t width, const Bf16* const* keys, const Bf16* const* ahead, int64_t i, Floats (*sums)[KEYS]) {
#pragma GCC unroll 8
  for (int k = 0; k < KEYS; k++) {
    fetch(ahead[k] + i);
    Two key = load_two(keys[k] + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][k] = fma(load(q + r * width + i), key.first, sums[r][k]);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][k] = fma(load(q + r * width + i + WIDTH), key.second, sums[r][k]);
  }
}

// Computes scores[row][key] for the KEYS keys from `first` on.
template <int ROWS, int KEYS, class Number>
FISSILE_INLINE void score(
    const float* q, int64_t width, Rows<Number> keys, Rows<Number> ahead, int64_t first, float* scores) {
  const Number *at[KEYS], *next[KEYS];
  for (int k = 0; k < KEYS; k++) at[k] = keys[first + k];
  for (int k = 0; k < KEYS; k++) next[k] = ahead[first + k];
  Floats sums[ROWS][KEYS];
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < KEYS; k++) sums[r][k] = zeros();
  for (int64_t i = 0; i < width; i += TWO) multiply<ROWS, KEYS>(q, width, at, next, i, sums);
  for (int r = 0; r < ROWS; r++)
    for (int k = 0; k < KEYS; k += 4) {
      Floats4 totals = sums_of_4(sums[r] + k);
      __builtin_memcpy(scores + r * KV_TILE + first + k, &totals, sizeof totals);
    }
}

// Writes a row's weights over its scores.
struct InPlace {
  float* const scores;

  void put(int64_t k, Floats weights) { store(scores + k, weights); }
  void finish(Range) const {}
};

#ifdef FISSILE_PAIRS
// Writes each weight as two bfloat16, the second being the rounding error of the first. Together they are nearly as
// precise as float32.
struct AsTwo {
  float* const scores;
  alignas(64) Bf16 halves[2 * KV_TILE];

  explicit AsTwo(float* scores) : scores(scores) {}

  void put(int64_t k, Floats weights) {
    const Floats first = rounded(weights, halves);
    store(halves + k, first);
    store(halves + KV_TILE + k, weights - first);
  }

  // Copies the weights only now, because the second halves overwrite scores that weigh() has still to read.
  void finish(Range vectors) const {
    Bf16* const to = reinterpret_cast<Bf16*>(scores);
    const uint64_t bytes = static_cast<uint64_t>(vectors.end - vectors.begin) * sizeof(Bf16);
    for (int64_t part = 0; part < 2 * KV_TILE; part += KV_TILE)
      __builtin_memcpy(to + part + vectors.begin, halves + part + vectors.begin, bytes);
  }
};
#endif

// Turns a row's scores into weights, and raises the row's state to the largest score.
template <class Weights>
void weigh(const Shape& shape, const State& state, int64_t r, Range seen, float* scores) {
  const Ints begin = (Ints)splat_word(static_cast<uint32_t>(seen.begin));
  const Ints end = (Ints)splat_word(static_cast<uint32_t>(seen.end));
  const int64_t first = seen.begin / WIDTH * WIDTH;
  auto inside = [&](int64_t k) {
    Ints place = lane_numbers() + (Ints)splat_word(static_cast<uint32_t>(k));
    return (place >= begin) & (place < end);
  };
  Floats best = splat(lowest());
  for (int64_t k = first; k < seen.end; k += WIDTH)
    best = maximum(best, inside(k) ? load(scores + k) : splat(lowest()));
  raise(shape, state, r, largest(best));
  Floats highest = splat(state.highest[r]), total = zeros();
  Weights to{scores};
  for (int64_t k = first; k < seen.end; k += WIDTH) {
    Floats weights = inside(k) ? exp(load(scores + k) - highest) : zeros();
    to.put(k, weights);
    total += weights;
  }
  to.finish({first, parts(seen.end, WIDTH) * WIDTH});
  state.sums[r] += sum(total);
}

// Adds factors[row] * PAIRS pairs of vectors of values to the sums of each row.
template <int ROWS, int PAIRS>
FISSILE_INLINE void add_products(const Floats* factors, const float* values, Two (*sums)[PAIRS]) {
#pragma GCC unroll 4
  for (int p = 0; p < PAIRS; p++) {
    const Floats first = kept(load(values + p * TWO));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][p].first = fma(factors[r], first, sums[r][p].first);
    const Floats second = kept(load(values + p * TWO + WIDTH));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][p].second = fma(factors[r], second, sums[r][p].second);
  }
}

template <int ROWS, int PAIRS>
FISSILE_INLINE void add_products(const Floats* factors, const Bf16* values, Two (*sums)[PAIRS]) {
#pragma GCC unroll 4
  for (int p = 0; p < PAIRS; p++) {
    const Two value = load_two(values + p * TWO);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][p].first = fma(factors[r], value.first, sums[r][p].first);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r][p].second = fma(factors[r], value.second, sums[r][p].second);
  }
}

// values[row] += weights[row] * rows of V, for PAIRS pairs of vectors from `column` on. Prefetches the same columns of
// `ahead`.
template <int ROWS, int PAIRS, class Number>
FISSILE_INLINE void add_values(const float* weights, Rows<Number> rows, Rows<Number> ahead, Range seen, int64_t column,
                               float* values, int64_t width) {
  Two sums[ROWS][PAIRS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PAIRS; p++) sums[r][p] = load_two(values + r * width + column + p * TWO);
#pragma GCC unroll 4
  for (int64_t k = seen.begin; k < seen.end; k++) {
    Floats factors[ROWS];
    for (int r = 0; r < ROWS; r++) factors[r] = kept(splat(weights[r * KV_TILE + k]));
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p += LINE_PAIRS) fetch(ahead[k] + column + p * TWO);
    add_products<ROWS, PAIRS>(factors, rows[k] + column, sums);
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PAIRS; p++) store_two(values + r * width + column + p * TWO, sums[r][p]);
}

// Copies `filled` rows of `dim` numbers to float32. Prefetches the rows `ahead`.
template <class Number>
void widen(Rows<Number> rows, Rows<Number> ahead, int64_t dim, const Shape& shape, int64_t filled, float* wide) {
  for (int64_t k = 0; k < filled; k++) {
    const Number *from = rows[k], *next = ahead[k];
    float* to = wide + k * shape.stride;
    int64_t i = 0;
    for (; i + TWO <= dim; i += TWO) {
      __builtin_prefetch(next + i);
      store_two(to + i, load_two(from + i));
    }
    if (i < dim) store_two(to + i, load_two_part(from + i, dim - i));
  }
}

// True if bfloat16 queries are multiplied by such keys and values in pairs (attention_pairs.hpp, attention_tiles.hpp).
template <class KvNumber>
#if defined(FISSILE_PAIRS) || defined(FISSILE_TILES)
constexpr bool HAS_PAIRS = sizeof(KvNumber) == sizeof(Bf16);
#else
constexpr bool HAS_PAIRS = false;
#endif

// Computes one query tile and one key head over its KV tiles.
template <class KvNumber>
struct Task {
  const fissile::Attention& work;
  const Shape shape{work};
  const fissile::QueryTile& tile;
  const int64_t head;
  // End of the task's range of heads.
  const int64_t end_head;
  // The next task of this thread, whose first KV tile is prefetched; null if there is none.
  const Task* const behind;
  const int64_t rows = tile.tokens * shape.group;
  // True if keys and values are widened to float32 before use.
  const bool widened = shape.width != work.dim || shape.value_width != work.value_dim ||
                       work.kv_dtype == FLOAT16 || work.kv_dtype == FLOAT8 ||
                       (work.kv_dtype == BFLOAT16 && rows >= WIDEN_FROM);
  const bool paired = HAS_PAIRS<KvNumber> && work.dtype == BFLOAT16;
  float* const q;
  float* const scores;
  float* const wide;

  // Floats of scratch memory per task. Packed keys and packed values fit into the widened rows: each takes at most
  // half.
  static int64_t memory(const Shape& shape) {
    return shape.most_rows * (shape.width + KV_TILE) + KV_TILE * shape.stride;
  }

  // With `memory` null, the task has no queries and scores, and may only call finish().
  Task(const fissile::Attention& work, const fissile::QueryTile& tile, int64_t head, int64_t end_head, float* memory,
       const Task* behind = nullptr)
      : work(work),
        tile(tile),
        head(head),
        end_head(end_head),
        behind(behind),
        q(memory),
        scores(q ? q + shape.most_rows * shape.width : nullptr),
        wide(scores ? scores + shape.most_rows * KV_TILE : nullptr) {}

  int64_t position(int64_t row) const { return tile.position + row / shape.group; }

  // Row t * group + g is query head g of token t.
  template <class Number>
  const Number* query(int64_t r) const {
    return static_cast<const Number*>(work.q) + (tile.row + r / shape.group) * work.q_row_stride +
           (head * shape.group + r % shape.group) * work.q_head_stride;
  }

  template <class Number>
  void load_queries_of() const {
    for (int64_t r = 0; r < rows; r++) {
      const Number* from = query<Number>(r);
      for (int64_t i = 0; i < shape.width; i += TWO) {
        Two two{load_up_to(from + i, work.dim - i), load_up_to(from + i + WIDTH, work.dim - i - WIDTH)};
        Two scaled{two.first * splat(work.scale), two.second * splat(work.scale)};
        store_two(q + r * shape.width + i, as_loaded(scaled, static_cast<const KvNumber*>(nullptr)));
      }
    }
  }

  template <class Number>
  void score_all(int64_t first_key, Rows<Number> keys, Rows<Number> ahead) const {
    const int64_t begin = seen_by(work, position(0), first_key).begin;
    const int64_t end = seen_by(work, position(rows - 1), first_key).end;
    for (int64_t k = begin / 8 * 8; k < end; k += 8) {
      int64_t r = 0;
      for (; rows - r >= 3; r += 3) score_rows<3, 4>(r, k, keys, ahead);
      if (rows - r == 2) score_rows<2, 4>(r, k, keys, ahead);
      else if (rows - r == 1) score_rows<1, 8>(r, k, keys, ahead);
    }
  }

  // Scores the rows from r on for the eight keys from `first` on.
  template <int ROWS, int KEYS, class Number>
  __attribute__((always_inline)) void score_rows(
      int64_t r, int64_t first, Rows<Number> keys, Rows<Number> ahead) const {
    for (int64_t k = first; k < first + 8; k += KEYS)
      score<ROWS, KEYS>(q + r * shape.width, shape.width, keys, ahead, k, scores + r * KV_TILE);
  }

  template <class Weights>
  void weigh_all(int64_t first_key, const State& state) const {
    for (int64_t r = 0; r < rows; r++) {
      Range seen = seen_by(work, position(r), first_key);
      if (seen.empty()) continue;
      if (work.softcap > 0.0f) cap(scores + r * KV_TILE, seen.begin / WIDTH * WIDTH, seen.end, 1.0f);
      weigh<Weights>(shape, state, r, seen, scores + r * KV_TILE);
    }
  }

  // Scales and caps scores from `first` on; may also cap up to a vector of numbers that are no scores after `end`.
  void cap(float* values, int64_t first, int64_t end, float scale) const {
    for (int64_t i = first; i < end; i += WIDTH)
      store(values + i, softcapped(load(values + i) * splat(scale), work.softcap));
  }

  // The outer loop is over columns, so that the tile's values in these columns stay in the L1 cache while all rows use
  // them.
  template <class Number>
  void add_all(int64_t first_key, Rows<Number> values, Rows<Number> ahead, const State& state) const {
    int64_t column = 0;
    for (; column + VALUE_PAIRS * TWO <= shape.value_width; column += VALUE_PAIRS * TWO)
      add_columns<VALUE_PAIRS>(first_key, values, ahead, column, state);
    for (; column < shape.value_width; column += TWO) add_columns<1>(first_key, values, ahead, column, state);
  }

  template <int PAIRS, class Number>
  __attribute__((always_inline)) void add_columns(
      int64_t first_key, Rows<Number> values, Rows<Number> ahead, int64_t column, const State& state) const {
    int64_t r = 0;
    for (; rows - r >= 3; r += 3) add_rows<3, PAIRS>(first_key, r, values, ahead, column, state);
    if (rows - r == 2) add_rows<2, PAIRS>(first_key, r, values, ahead, column, state);
    else if (rows - r == 1) add_rows<1, PAIRS>(first_key, r, values, ahead, column, state);
  }

  // Adds the keys that all ROWS rows see together; adds the keys before and after them row by row.
  template <int ROWS, int PAIRS, class Number>
  __attribute__((always_inline)) void add_rows(int64_t first_key, int64_t first_row, Rows<Number> values,
                                               Rows<Number> ahead, int64_t column, const State& state) const {
    Range all{seen_by(work, position(first_row + ROWS - 1), first_key).begin,
              seen_by(work, position(first_row), first_key).end};
    all.end = at_least(all.begin, all.end);
    auto one_by_one = [&](bool before) {
      for (int64_t r = first_row; r < first_row + ROWS; r++) {
        Range seen = seen_by(work, position(r), first_key);
        if (before) seen.end = at_most(seen.end, all.begin);
        else seen.begin = at_least(seen.begin, all.end);
        if (!seen.empty()) add_values<1, PAIRS>(r, values, ahead, seen, column, state);
      }
    };
    if (ROWS > 1) one_by_one(true);
    add_values<ROWS, PAIRS>(first_row, values, ahead, all, column, state);
    if (ROWS > 1) one_by_one(false);
  }

  template <int ROWS, int PAIRS, class Number>
  __attribute__((always_inline)) void add_values(int64_t r, Rows<Number> values, Rows<Number> ahead, Range seen,
                                                 int64_t column, const State& state) const {
    FISSILE_ISA::add_values<ROWS, PAIRS>(
        scores + r * KV_TILE, values, ahead, seen, column, state.values + r * shape.value_width, shape.value_width);
  }

  // Number of keys in the tile at `first_key` that some row may see.
  int64_t filled(int64_t first_key) const { return at_most(tile.position + tile.tokens - first_key, KV_TILE); }

  // Finds the offsets of the keys and values of head `of_head` in the tile at `first`. Entries past the last key repeat
  // it.
  void locate(int64_t of_head, int64_t first, int64_t* offsets) const {
    const int64_t count = filled(first);
    if (work.selected) locate_selected(of_head, work.selected + tile.row * work.topk + first, count, offsets);
    else locate_all(of_head, first, count, offsets);
    for (int64_t k = count; k < KV_TILE; k++) offsets[k] = offsets[count - 1];
  }

  // Finds the offsets of the tile to prefetch while computing the one at `first`; the same tile if there is no next
  // one.
  void locate_next(int64_t first, int64_t* offsets) const {
    if (first + KV_TILE < tile.position + tile.tokens) locate(head, first + KV_TILE, offsets);
    else if (head + 1 < end_head) locate(head + 1, first_seen_tile(), offsets);
    else if (behind) behind->locate(behind->head, behind->first_seen_tile(), offsets);
    else locate(head, first, offsets);
  }

  int64_t offset_of(int64_t of_head, int64_t key) const {
    const int64_t block = work.block_tables[tile.sequence * work.table_stride + key / work.block_size];
    return ((block * work.kv_heads + of_head) * work.block_size + key % work.block_size) * work.dim;
  }

  void locate_selected(int64_t of_head, const int64_t* positions, int64_t count, int64_t* offsets) const {
    for (int64_t k = 0; k < count; k++) offsets[k] = offset_of(of_head, positions[k]);
  }

  void locate_all(int64_t of_head, int64_t first, int64_t count, int64_t* offsets) const {
    for (int64_t k = 0; k < count;) {
      int64_t offset = offset_of(of_head, first + k);
      const int64_t end = at_most(count, k + work.block_size - (first + k) % work.block_size);
      for (; k < end; k++, offset += work.dim) offsets[k] = offset;
    }
  }

  template <class Stored>
  void widen_as(const void* base, const int64_t* here, const void* ahead, const int64_t* next, int64_t count) const {
    widen(Rows<Stored>{static_cast<const Stored*>(base), here}, Rows<Stored>{static_cast<const Stored*>(ahead), next},
          work.dim, shape, count, wide);
  }

  // Widens the tile's keys or values at offsets `here` to float32; prefetches rows `next` of `ahead`.
  void widen_tile(const void* base, const int64_t* here, const void* ahead, const int64_t* next, int64_t count) const {
    if (work.kv_dtype == FLOAT16) widen_as<Half>(base, here, ahead, next, count);
    else if (work.kv_dtype == FLOAT8) widen_as<Fp8>(base, here, ahead, next, count);
    else widen_as<KvNumber>(base, here, ahead, next, count);
  }

  // Adds the KV tile at `first_key`, whose rows are at offsets `here`; prefetches the rows at offsets `next`.
  void add_tile(int64_t first_key, const int64_t* here, const int64_t* next, const State& state) const {
#if defined(FISSILE_PAIRS) || defined(FISSILE_TILES)
    if constexpr (HAS_PAIRS<KvNumber>)
      if (paired) return add_paired_tile(first_key, here, next, state);
#endif
    if (widened) add_wide_tile(first_key, here, next, state);
    else add_narrow_tile(first_key, here, next, state);
  }

  void add_narrow_tile(int64_t first_key, const int64_t* here, const int64_t* next, const State& state) const {
    const KvNumber *keys = static_cast<const KvNumber*>(work.keys), *values = static_cast<const KvNumber*>(work.values);
    score_all(first_key, Rows<KvNumber>{keys, here}, Rows<KvNumber>{keys, next});
    weigh_all<InPlace>(first_key, state);
    add_all(first_key, Rows<KvNumber>{values, here}, Rows<KvNumber>{values, next}, state);
  }

  void add_wide_tile(int64_t first_key, const int64_t* here, const int64_t* next, const State& state) const {
    int64_t offsets[KV_TILE];
    for (int64_t k = 0; k < KV_TILE; k++) offsets[k] = k * shape.stride;
    const Rows<float> rows_at{wide, offsets};
    const int64_t count = filled(first_key);
    const bool latent = work.keys == work.values;
    widen_tile(work.keys, here, work.values, latent ? next : here, count);
    score_all(first_key, rows_at, rows_at);
    weigh_all<InPlace>(first_key, state);
    if (!latent) widen_tile(work.values, here, work.keys, next, count);
    add_all(first_key, rows_at, rows_at, state);
  }

#if defined(FISSILE_PAIRS)
  // Number of rows that are multiplied by a key together, and whose queries are interleaved. The last group may have
  // fewer.
  int64_t rows_beside() const { return is_few() ? parts(rows, parts(rows, FEW_AT_ONCE)) : PAIRED_ROWS; }

  // Packs queries as [groups][pairs of numbers][rows_beside()].
  void pack_queries() const {
    uint32_t* to = reinterpret_cast<uint32_t*>(q);
    for (int64_t first = 0; first < rows; first += rows_beside()) {
      const int64_t count = at_most(rows_beside(), rows - first);
      for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < shape.width; i += TWO) {
          uint32_t pairs[WIDTH];
          store_words(pairs, load_pairs(query<Bf16>(first + r) + i, work.dim - i));
          for (int64_t p = 0; p < WIDTH; p++) to[(i / 2 + p) * count + r] = pairs[p];
        }
      to += shape.width / 2 * count;
    }
  }

  // True if there are few rows and keys and values are whole vectors, so that they can be used without packing.
  bool is_few() const {
    return rows <= FEW_ROWS && work.dim == shape.width && work.value_dim == shape.value_width;
  }

  // Calls `use` for each group of rows with the number of rows as a constant, the first row, and the rows to prefetch.
  // The first group prefetches `next` for all groups; the others prefetch `here`, which is cached already.
  template <class Use>
  void each_few(Rows<Bf16> here, Rows<Bf16> next, const Use& use) const {
    for (int64_t first = 0; first < rows; first += rows_beside())
      each<FEW_AT_ONCE>([&](auto less) FISSILE_INLINED {
        if (at_most(rows_beside(), rows - first) == less + 1) use(Constant<less + 1>{}, first, first ? here : next);
      });
  }

  void add_few(int64_t first_key, Rows<Bf16> keys, Rows<Bf16> next_keys, Rows<Bf16> values, Rows<Bf16> next_values,
               const State& state) const {
    const Range first = seen_by(work, position(0), first_key), last = seen_by(work, position(rows - 1), first_key);
    const uint32_t *queries = reinterpret_cast<const uint32_t*>(q), *weights = reinterpret_cast<const uint32_t*>(scores);
    each_few(keys, next_keys, [&](auto few, int64_t r, Rows<Bf16> ahead) FISSILE_INLINED {
      score_turned<few>(
          queries + r * shape.width / 2, keys, ahead, shape.width, last.end, work.scale, scores + r * KV_TILE);
    });
    weigh_all<AsTwo>(first_key, state);
    if (first.begin != last.begin || first.end != last.end) return add_packed(first_key, values, next_values, state);
    each_few(values, next_values, [&](auto few, int64_t r, Rows<Bf16> ahead) FISSILE_INLINED {
      constexpr int MOST = vectors_of_values(few);
      float* const to = state.values + r * shape.value_width;
      int64_t column = 0;
      for (; column + MOST * WIDTH <= shape.value_width; column += MOST * WIDTH)
        add_values_of<few, MOST>(weights + r * KV_TILE, values, ahead, first, column, to, shape.value_width);
      for (; column < shape.value_width; column += TWO)
        add_values_of<few, 2>(weights + r * KV_TILE, values, ahead, first, column, to, shape.value_width);
    });
  }

  void add_paired_tile(int64_t first_key, const int64_t* here, const int64_t* next, const State& state) const {
    const Bf16 *key_base = static_cast<const Bf16*>(work.keys), *value_base = static_cast<const Bf16*>(work.values);
    const Rows<Bf16> keys{key_base, here}, next_keys{key_base, next};
    const Rows<Bf16> values{value_base, here}, next_values{value_base, next};
    if (is_few()) add_few(first_key, keys, next_keys, values, next_values, state);
    else add_many(first_key, keys, next_keys, values, next_values, state);
  }

  void add_many(int64_t first_key, Rows<Bf16> keys, Rows<Bf16> next_keys, Rows<Bf16> values, Rows<Bf16> next_values,
                const State& state) const {
    uint32_t* const packed_keys = reinterpret_cast<uint32_t*>(wide);
    pack_keys(keys, next_keys, work.dim, shape.width, filled(first_key), packed_keys);
    for (int64_t r = 0; r < rows; r += PAIRED_ROWS) score_group(r, packed_keys);
    weigh_all<AsTwo>(first_key, state);
    add_packed(first_key, values, next_values, state);
  }

  // Packs the values into `wide` after the keys, and adds them weighted to rows that may see different keys.
  void add_packed(int64_t first_key, Rows<Bf16> values, Rows<Bf16> next_values, const State& state) const {
    uint32_t* const packed = reinterpret_cast<uint32_t*>(wide) + KV_TILE / 2 * shape.width;
    pack_values(values, next_values, work.value_dim, shape.value_width, filled(first_key), packed);
    int64_t column = 0;
    for (; column + PAIRED_VECTORS * WIDTH <= shape.value_width; column += PAIRED_VECTORS * WIDTH)
      add_paired_columns<PAIRED_VECTORS>(first_key, packed, column, state);
    if (column < shape.value_width) add_paired_columns<2>(first_key, packed, column, state);
  }

  void score_group(int64_t first, const uint32_t* keys) const {
    const int64_t pairs = shape.width / 2;
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(q) + first * pairs;
    float* to = scores + first * KV_TILE;
    switch (rows - first) {
      case 1: return score_paired<1>(queries, keys, pairs, work.scale, to);
      case 2: return score_paired<2>(queries, keys, pairs, work.scale, to);
      case 3: return score_paired<3>(queries, keys, pairs, work.scale, to);
      case 4: return score_paired<4>(queries, keys, pairs, work.scale, to);
      case 5: return score_paired<5>(queries, keys, pairs, work.scale, to);
      default: return score_paired<PAIRED_ROWS>(queries, keys, pairs, work.scale, to);
    }
  }

  // The outer loop is over columns, as in `add_all`.
  template <int VECTORS>
  void add_paired_columns(int64_t first_key, const uint32_t* pairs, int64_t column, const State& state) const {
    for (int64_t r = 0; r < rows; r += PAIRED_ROWS) switch (rows - r) {
        case 1: add_paired_rows<1, VECTORS>(first_key, r, pairs, column, state); break;
        case 2: add_paired_rows<2, VECTORS>(first_key, r, pairs, column, state); break;
        case 3: add_paired_rows<3, VECTORS>(first_key, r, pairs, column, state); break;
        case 4: add_paired_rows<4, VECTORS>(first_key, r, pairs, column, state); break;
        case 5: add_paired_rows<5, VECTORS>(first_key, r, pairs, column, state); break;
        default: add_paired_rows<PAIRED_ROWS, VECTORS>(first_key, r, pairs, column, state);
      }
  }

  // Adds the pairs of keys that all ROWS rows see entirely together; adds the keys before and after them row by row.
  template <int ROWS, int VECTORS>
  void add_paired_rows(
      int64_t first_key, int64_t first_row, const uint32_t* pairs, int64_t column, const State& state) const {
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(scores) + first_row * KV_TILE;
    float* values = state.values + first_row * shape.value_width + column;
    Range all{parts(seen_by(work, position(first_row + ROWS - 1), first_key).begin, 2),
              seen_by(work, position(first_row), first_key).end / 2};
    all.end = at_least(all.begin, all.end);
    auto one_by_one = [&](bool before) {
      for (int64_t r = 0; r < ROWS; r++) {
        Range seen = seen_by(work, position(first_row + r), first_key);
        if (before) seen.end = at_most(seen.end, 2 * all.begin);
        else seen.begin = at_least(seen.begin, 2 * all.end);
        if (!seen.empty())
          add_seen<VECTORS>(weights + r * KV_TILE, pairs + column, seen, values + r * shape.value_width,
                            shape.value_width);
      }
    };
    one_by_one(true);
    add_paired<ROWS, VECTORS>(weights, pairs + column, all.begin, all.end, values, shape.value_width);
    one_by_one(false);
  }
#elif defined(FISSILE_TILES)
  // Packs queries as [row tiles][pairs of numbers][TILE_ROWS], with zeros for missing rows.
  void pack_queries() const {
    uint32_t* to = reinterpret_cast<uint32_t*>(q);
    for (int64_t first = 0; first < rows; first += TILE_ROWS) {
      const Bf16* from[TILE_ROWS];
      for (int64_t r = 0; r < TILE_ROWS; r++) from[r] = first + r < rows ? query<Bf16>(first + r) : nullptr;
      for (int64_t i = 0; i < shape.width; i += TILE_STEP, to += TILE_WORDS) {
        Words pairs[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; r++)
          pairs[r] = from[r] ? load_pairs(from[r] + i, work.dim - i) : splat_word(0);
        store_turned(pairs, to);
      }
    }
  }

  // The row tiles in which some row sees some key of the KV tile.
  Range seeing_tiles(int64_t first_key) const {
    const int64_t begin = at_least(first_key - tile.position, 0);
    const int64_t end = first_key + KV_TILE + work.window - 1 - tile.position;
    return {begin * shape.group / TILE_ROWS,
            parts((work.window ? at_most(end, tile.tokens) : tile.tokens) * shape.group, TILE_ROWS)};
  }

  // Range of keys that each row of a row tile sees. Missing rows copy the range of the last row.
  SeenBy seen_by_rows(int64_t row_tile, int64_t first_key) const {
    const int64_t first = row_tile * TILE_ROWS, last = at_most(first + TILE_ROWS, rows) - 1;
    if (seen_by(work, position(last), first_key).begin == 0 && seen_by(work, position(first), first_key).end == KV_TILE)
      return {Ints{}, Ints{}, true};
    SeenBy seen{Ints{}, Ints{}, false};
    for (int lane = 0; lane < TILE_ROWS; lane++) {
      const Range range = seen_by(work, position(at_most(first + lane, last)), first_key);
      // Clamped before the cast, since positions may exceed int32.
      seen.begin[lane] = static_cast<int32_t>(at_most(range.begin, KV_TILE));
      seen.end[lane] = static_cast<int32_t>(at_least(range.end, 0));
    }
    return seen;
  }

  // Addresses of the tiles of keys: in the cache if TILE_ROWS keys are contiguous there, otherwise in copies.
  KeyTiles locate_keys(Rows<Bf16> keys, int64_t count) const {
    KeyTiles tiles{{}, work.dim};
    const bool in_place = work.dim == shape.width && work.block_size % TILE_ROWS == 0 && !work.selected;
    if (!in_place) copy_keys(keys, count);
    if (!in_place) tiles.stride = shape.width;
    // No row sees a tile past the last key, so tile 0 stands in for it.
    for (int64_t k = 0; k < KEY_TILES; k++)
      tiles.at[k] = k * TILE_ROWS >= count ? tiles.at[0]
                    : in_place             ? keys[k * TILE_ROWS]
                                           : key_copies() + k * TILE_ROWS * shape.width;
    return tiles;
  }

  Bf16* key_copies() const { return reinterpret_cast<Bf16*>(wide); }

  void copy_keys(Rows<Bf16> keys, int64_t count) const {
    for (int64_t k = 0; k < count; k++)
      for (int64_t i = 0; i < shape.width; i += 2 * WIDTH)
        store_words(key_copies() + k * shape.width + i, load_pairs(keys[k] + i, work.dim - i));
  }

  // Computes scores [row tile][key][row].
  void score_by_tiles(const KeyTiles& keys, Range row_tiles, Fetching& fetching) const {
    const uint32_t* const queries = reinterpret_cast<const uint32_t*>(q);
    const int64_t words = shape.width / 2 * TILE_ROWS, bytes = keys.stride * sizeof(Bf16);
    for (int64_t t = row_tiles.begin; t < row_tiles.end; t += 2)
      for (int64_t k = 0; k < KEY_TILES; k += 2) {
        const auto score = t + 1 == row_tiles.end ? score_tiles<1> : score_tiles<2>;
        score(keys.at + k, bytes, queries + t * words, shape.width, fetching, scores + t * SCORES + k * TILE_WORDS);
      }
  }

  void weigh_by_tiles(int64_t first_key, Range row_tiles, Fetching& fetching, const State& state) const {
    for (int64_t t = row_tiles.begin; t < row_tiles.end; t++) {
      const int64_t first = t * TILE_ROWS;
      fetching.turn();
      if (work.softcap > 0.0f) cap(scores + t * SCORES, 0, SCORES, work.scale);
      if (rows - first <= FEW_ROWS) weigh_few(first_key, first, fetching, state);
      else weigh_many(first_key, t, state);
    }
  }

  // Factor of the scores when they are weighed; capped ones are scaled already.
  float scale_left() const { return work.softcap > 0.0f ? 1.0f : work.scale; }

  void weigh_many(int64_t first_key, int64_t row_tile, const State& state) const {
    const int64_t first = row_tile * TILE_ROWS, count = at_most(rows - first, TILE_ROWS);
    const SeenBy seen = seen_by_rows(row_tile, first_key);
    const auto weigh_them = seen.whole ? weigh_rows<true> : weigh_rows<false>;
    const Floats factors =
        weigh_them(scores + row_tile * SCORES, seen, scale_left(), state.highest + first, state.sums + first);
    for (int64_t r = 0; r < count; r++) scale_values(state, first + r, factors[r]);
  }

  // Weighs the last rows, from `first` on, one at a time: there are too few of them to fill the lanes of a vector.
  void weigh_few(int64_t first_key, int64_t first, Fetching& fetching, const State& state) const {
    alignas(64) float of_rows[FEW_ROWS * KV_TILE];
    float* const of_tile = scores + first * KV_TILE;
    turn_scores(of_tile, rows - first, fetching, of_rows);
    for (int64_t r = first; r < rows; r++) {
      uint32_t* const weights = reinterpret_cast<uint32_t*>(of_tile) + (r - first) * TILE_PAIRS;
      const Range seen = seen_by(work, position(r), first_key);
      const float factor = weigh_row(of_rows + (r - first) * KV_TILE, {at_most(seen.begin, KV_TILE), at_least(seen.end, 0)},
                                     scale_left(), state.highest + r, state.sums + r, weights);
      scale_values(state, r, factor);
    }
  }

  void scale_values(const State& state, int64_t row, float factor) const {
    if (factor != 1.0f) scale(state.values + row * shape.value_width, shape.value_width, factor);
  }

  // Packs the values of the TILE_PAIRS keys from k on as pairs, COLUMNS numbers from `column` on. Keys outside `seen`
  // become zeros.
  void pack_seen(Rows<Bf16> values, Range seen, int64_t k, int64_t column, uint32_t* pairs) const {
    // The usual case, a fully seen block of whole lines, needs no check per key.
    if (seen.begin <= k && seen.end >= k + TILE_PAIRS && column + COLUMNS <= work.value_dim)
      return pack_whole(values, k, column, pairs);
    for (int64_t i = k; i < k + TILE_PAIRS; i += 2, pairs += COLUMNS)
      pack_neighbours(values, seen, i, column, work.value_dim, pairs);
  }

  // Packs the values of all keys of a step, and prefetches meanwhile.
  void pack_step(
      Rows<Bf16> values, Range seen, int64_t step, int64_t column, Fetching& fetching, uint32_t* pairs) const {
    for (int64_t k = step * TILE_STEP; k < (step + 1) * TILE_STEP; k += TILE_PAIRS, pairs += TILE_PAIRS / 2 * COLUMNS) {
      fetching.turn();
      pack_seen(values, seen, k, column, pairs);
    }
  }

  // Packed values follow the copies of the keys.
  uint32_t* packed_values() const { return reinterpret_cast<uint32_t*>(wide) + KV_TILE / 2 * shape.width; }

  // Adds the seen values to the rows of `row_tiles`, a group of columns at a time, so that the packed values stay in
  // the L1 cache.
  void add_seen_values(Rows<Bf16> values, Range seen, Range row_tiles, Fetching& fetching, const State& state) const {
    if (row_tiles.begin + 1 == row_tiles.end) return add_to_one_tile(values, seen, row_tiles.begin, fetching, state);
    const Range steps{seen.begin / TILE_STEP, parts(seen.end, TILE_STEP)};
    const int64_t width = shape.value_width;
    const uint32_t* const weights = reinterpret_cast<const uint32_t*>(scores);
    for (int64_t column = 0; column < width; column += COLUMNS) {
      for (int64_t step = steps.begin; step < steps.end; step++)
        pack_step(values, seen, step, column, fetching, packed_values() + step * STEP_PAIRS);
      fetching.turn();
      for (int64_t t = row_tiles.begin; t < row_tiles.end; t += 2) {
        const auto add = t + 1 == row_tiles.end ? add_weighted<1> : add_weighted<2>;
        add(weights + t * SCORES, packed_values(), steps.begin, steps.end, state.values + t * TILE_ROWS * width + column,
            width);
      }
    }
  }

  // Adds the seen values to one row tile. Packs the next step's values while multiplying those of the current one,
  // because a tile load waits for data that were just stored.
  void add_to_one_tile(Rows<Bf16> values, Range seen, int64_t row_tile, Fetching& fetching, const State& state) const {
    const Range steps{seen.begin / TILE_STEP, parts(seen.end, TILE_STEP)};
    const int64_t width = shape.value_width;
    const uint32_t* const weights = reinterpret_cast<const uint32_t*>(scores) + row_tile * SCORES;
    uint32_t *packed = packed_values(), *room = packed + STEP_PAIRS;
    pack_step(values, seen, steps.begin, 0, fetching, packed);
    for (int64_t column = 0; column < width; column += COLUMNS) {
      float* const sums = state.values + row_tile * TILE_ROWS * width + column;
      load_sums<1>(sums, width);
      for (int64_t step = steps.begin; step < steps.end; step++) {
        if (step + 1 < steps.end) pack_step(values, seen, step + 1, column, fetching, room);
        else if (column + COLUMNS < width) pack_step(values, seen, steps.begin, column + COLUMNS, fetching, room);
        multiply_step<1>(weights + step * STEP_SCORES, packed);
        uint32_t* const done = packed;
        packed = room;
        room = done;
      }
      store_sums<1>(sums, width);
      fetching.turn();
    }
  }

  // Zero times a value that is not finite is NaN. If only some rows see such a value, this adds the values token by
  // token, with zeros for the keys that the token does not see. It restores the rows of other tokens in the same tile.
  void add_by_tokens(int64_t first_key, Rows<Bf16> values, Fetching& fetching, const State& state) const {
    for (int64_t token = 0; token < tile.tokens; token++) {
      const Range seen = seen_by(work, tile.position + token, first_key);
      const Range own{token * shape.group, (token + 1) * shape.group};
      if (seen.empty()) continue;
      for (int64_t t = own.begin / TILE_ROWS; t * TILE_ROWS < own.end; t++) {
        const uint64_t row = static_cast<uint64_t>(shape.value_width) * sizeof(float);
        float* const to = state.values + t * TILE_ROWS * shape.value_width;
        // Saves the tile in place of the copies of the keys, which are not needed any more.
        __builtin_memcpy(wide, to, TILE_ROWS * row);
        add_seen_values(values, seen, {t, t + 1}, fetching, state);
        for (int64_t r = 0; r < TILE_ROWS; r++)
          if (!own.has(t * TILE_ROWS + r))
            __builtin_memcpy(to + r * shape.value_width, wide + r * shape.value_width, row);
      }
    }
  }

  // Number of points at which data can be prefetched while a KV tile is multiplied by one row tile: at its scores,
  // weights and values.
  int64_t turns_of_tile() const {
    return KEY_TILES / 2 * shape.width / TILE_STEP + 1 + KEY_TILES +
           shape.value_width / COLUMNS * (KV_TILE / TILE_PAIRS + 1);
  }

  void add_paired_tile(int64_t first_key, const int64_t* here, const int64_t* next, const State& state) const {
    const Bf16 *key_base = static_cast<const Bf16*>(work.keys), *value_base = static_cast<const Bf16*>(work.values);
    const Rows<Bf16> keys{key_base, here}, next_keys{key_base, next};
    const Rows<Bf16> values{value_base, here}, next_values{value_base, next};
    const Range row_tiles = seeing_tiles(first_key);
    // Values that are part of the keys are prefetched with them.
    const int64_t value_width = work.values == work.keys ? 0 : shape.value_width;
    Fetching fetching(next_keys, shape.width, next_values, value_width, turns_of_tile());
    score_by_tiles(locate_keys(keys, filled(first_key)), row_tiles, fetching);
    weigh_by_tiles(first_key, row_tiles, fetching, state);
    add_values_by_tiles(first_key, row_tiles, values, fetching, state);
    fetching.fetch_rest();
  }

  void add_values_by_tiles(
      int64_t first_key, Range row_tiles, Rows<Bf16> values, Fetching& fetching, const State& state) const {
    const Range first = seen_by(work, position(0), first_key), last = seen_by(work, position(rows - 1), first_key);
    // The keys that the first row sees and the last row does not, and the reverse.
    const Range before{first.begin, at_most(last.begin, KV_TILE)}, behind{at_least(first.end, 0), last.end};
    if (are_finite(values, work.value_dim, before) && are_finite(values, work.value_dim, behind))
      add_seen_values(values, {first.begin, last.end}, row_tiles, fetching, state);
    else
      add_by_tokens(first_key, values, fetching, state);
  }
#endif

  // The first key of the first KV tile of which some row sees a key.
  int64_t first_seen_tile() const {
    return work.window ? at_least(tile.position - work.window + 1, 0) / KV_TILE * KV_TILE : 0;
  }

  // Computes the state of one split.
  void add_split(int64_t split, const State& state) const {
    state.clear(shape, places_of(rows));
    const int64_t last = at_most(tile.position + tile.tokens, (split + 1) * KV_SPLIT);
    int64_t places[2][KV_TILE];
    int64_t *here = places[0], *next = places[1];
    int64_t key = at_least(split * KV_SPLIT, first_seen_tile());
    if (key < last) locate(head, key, here);
    for (; key < last; key += KV_TILE) {
      locate_next(key, next);
      add_tile(key, here, next, state);
      int64_t* const done = here;
      here = next;
      next = done;
    }
  }

  // Merges all splits into `state`; `part` is scratch for every split but the first.
  void add_all_splits(const State& state, const State& part) const {
    const int64_t splits = parts(tile.position + tile.tokens, KV_SPLIT);
    add_split(0, state);
    for (int64_t split = 1; split < splits; split++) {
      add_split(split, part);
      merge(shape, state, part, rows);
    }
  }

  void add_sink(const State& state, int64_t row, float sink) const {
    raise(shape, state, row, sink);
    state.sums[row] += scalar_exp(sink - state.highest[row]);
  }

  // Divides the weighted values by the sum of weights and restores memory order.
  __attribute__((always_inline)) Two divided(Two sums, Floats total) const {
#if defined(FISSILE_TILES)
    // Adding zero turns -0 into 0. A KV tile of which this row sees nothing, but other rows do, has the same effect.
    const Floats share = splat(1.0f) / total;
    if (paired) return from_paired({fma(sums.first, share, zeros()), fma(sums.second, share, zeros())});
#endif
    const Two quotients{sums.first / total, sums.second / total};
#if defined(FISSILE_PAIRS)
    if (paired) return from_paired(quotients);
#endif
    return as_stored(quotients, static_cast<const KvNumber*>(nullptr));
  }

  template <class Number>
  void write(const State& state) const {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t out_head = head * shape.group + r % shape.group;
      if (work.sinks) add_sink(state, r, work.sinks[out_head]);
      Number* to = static_cast<Number*>(work.out) + (tile.row + r / shape.group) * work.out_row_stride +
                   out_head * work.value_dim;
      const float* from = state.values + r * shape.value_width;
      Floats total = splat(state.sums[r]);
      for (int64_t i = 0; i < work.value_dim; i += TWO) {
        Two two = divided({load(from + i), load(from + i + WIDTH)}, total);
        store_up_to(to + i, two.first, work.value_dim - i);
        store_up_to(to + i + WIDTH, two.second, work.value_dim - i - WIDTH);
      }
    }
  }

  void load_queries() const {
#if defined(FISSILE_PAIRS) || defined(FISSILE_TILES)
    if constexpr (HAS_PAIRS<KvNumber>)
      if (paired) return pack_queries();
#endif
    load_wide_queries();
  }

  void load_wide_queries() const {
    if (work.dtype == FLOAT32) load_queries_of<float>();
    else load_queries_of<Bf16>();
  }

  void finish(const State& state) const {
    if (work.dtype == FLOAT32) write<float>(state);
    else write<Bf16>(state);
  }
};

// The states of a query tile and a head whose keys several tasks share. Place 0 holds the merged result; at first it
// holds the first split.
struct States {
  const int64_t places;
  const int64_t size;
  float* const memory;

  States(const fissile::Attention& work, const Shape& shape, const fissile::QueryTile& tile, int64_t head)
      : places(places_of(tile.tokens * shape.group)),
        size(shape.state_size(places)),
        memory(work.states + tile.states + head * at_most(tile.splits, work.slots) * size) {}

  State at(int64_t place) const { return State(places, memory + place * size); }
};

// The place of the first split of this wave, and the number of a tile's splits in this wave.
int64_t first_place(const fissile::Attention& work) { return work.first_split ? 1 : 0; }
int64_t splits_now(const fissile::Attention& work, const fissile::QueryTile& tile) {
  return at_most(tile.splits, work.end_split) - work.first_split;
}

// The last tile with first_task <= task.
const fissile::QueryTile& tile_of(const fissile::Attention& work, int64_t task) {
  int64_t low = 0, high = work.wave_tiles - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (work.tiles[middle].first_task <= task) low = middle;
    else high = middle - 1;
  }
  return work.tiles[low];
}

// Computes one split of a query tile and a head; run_merge() merges it.
template <class KvNumber>
void run_split(const fissile::Attention& work, int64_t task) {
  const Shape shape(work);
  const fissile::QueryTile& tile = tile_of(work, task);
  const int64_t place = task - tile.first_task, count = splits_now(work, tile), head = place / count;
  float* memory = fissile::scratch(fissile::OF_TASK, Task<KvNumber>::memory(shape));
  if (!memory) return;
  const Task<KvNumber> made(work, tile, head, head + 1, memory);
  [[maybe_unused]] const Tiles tiles(made.rows);
  made.load_queries();
  made.add_split(work.first_split + place % count, States(work, shape, tile, head).at(first_place(work) + place % count));
}

// A range of key heads of a query tile: one task of `run_heads`.
struct Heads {
  const fissile::QueryTile& tile;
  int64_t begin;
  int64_t end;
};

Heads heads_of(const fissile::Attention& work, int64_t task) {
  const int64_t shares = parts(work.kv_heads, work.task_heads), begin = task % shares * work.task_heads;
  return {work.tiles[task / shares], begin, at_most(begin + work.task_heads, work.kv_heads)};
}

template <class KvNumber>
void run_heads(const fissile::Attention& work, int64_t task) {
  const Shape shape(work);
  const Heads heads = heads_of(work, task);
  // Prefetches task + 1, which the same thread mostly runs next.
  const bool is_last = task + 1 == attention_tasks(work);
  const Heads next = is_last ? heads : heads_of(work, task + 1);
  const int64_t memory_of_task = Task<KvNumber>::memory(shape);
  const int64_t places = places_of(heads.tile.tokens * shape.group), size = shape.state_size(places);
  float* memory = fissile::scratch(fissile::OF_TASK, memory_of_task + 2 * shape.state_size(shape.most_rows));
  if (!memory) return;
  float* states = memory + memory_of_task;
  const State state(places, states);
  const Task<KvNumber> behind(work, next.tile, next.begin, next.end, memory);
  [[maybe_unused]] const Tiles tiles(heads.tile.tokens * shape.group);
  for (int64_t head = heads.begin; head < heads.end; head++) {
    const Task<KvNumber> made(work, heads.tile, head, heads.end, memory, is_last ? nullptr : &behind);
    made.load_queries();
    made.add_all_splits(state, State(places, states + size));
    made.finish(state);
  }
}

template <class KvNumber>
void run(const fissile::Attention& work, int64_t task) {
  if (work.slots) run_split<KvNumber>(work, task);
  else run_heads<KvNumber>(work, task);
}

template <class KvNumber>
void run_merge(const fissile::Attention& work, int64_t task) {
  const Shape shape(work);
  const fissile::QueryTile& tile = work.tiles[task / work.kv_heads];
  const int64_t head = task % work.kv_heads;
  const Task<KvNumber> made(work, tile, head, head + 1, nullptr);
  const States states(work, shape, tile, head);
  const State state = states.at(0);
  const int64_t end = first_place(work) + splits_now(work, tile);
  for (int64_t place = 1; place < end; place++) merge(shape, state, states.at(place), made.rows);
  if (tile.splits <= work.end_split) made.finish(state);
}

// Maps scores to unsigned integers of the same order. NaN and scores below -3e38 map to 0.
FISSILE_INLINE Words rank_of(Floats score) {
  // Adding zero turns -0 into 0, so that both rank the same.
  Words bits = (Words)(score + zeros());
  Words rank = (Words)((Ints)bits < 0) ? ~bits : bits | splat_word(0x80000000u);
  return score > splat(-3.0e38f) ? rank : splat_word(0);
}

// Number of the `count` ranks that are `least` or above.
int64_t count_from(const uint32_t* ranks, int64_t count, uint32_t least) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i++) found += ranks[i] >= least;
  return found;
}

// Writes the positions of the `topk` highest ranks, ascending; among equals the first ones. Needs count >= topk.
void take_highest(const uint32_t* ranks, int64_t count, int64_t topk, int64_t* positions) {
  uint32_t least = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (count_from(ranks, count, least | bit) >= topk) least |= bit;
  int64_t ties = topk - (least == 0xFFFFFFFFu ? 0 : count_from(ranks, count, least + 1));
  for (int64_t i = 0, taken = 0; taken < topk; i++)
    if (ranks[i] > least || (ranks[i] == least && ties-- > 0)) positions[taken++] = i;
}

// Scores the index keys of a query tile, one KV tile at a time, and selects the highest.
template <class KvNumber>
struct SelectTask {
  const fissile::SelectTokens& work;
  const Task<KvNumber> task;
  // Ranks [tokens][length], and the number of keys of the tile, rounded up to whole KV tiles.
  uint32_t* const ranks;
  const int64_t length;

  static int64_t length_of(const fissile::QueryTile& tile) {
    return parts(tile.position + tile.tokens, KV_TILE) * KV_TILE;
  }

  SelectTask(const fissile::SelectTokens& work, const fissile::QueryTile& tile, float* memory)
      : work(work),
        task(work.keys, tile, 0, 1, memory),
        ranks(reinterpret_cast<uint32_t*>(memory + Task<KvNumber>::memory(Shape(work.keys)))),
        length(length_of(tile)) {}

  void score_tile(int64_t first_key) const {
    int64_t here[KV_TILE], offsets[KV_TILE];
    for (int64_t k = 0; k < KV_TILE; k++) offsets[k] = k * task.shape.stride;
    task.locate(0, first_key, here);
    if (!task.widened) {
      const Rows<KvNumber> keys{static_cast<const KvNumber*>(work.keys.keys), here};
      return task.score_all(first_key, keys, keys);
    }
    task.widen_tile(work.keys.keys, here, work.keys.keys, here, task.filled(first_key));
    const Rows<float> keys{task.wide, offsets};
    task.score_all(first_key, keys, keys);
  }

  // Ranks the tile's keys for one token. Ranks of keys that the token does not see are undefined.
  void rank_tile(int64_t token, int64_t first_key) const {
    const int64_t heads = work.keys.heads;
    const float* weights = work.weights + (task.tile.row + token) * heads;
    for (int64_t k = 0; k < KV_TILE; k += WIDTH) {
      Floats total = zeros();
      for (int64_t h = 0; h < heads; h++) {
        Floats product = load(task.scores + (token * heads + h) * KV_TILE + k);
        total = fma(splat(weights[h]), product < zeros() ? zeros() : product, total);
      }
      Words rank = rank_of(total);
      __builtin_memcpy(ranks + token * length + first_key + k, &rank, sizeof rank);
    }
  }

  void run() const {
    task.load_wide_queries();
    for (int64_t key = 0; key < length; key += KV_TILE) {
      score_tile(key);
      for (int64_t token = 0; token < task.tile.tokens; token++) rank_tile(token, key);
    }
    for (int64_t token = 0; token < task.tile.tokens; token++) choose(token);
  }

  void choose(int64_t token) const {
    int64_t* positions = work.positions + (task.tile.row + token) * work.topk;
    const int64_t visible = task.tile.position + token + 1;
    if (visible > work.topk) return take_highest(ranks + token * length, visible, work.topk, positions);
    for (int64_t i = 0; i < visible; i++) positions[i] = i;
  }
};

template <class KvNumber>
void run_selection(const fissile::SelectTokens& work, int64_t task) {
  const fissile::QueryTile& tile = work.keys.tiles[task];
  const int64_t ranks = tile.tokens * SelectTask<KvNumber>::length_of(tile);
  float* memory = fissile::scratch(fissile::OF_TASK, Task<KvNumber>::memory(Shape(work.keys)) + ranks);
  if (!memory) return;
  SelectTask<KvNumber>(work, tile, memory).run();
}

}  // namespace

int64_t attention_state_size(const fissile::Attention& work, const fissile::QueryTile& tile) {
  const Shape shape(work);
  return shape.state_size(places_of(tile.tokens * shape.group));
}

int64_t attention_tasks(const fissile::Attention& work) {
  return work.slots ? work.wave_tasks : work.num_tiles * parts(work.kv_heads, work.task_heads);
}

void attention(const fissile::Attention& work, int64_t task) {
  if (work.kv_dtype == BFLOAT16) run<Bf16>(work, task);
  else run<float>(work, task);
}

int64_t attention_merge_tasks(const fissile::Attention& work) { return work.wave_tiles * work.kv_heads; }

void attention_merge(const fissile::Attention& work, int64_t task) {
  if (work.kv_dtype == BFLOAT16) run_merge<Bf16>(work, task);
  else run_merge<float>(work, task);
}

int64_t select_tokens_tasks(const fissile::SelectTokens& work) { return work.keys.num_tiles; }

void select_tokens(const fissile::SelectTokens& work, int64_t task) {
  if (work.keys.kv_dtype == BFLOAT16) run_selection<Bf16>(work, task);
  else run_selection<float>(work, task);
}

#if defined(FISSILE_PAIRS) || defined(FISSILE_TILES)
void use_own_attention(fissile::Kernels& table) {
  table.attention_state_size = attention_state_size;
  table.attention_tasks = attention_tasks;
  table.attention = attention;
  table.attention_merge_tasks = attention_merge_tasks;
  table.attention_merge = attention_merge;
  table.query_rows = QUERY_ROWS;
}
#endif

}  // namespace FISSILE_ISA
