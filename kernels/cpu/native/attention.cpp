// Batch-invariant attention over a paged KV cache.
//
// A query row meets its keys in tiles of KV_TILE at absolute positions, tile after tile: scores, their exponentials
// relative to the largest score so far, and the values weighted by them. KV_SPLIT keys, also at absolute positions, make a
// state (largest score, sum of weights, weighted values) of their own, and the states of a row are merged in order. So one
// task may compute all splits of a row or several tasks one each: the bits are the same, and they do not depend on how
// many rows a step has, where its chunks end, or which rows share a query tile. A decode is a prefill of one row.
//
// Keys that a row does not see have no part in its numbers, not even as zeros times something: what lies in unwritten
// slots, or belongs to later tokens, may be NaN.
#include "attention.hpp"

#include "scratch.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::FLOAT32;
using fissile::KV_SPLIT;
using fissile::KV_TILE;

// From so many rows on bfloat16 keys and values are widened once, not by each row.
constexpr int64_t WIDEN_FROM = 5;
// Vectors of values that are summed at a time.
constexpr int64_t VALUE_VECTORS = 4;

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

float lowest() { return -__builtin_inff(); }

float scalar_exp(float x) { return exp(splat(x))[0]; }

// What tasks have in common.
struct Shape {
  int64_t group;      // query heads of a key head
  int64_t width;      // dim rounded up to whole vectors
  int64_t most_rows;  // of a query tile

  explicit Shape(const fissile::Attention& work)
      : group(work.heads / work.kv_heads),
        width(tiles_of(work.dim, WIDTH) * WIDTH),
        most_rows(work.tile_tokens * group) {}

  int64_t state_size() const { return most_rows * (width + 2); }
};

// The result so far of the rows of a query tile.
struct State {
  float* highest;
  float* sums;
  float* values;

  State(const Shape& shape, float* memory)
      : highest(memory), sums(memory + shape.most_rows), values(memory + 2 * shape.most_rows) {}

  void clear(const Shape& shape, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) highest[r] = lowest();
    for (int64_t r = 0; r < rows; r++) sums[r] = 0.0f;
    __builtin_memset(values, 0, static_cast<uint64_t>(rows * shape.width) * sizeof(float));
  }
};

void scale(float* values, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += WIDTH) store(values + i, load(values + i) * splat(factor));
}

// Brings row r of a state to a larger `highest`.
void raise(const Shape& shape, const State& state, int64_t r, float highest) {
  if (!(highest > state.highest[r])) return;
  if (state.highest[r] != lowest()) {
    float factor = scalar_exp(state.highest[r] - highest);
    state.sums[r] *= factor;
    scale(state.values + r * shape.width, shape.width, factor);
  }
  state.highest[r] = highest;
}

// Adds the state of the next keys.
void merge(const Shape& shape, const State& into, const State& next, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    if (next.highest[r] == lowest()) continue;
    raise(shape, into, r, next.highest[r]);
    float factor = scalar_exp(next.highest[r] - into.highest[r]);
    into.sums[r] += next.sums[r] * factor;
    float *to = into.values + r * shape.width, *from = next.values + r * shape.width;
    for (int64_t i = 0; i < shape.width; i += WIDTH) store(to + i, fma(load(from + i), splat(factor), load(to + i)));
  }
}

// The keys [begin, end) of a KV tile that a row sees.
struct Range {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

Range seen_by(const fissile::Attention& work, int64_t position, int64_t first_key) {
  int64_t begin = work.window ? position - work.window + 1 - first_key : 0;
  return {at_least(begin, 0), at_most(position + 1 - first_key, KV_TILE)};
}

// scores[row][key] for 8 keys and one row, or 4 keys and two rows: the same sums either way.
template <int ROWS, class Number>
FISSILE_INLINE void score(
    const float* q, int64_t width, const Number* const* keys, float* scores) {
  constexpr int KEYS = 8 / ROWS;
  Floats sums[8];
  for (auto& one : sums) one = zeros();
  for (int64_t i = 0; i < width; i += WIDTH) {
    Floats queries[ROWS];
    for (int r = 0; r < ROWS; r++) queries[r] = load(q + r * width + i);
#pragma GCC unroll 8
    for (int k = 0; k < KEYS; k++) {
      Floats key = load(keys[k] + i);
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r++) sums[r * KEYS + k] = fma(queries[r], key, sums[r * KEYS + k]);
    }
  }
  Floats8 totals = sums_of_8(sums);
  float eight[8];
  __builtin_memcpy(eight, &totals, sizeof eight);
  for (int r = 0; r < ROWS; r++) __builtin_memcpy(scores + r * KV_TILE, eight + r * KEYS, KEYS * sizeof(float));
}

template <int ROWS, class Number>
void score_rows(const float* q, int64_t width, const Number* const* keys, Range seen, float* scores) {
  constexpr int KEYS = 8 / ROWS;
  for (int64_t k = seen.begin / KEYS * KEYS; k < seen.end; k += KEYS) score<ROWS>(q, width, keys + k, scores + k);
}

// Turns a row's scores into weights, and brings its state up to their largest.
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
  for (int64_t k = first; k < seen.end; k += WIDTH) {
    Floats weights = inside(k) ? exp(load(scores + k) - highest) : zeros();
    store(scores + k, weights);
    total += weights;
  }
  state.sums[r] += sum(total);
}

// values[row] += weights[row] * rows of V, for VECTORS vectors of the columns.
template <int ROWS, int VECTORS, class Number>
FISSILE_INLINE void add_values(const float* weights, const Number* const* rows, Range seen, int64_t column,
                               float* values, int64_t width) {
  Floats sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(values + r * width + column + v * WIDTH);
  for (int64_t k = seen.begin; k < seen.end; k++) {
    Floats factors[ROWS];
    for (int r = 0; r < ROWS; r++) factors[r] = splat(weights[r * KV_TILE + k]);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      Floats value = load(rows[k] + column + v * WIDTH);
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r++) sums[r][v] = fma(factors[r], value, sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(values + r * width + column + v * WIDTH, sums[r][v]);
}

template <int ROWS, class Number>
void add_rows(const float* weights, const Number* const* rows, Range seen, float* values, int64_t width) {
  int64_t column = 0;
  for (; column + VALUE_VECTORS * WIDTH <= width; column += VALUE_VECTORS * WIDTH)
    add_values<ROWS, VALUE_VECTORS>(weights, rows, seen, column, values, width);
  for (; column < width; column += WIDTH) add_values<ROWS, 1>(weights, rows, seen, column, values, width);
}

// Where the keys, or the values, of a KV tile are; those past the sequence's end stand for the last one.
template <class Number>
void locate(const fissile::Attention& work, const int64_t* table, int64_t head, int64_t first, int64_t filled,
            const Number* base, const Number** rows) {
  for (int64_t k = 0; k < filled;) {
    const int64_t block = table[(first + k) / work.block_size], offset = (first + k) % work.block_size;
    const Number* row = base + ((block * work.kv_heads + head) * work.block_size + offset) * work.dim;
    for (const int64_t end = at_most(filled, k + work.block_size - offset); k < end; k++, row += work.dim) rows[k] = row;
  }
  for (int64_t k = filled; k < KV_TILE; k++) rows[k] = rows[filled - 1];
}

// float32 copies of whole vectors of those rows.
template <class Number>
void widen(const Number* const* rows, int64_t dim, int64_t width, int64_t filled, float* memory, const float** wide) {
  for (int64_t k = 0; k < filled; k++) {
    for (int64_t i = 0; i < width; i += WIDTH) store(memory + k * width + i, load_up_to(rows[k] + i, dim - i));
    wide[k] = memory + k * width;
  }
  for (int64_t k = filled; k < KV_TILE; k++) wide[k] = wide[filled - 1];
}

// One query tile and one key head, tile by tile of its keys.
template <class Number, class KvNumber>
struct Task {
  const fissile::Attention& work;
  const Shape shape{work};
  const fissile::QueryTile& tile;
  const int64_t head;
  const int64_t rows = tile.tokens * shape.group;
  float* const q;
  float* const scores;
  float* const wide;

  static int64_t memory(const Shape& shape) {
    return shape.most_rows * (shape.width + KV_TILE) + KV_TILE * shape.width;
  }

  Task(const fissile::Attention& work, const fissile::QueryTile& tile, int64_t head, float* memory)
      : work(work),
        tile(tile),
        head(head),
        q(memory),
        scores(q + shape.most_rows * shape.width),
        wide(scores + shape.most_rows * KV_TILE) {}

  // Row t * group + g is head g of token t.
  void load_queries() const {
    for (int64_t r = 0; r < rows; r++) {
      const Number* from = static_cast<const Number*>(work.q) + (tile.row + r / shape.group) * work.q_row_stride +
                           (head * shape.group + r % shape.group) * work.q_head_stride;
      for (int64_t i = 0; i < shape.width; i += WIDTH)
        store(q + r * shape.width + i, load_up_to(from + i, work.dim - i) * splat(work.scale));
    }
  }

  // Calls f(row, rows at once, what they see) for one or two rows at a time.
  template <class Function>
  __attribute__((always_inline)) void each(int64_t first_key, Function f) const {
    for (int64_t r = 0; r < rows;) {
      Range seen = seen_by(work, tile.position + r / shape.group, first_key);
      bool two = r + 1 < rows && seen == seen_by(work, tile.position + (r + 1) / shape.group, first_key);
      if (!seen.empty()) f(r, two, seen);
      r += two ? 2 : 1;
    }
  }

  template <class Row>
  void score_all(int64_t first_key, const Row* const* keys) const {
    each(first_key, [&](int64_t r, bool two, Range seen) {
      const float* from = q + r * shape.width;
      if (two) score_rows<2>(from, shape.width, keys, seen, scores + r * KV_TILE);
      else score_rows<1>(from, shape.width, keys, seen, scores + r * KV_TILE);
    });
  }

  template <class Row>
  void add_all(int64_t first_key, const Row* const* values, const State& state) const {
    each(first_key, [&](int64_t r, bool two, Range seen) {
      float* to = state.values + r * shape.width;
      if (two) add_rows<2>(scores + r * KV_TILE, values, seen, to, shape.width);
      else add_rows<1>(scores + r * KV_TILE, values, seen, to, shape.width);
    });
  }

  void weigh_all(int64_t first_key, const State& state) const {
    each(first_key, [&](int64_t r, bool two, Range seen) {
      for (int64_t one = r; one < r + (two ? 2 : 1); one++) weigh(shape, state, one, seen, scores + one * KV_TILE);
    });
  }

  void add_tile(int64_t first_key, const State& state) const {
    const int64_t* table = work.block_tables + tile.sequence * work.table_stride;
    const int64_t filled = at_most(work.seq_lens[tile.sequence] - first_key, KV_TILE);
    const KvNumber* rows_at[KV_TILE];
    const float* wide_at[KV_TILE];
    const bool widened = shape.width != work.dim || (sizeof(KvNumber) != sizeof(float) && rows >= WIDEN_FROM);
    locate(work, table, head, first_key, filled, static_cast<const KvNumber*>(work.keys), rows_at);
    if (widened) widen(rows_at, work.dim, shape.width, filled, wide, wide_at);
    if (widened) score_all(first_key, wide_at);
    else score_all(first_key, rows_at);
    weigh_all(first_key, state);
    locate(work, table, head, first_key, filled, static_cast<const KvNumber*>(work.values), rows_at);
    if (widened) widen(rows_at, work.dim, shape.width, filled, wide, wide_at);
    if (widened) add_all(first_key, wide_at, state);
    else add_all(first_key, rows_at, state);
  }

  // The state of one split.
  void add_split(int64_t split, const State& state) const {
    state.clear(shape, rows);
    const int64_t last = tile.position + tile.tokens;
    const int64_t first_seen = work.window ? at_least(tile.position - work.window + 1, 0) : 0;
    const int64_t begin = at_least(split * KV_SPLIT, first_seen / KV_TILE * KV_TILE);
    for (int64_t key = begin; key < at_most(last, (split + 1) * KV_SPLIT); key += KV_TILE) add_tile(key, state);
  }

  // All splits, with `part` for each but the first.
  void add_all_splits(const State& state, const State& part) const {
    const int64_t splits = tiles_of(tile.position + tile.tokens, KV_SPLIT);
    add_split(0, state);
    for (int64_t split = 1; split < splits; split++) {
      add_split(split, part);
      merge(shape, state, part, rows);
    }
  }

  void write(const State& state) const {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t out_head = head * shape.group + r % shape.group;
      if (work.sinks) {
        raise(shape, state, r, work.sinks[out_head]);
        state.sums[r] += scalar_exp(work.sinks[out_head] - state.highest[r]);
      }
      Number* to = static_cast<Number*>(work.out) + ((tile.row + r / shape.group) * work.heads + out_head) * work.dim;
      const float* from = state.values + r * shape.width;
      Floats total = splat(state.sums[r]);
      for (int64_t i = 0; i < work.dim; i += WIDTH) store_up_to(to + i, load(from + i) / total, work.dim - i);
    }
  }
};

template <class Number, class KvNumber>
void run(const fissile::Attention& work, int64_t task) {
  using Made = Task<Number, KvNumber>;
  const Shape shape(work);
  const int64_t split = task % work.splits, pair = task / work.splits;
  float* memory = fissile::scratch(fissile::OF_TASK, Made::memory(shape) + 2 * shape.state_size());
  const Made made(work, work.tiles[pair / work.kv_heads], pair % work.kv_heads, memory);
  made.load_queries();
  if (work.splits > 1) {
    made.add_split(split, State(shape, work.states + task * shape.state_size()));
    return;
  }
  float* states = memory + Made::memory(shape);
  const State state(shape, states);
  made.add_all_splits(state, State(shape, states + shape.state_size()));
  made.write(state);
}

template <class Number>
void run_merge(const fissile::Attention& work, int64_t task) {
  const Shape shape(work);
  const Task<Number, float> made(work, work.tiles[task / work.kv_heads], task % work.kv_heads, nullptr);
  float* states = work.states + task * work.splits * shape.state_size();
  const State state(shape, states);
  const int64_t splits = tiles_of(made.tile.position + made.tile.tokens, KV_SPLIT);
  for (int64_t split = 1; split < splits; split++)
    merge(shape, state, State(shape, states + split * shape.state_size()), made.rows);
  made.write(state);
}

}  // namespace

int64_t attention_state_size(const fissile::Attention& work) { return Shape(work).state_size(); }

int64_t attention_tasks(const fissile::Attention& work) { return work.num_tiles * work.kv_heads * work.splits; }

void attention(const fissile::Attention& work, int64_t task) {
  const bool narrow = work.kv_dtype != FLOAT32;
  if (work.dtype == FLOAT32) return narrow ? run<float, Bf16>(work, task) : run<float, float>(work, task);
  return narrow ? run<Bf16, Bf16>(work, task) : run<Bf16, float>(work, task);
}

int64_t attention_merge_tasks(const fissile::Attention& work) { return work.num_tiles * work.kv_heads; }

void attention_merge(const fissile::Attention& work, int64_t task) {
  if (work.dtype == FLOAT32) run_merge<float>(work, task);
  else run_merge<Bf16>(work, task);
}

}  // namespace FISSILE_ISA
