// The C interface that kernels/cpu/library.py calls. Sizes and strides are in elements, not bytes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api.hpp"
#include "dispatch.hpp"
#include "kernels.hpp"
#include "pool.hpp"
#include "scratch.hpp"

// Digest of the sources. The build stores it in the library so that a stale library is detected.
FISSILE_API const char* fissile_sources() { return "fissile-sources:" FISSILE_SOURCES; }

using namespace fissile;

namespace {

const Kernels* chosen = nullptr;

}  // namespace

const Kernels& fissile::kernels() { return *chosen; }

// Name of instruction set `number`, the best first; writes its Ability. Null past the last one.
FISSILE_API const char* fissile_instruction_set(int64_t number, int64_t* ability) {
  int64_t count;
  const InstructionSet* sets = instruction_sets(&count);
  if (number >= count) return nullptr;
  *ability = sets[number].ability;
  return sets[number].name;
}

// Selects the instruction set of all later calls. Returns 0, or 1 if this machine cannot run it.
FISSILE_API int fissile_select(const char* name) {
  const Kernels* found = select_kernels(name);
  if (!found) return 1;
  chosen = found;
  return 0;
}

FISSILE_API void fissile_set_threads(int64_t threads) { set_threads(threads); }

FISSILE_API int64_t fissile_threads() { return threads(); }

// Runs f(context, i) for i in [0, tasks), for tests of the pool.
FISSILE_API void fissile_share(int64_t tasks, void (*f)(const void*, int64_t), const void* context) {
  share(tasks, f, context);
}

// Bytes of a packed weight [columns, inner].
FISSILE_API int64_t fissile_packed_bytes(int64_t packed_dtype, int64_t columns, int64_t inner) {
  return packed_bytes(packed_dtype, columns, inner);
}

// Packs a contiguous weight [columns, inner] into `panels`, which has packed_bytes() bytes.
FISSILE_API void fissile_pack_linear(
    int64_t dtype, const void* weight, int64_t columns, int64_t inner, int64_t packed_dtype, void* panels) {
  const Packing work{dtype, weight, columns, inner, packed_dtype, panels};
  share((columns + PANEL - 1) / PANEL, kernels().pack_panel, work);
}

namespace {

// Several matrix products whose tasks all threads share.
class Products {
 public:
  void add(const Linear& work) {
    if (work.rows == 0) return;
    if (work.weight.dtype == JOINED) return add_parts(work);
    works_.push_back(work);
    numbers_ += kernels().linear_scratch(work);
  }

  // Returns false if an allocation failed.
  bool run() {
    float* memory = scratch(OF_CALL, numbers_);
    if (!memory) return false;
    for (Linear& work : works_) {
      work.packed_x = memory;
      memory += kernels().linear_scratch(work);
    }
    return share_all(kernels().linear_pack_tasks, kernels().linear_pack) &&
           share_all(kernels().linear_tasks, kernels().linear);
  }

 private:
  // Adds the parts of a JOINED weight: each writes its columns of y.
  void add_parts(const Linear& work) {
    const Joined& joined = *static_cast<const Joined*>(work.weight.panels);
    int64_t column = 0;
    for (int64_t i = 0; i < joined.count; column += joined.parts[i++].columns) {
      Linear part = work;
      part.weight.dtype = joined.parts[i].dtype;
      part.weight.columns = joined.parts[i].columns;
      part.weight.panels = static_cast<const char*>(work.weight.panels) + joined.parts[i].at;
      if (part.weight.bias) part.weight.bias += column;
      part.y = offset(work.y, work.dtype, column);
      add(part);
    }
  }

  struct Call {
    const std::vector<Linear>& works;
    const std::vector<int64_t>& ends;
    void (*kernel)(const Linear&, int64_t);
  };

  bool share_all(int64_t (*tasks)(const Linear&), void (*kernel)(const Linear&, int64_t)) {
    std::vector<int64_t> ends;
    ends.reserve(works_.size());
    for (const Linear& work : works_) ends.push_back((ends.empty() ? 0 : ends.back()) + tasks(work));
    const Call call{works_, ends, kernel};
    return share(ends.empty() ? 0 : ends.back(), [](const void* context, int64_t task) {
      const Call& c = *static_cast<const Call*>(context);
      const size_t which = std::upper_bound(c.ends.begin(), c.ends.end(), task) - c.ends.begin();
      c.kernel(c.works[which], task - (which ? c.ends[which - 1] : 0));
    }, &call);
  }

  std::vector<Linear> works_;
  int64_t numbers_ = 0;
};

// Weight `i` of several equal-shaped weights that are packed one after another, as their biases and orders are.
Weight nth(Weight first, int64_t i) {
  first.panels = static_cast<const char*>(first.panels) + i * packed_bytes(first.dtype, first.columns, first.inner);
  if (first.bias) first.bias += i * first.columns;
  if (first.order) first.order += i * first.inner;
  return first;
}

}  // namespace

namespace fissile {

bool multiply(const Linear& work) {
  Products products;
  products.add(work);
  return products.run();
}

bool multiply_gated(Linear work, void* products) {
  work.gated = true;
  if (kernels().multiplies_gated(work)) return multiply(work);
  const int64_t columns = work.weight.columns;
  const SiluAndMul activation{work.dtype, products, work.rows, columns, columns / 2, work.y, work.y_stride, 0.0f, 0.0f};
  work.gated = false;
  work.y = products;
  work.y_stride = columns;
  if (!multiply(work)) return false;
  share(kernels().silu_and_mul_tasks(activation), kernels().silu_and_mul, activation);
  return true;
}

}  // namespace fissile

// Returns 0, or 1 if memory ran out, as all functions below that return int.
FISSILE_API int fissile_linear(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, int64_t weight_dtype,
    const void* panels, const float* bias, const int64_t* order, void* y, int64_t y_stride) {
  const Weight weight{weight_dtype, panels, bias, columns, inner, order};
  return failed([&] {
    return multiply({dtype, x, x_stride, rows, rows, weight, y, y_stride, false, nullptr});
  });
}

// See multiply_gated(). `readable_rows` rows of x may be read.
FISSILE_API int fissile_gated_linear(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t readable_rows, int64_t inner, int64_t columns,
    int64_t weight_dtype, const void* panels, const float* bias, const int64_t* order, void* products, void* y,
    int64_t y_stride) {
  const Weight weight{weight_dtype, panels, bias, columns, inner, order};
  return failed([&] {
    return multiply_gated({dtype, x, x_stride, rows, readable_rows, weight, y, y_stride, false, nullptr}, products);
  });
}

// Multiplies each head of x [rows, heads, inner] by its own packed weight, into the contiguous y [rows, heads,
// columns].
FISSILE_API int fissile_head_linear(
    int64_t dtype, const void* x, int64_t row_stride, int64_t head_stride, int64_t rows, int64_t heads, int64_t inner,
    int64_t columns, const void* panels, void* y) {
  return failed([&] {
    Products products;
    for (int64_t head = 0; head < heads; head++)
      products.add({dtype, offset(x, dtype, head * head_stride), row_stride, rows, rows,
                    nth({dtype, panels, nullptr, columns, inner}, head), offset(y, dtype, head * columns),
                    heads * columns, false, nullptr});
    return products.run();
  });
}

namespace {

// The pairs of row and slot, ordered by expert and within an expert by row. `starts` [experts + 1]: first place of each
// expert. `row_at`: row of each place. `places` [rows * slots]: place of each pair, -1 for other experts.
struct Pairs {
  std::vector<int64_t> starts;
  std::vector<int64_t> row_at;
  std::vector<int64_t> places;

  Pairs(const int64_t* ids, int64_t rows, int64_t slots, int64_t first, int64_t experts)
      : starts(experts + 1, 0), places(rows * slots, -1) {
    auto expert = [&](int64_t pair) { return ids[pair] - first; };
    auto mine = [&](int64_t pair) { return expert(pair) >= 0 && expert(pair) < experts; };
    for (int64_t pair = 0; pair < rows * slots; pair++)
      if (mine(pair)) starts[expert(pair) + 1]++;
    for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    row_at.resize(starts[experts]);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t pair = 0; pair < rows * slots; pair++)
      if (mine(pair)) {
        places[pair] = next[expert(pair)]++;
        row_at[places[pair]] = pair / slots;
      }
  }
};

// Multiplies each expert's rows of x by its weight; rows of x and y are in the order of `pairs`. `first` is the first
// expert's weight.
bool multiply(const Pairs& pairs, int64_t dtype, const Weight& first, const void* x, void* y) {
  Products products;
  for (size_t e = 0; e + 1 < pairs.starts.size(); e++) {
    const int64_t start = pairs.starts[e], rows = pairs.starts[e + 1] - start;
    products.add({dtype, offset(x, dtype, start * first.inner), first.inner, rows, rows,
                  nth(first, static_cast<int64_t>(e)), offset(y, dtype, start * first.columns), first.columns,
                  false, nullptr});
  }
  return products.run();
}

}  // namespace

// Computes `experts` experts, of which the first has id `first`. x and y [rows, hidden], ids and weights [rows, slots],
// all contiguous. An expert has `inner` inner units. `alpha` and `limit` are those of SiluAndMul. Orders
// [experts][hidden] and [experts][inner] are null, or those of Weight.
FISSILE_API int fissile_moe(
    int64_t dtype, const void* x, int64_t rows, int64_t hidden, int64_t inner, int64_t slots, const int64_t* ids,
    const float* weights, int64_t first, int64_t experts, int64_t gate_up_dtype, const void* gate_up,
    const float* gate_up_bias, const int64_t* gate_up_order, int64_t down_dtype, const void* down,
    const float* down_bias, const int64_t* down_order, float alpha, float limit, void* y) {
  return failed([&] {
    const Pairs pairs(ids, rows, slots, first, experts);
    const int64_t count = static_cast<int64_t>(pairs.row_at.size());
    const int64_t widest = std::max(hidden, inner);
    char* memory = reinterpret_cast<char*>(scratch(OF_EXPERTS, count * (2 * widest + 2 * inner)));
    if (!memory) return false;
    // Two buffers alternate: `a` holds the inputs, then the inner units; `b` holds gates and ups, then the outputs.
    char *a = memory, *b = memory + count * widest * size_of(dtype);
    for (int64_t place = 0; place < count; place++)
      std::memcpy(offset(a, dtype, place * hidden), offset(x, dtype, pairs.row_at[place] * hidden),
                  static_cast<size_t>(hidden * size_of(dtype)));
    const Weight gates_ups{gate_up_dtype, gate_up, gate_up_bias, 2 * inner, hidden, gate_up_order};
    if (!multiply(pairs, dtype, gates_ups, a, b)) return false;
    const SiluAndMul activation{dtype, b, count, 2 * inner, inner, a, inner, alpha, limit};
    share(kernels().silu_and_mul_tasks(activation), kernels().silu_and_mul, activation);
    if (!multiply(pairs, dtype, {down_dtype, down, down_bias, hidden, inner, down_order}, a, b)) return false;
    const Combine sum{dtype, b, rows, slots, hidden, pairs.places.data(), weights, y};
    return share(kernels().combine_tasks(sum), kernels().combine, sum);
  });
}

FISSILE_API void fissile_norm(
    int64_t dtype, const void* x, int64_t rows, int64_t inner, int64_t outer_stride, int64_t inner_stride,
    int64_t width, const void* residual, const void* weight, const void* bias, float eps, void* out, void* total) {
  const Norm work{dtype, x, rows, inner, outer_stride, inner_stride, width,
                  residual, weight, bias, eps, out, width, total};
  share(kernels().norm_tasks(work), kernels().norm, work);
}

FISSILE_API void fissile_rope(
    int64_t dtype, const void* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_stride, int64_t dim,
    const float* cos, const float* sin, int64_t half, void* out) {
  const Rope work{dtype, x, rows, row_stride, heads, head_stride, dim, cos, sin, half, out};
  share(kernels().rope_tasks(work), kernels().rope, work);
}

FISSILE_API void fissile_silu_and_mul(
    int64_t dtype, const void* x, int64_t rows, int64_t row_stride, int64_t width, void* out) {
  const SiluAndMul work{dtype, x, rows, row_stride, width, out, width, 0.0f, 0.0f};
  share(kernels().silu_and_mul_tasks(work), kernels().silu_and_mul, work);
}

FISSILE_API void fissile_gelu_and_mul(
    int64_t dtype, const void* x, int64_t rows, int64_t row_stride, int64_t width, void* out) {
  const SiluAndMul work{dtype, x, rows, row_stride, width, out, width, 0.0f, 0.0f, true};
  share(kernels().silu_and_mul_tasks(work), kernels().silu_and_mul, work);
}

// See Softcap.
FISSILE_API void fissile_softcap(const float* x, int64_t rows, int64_t row_stride, int64_t width, float cap, float* out) {
  const Softcap work{x, rows, row_stride, width, cap, out};
  share(kernels().softcap_tasks(work), kernels().softcap, work);
}

FISSILE_API void fissile_write_kv(
    int64_t dtype, int64_t kv_dtype, const void* k, int64_t k_row_stride, int64_t k_head_stride, const void* v,
    int64_t v_row_stride, int64_t v_head_stride, int64_t rows, int64_t heads, int64_t dim, int64_t block_size,
    const int64_t* slots, void* keys, void* values) {
  const WriteKV work{dtype, kv_dtype, k, k_row_stride, k_head_stride, v, v_row_stride, v_head_stride,
                     rows, heads, dim, block_size, slots, keys, values};
  share(kernels().write_kv_tasks(work), kernels().write_kv, work);
}

namespace {

// Splits the step's tokens into query tiles, those with the most keys first. So the tasks at the end are small, and
// threads wait little for the last one.
std::vector<QueryTile> query_tiles(
    int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, int64_t tile_tokens) {
  std::vector<QueryTile> tiles;
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t begin = cu_seqlens[s], end = cu_seqlens[s + 1];
    for (int64_t row = begin; row < end; row += tile_tokens)
      tiles.push_back({s, row, std::min(tile_tokens, end - row), seq_lens[s] - (end - row)});
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return a.position + a.tokens > b.position + b.tokens;
  });
  return tiles;
}

// With fewer pairs of query tile and key head per thread than this, threads share the keys of a pair.
constexpr int64_t LEAST_PAIRS = 4;
// Approximate tasks per thread if there are many pairs. The longest tasks come first, so that all threads end at about
// the same time.
constexpr int64_t TASKS = 8;

// Most bytes of unmerged states. Splits whose states do not fit are computed in a later wave.
constexpr int64_t STATES_BYTES = int64_t{64} << 20;

bool shares_keys(const Attention& work) {
  return work.num_tiles && threads() > 1 && work.num_tiles * work.kv_heads < LEAST_PAIRS * threads() &&
         work.tiles[0].splits > 1;
}

int64_t task_heads(const Attention& work) {
  return std::clamp<int64_t>(work.num_tiles * work.kv_heads / (TASKS * threads()), 1, work.kv_heads);
}

int64_t tokens_of_tile(int64_t group) { return std::max<int64_t>(1, kernels().query_rows / group); }

// Sets each tile's offset in the states. Returns the number of floats of all states.
int64_t place_states(const Attention& work, std::vector<QueryTile>& tiles) {
  int64_t size = 0;
  for (QueryTile& tile : tiles) {
    tile.states = size;
    size += work.kv_heads * std::min(tile.splits, work.slots) * kernels().attention_state_size(work, tile);
  }
  return size;
}

// Computes the splits from `first_split` to `end_split`, and merges them into the result of the splits before.
bool attend_wave(Attention& work, std::vector<QueryTile>& tiles) {
  work.wave_tiles = work.wave_tasks = 0;
  for (QueryTile& tile : tiles) {
    if (tile.splits <= work.first_split) break;
    tile.first_task = work.wave_tasks;
    work.wave_tasks += work.kv_heads * (std::min(tile.splits, work.end_split) - work.first_split);
    work.wave_tiles++;
  }
  return share(kernels().attention_tasks(work), kernels().attention, work) &&
         share(kernels().attention_merge_tasks(work), kernels().attention_merge, work);
}

// Computes each split in a task of its own, in as many waves as the bound on states needs.
bool attend_by_splits(Attention& work, std::vector<QueryTile>& tiles) {
  const int64_t most = tiles[0].splits;
  work.slots = most;
  int64_t size = place_states(work, tiles);
  while (work.slots > 2 && size * static_cast<int64_t>(sizeof(float)) > STATES_BYTES) {
    work.slots = (work.slots + 1) / 2;
    size = place_states(work, tiles);
  }
  work.states = scratch(OF_CALL, size);
  if (!work.states) return false;
  for (work.end_split = work.slots; work.first_split < most; work.end_split += work.slots - 1) {
    if (!attend_wave(work, tiles)) return false;
    work.first_split = work.end_split;
  }
  return true;
}

// Computes attention for all query tiles; rows of `out` past the tokens are not written. Returns false if an allocation
// failed.
bool attend(Attention work, std::vector<QueryTile>& tiles) {
  for (QueryTile& tile : tiles) tile.splits = (tile.position + tile.tokens + KV_SPLIT - 1) / KV_SPLIT;
  work.task_heads = task_heads(work);
  if (shares_keys(work)) return attend_by_splits(work, tiles);
  return share(kernels().attention_tasks(work), kernels().attention, work);
}

}  // namespace

FISSILE_API int fissile_attention(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const void* keys,
    const void* values, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, float scale,
    float softcap, int64_t window, const float* sinks, int64_t out_row_stride, void* out) {
  return failed([&] {
    const int64_t tile_tokens = tokens_of_tile(heads / kv_heads);
    std::vector<QueryTile> tiles = query_tiles(sequences, cu_seqlens, seq_lens, tile_tokens);
    Attention work{dtype, kv_dtype, q, q_row_stride, q_head_stride, keys, values, heads, kv_heads, dim, dim, block_size,
                   block_tables, table_stride, nullptr, 0, scale, window, sinks, out_row_stride, out, tiles.data(),
                   static_cast<int64_t>(tiles.size()), tile_tokens, 0, 1, nullptr};
    work.softcap = softcap;
    return attend(work, tiles);
  });
}

// Attention with one key head over keys [blocks, block_size, dim], whose first `value_dim` numbers are the values. If
// `selected` is not null, a token attends only to its `topk` selected positions, as fissile_select_tokens writes them.
FISSILE_API int fissile_latent_attention(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const void* keys,
    int64_t heads, int64_t dim, int64_t value_dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, float scale,
    const int64_t* selected, int64_t topk, void* out) {
  return failed([&] {
    const int64_t tile_tokens = selected ? 1 : tokens_of_tile(heads);
    std::vector<QueryTile> tiles = query_tiles(sequences, cu_seqlens, seq_lens, tile_tokens);
    if (selected)
      for (QueryTile& tile : tiles) tile.position = std::min(tile.position, topk - 1);
    return attend({dtype, kv_dtype, q, q_row_stride, q_head_stride, keys, keys, heads, 1, dim, value_dim, block_size,
                   block_tables, table_stride, selected, topk, scale, 0, nullptr, heads * value_dim, out, tiles.data(),
                   static_cast<int64_t>(tiles.size()), tile_tokens, 0, 1, nullptr},
                  tiles);
  });
}

// weights [tokens, heads]; see SelectTokens for `positions`.
FISSILE_API int fissile_select_tokens(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const float* weights,
    const void* keys, int64_t heads, int64_t dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, int64_t topk,
    int64_t* positions) {
  return failed([&] {
    const int64_t tile_tokens = tokens_of_tile(heads);
    const std::vector<QueryTile> tiles = query_tiles(sequences, cu_seqlens, seq_lens, tile_tokens);
    const SelectTokens work{{dtype, kv_dtype, q, q_row_stride, q_head_stride, keys, keys, heads, 1, dim, dim,
                             block_size, block_tables, table_stride, nullptr, 0, 1.0f, 0, nullptr, 0, nullptr,
                             tiles.data(), static_cast<int64_t>(tiles.size()), tile_tokens, 0, 1, nullptr},
                            weights, topk, positions};
    return share(kernels().select_tokens_tasks(work), kernels().select_tokens, work);
  });
}

// See Route.
FISSILE_API int fissile_route(
    const float* logits, int64_t row_stride, int64_t rows, int64_t experts, const float* correction_bias,
    int64_t scoring, int64_t top_k, int64_t renormalize, int64_t num_groups, int64_t top_groups, int64_t group_best,
    float scale, int64_t* ids, float* weights) {
  const Route work{logits, row_stride, rows, experts, correction_bias, scoring, top_k, renormalize, num_groups,
                   top_groups, group_best, scale, ids, weights};
  return failed([&] { return share(kernels().route_tasks(work), kernels().route, work); });
}

FISSILE_API void fissile_sample(
    float* logits, int64_t row_stride, int64_t rows, int64_t vocab, const float* temperature, const int64_t* top_k,
    const float* top_p, const float* min_p, const uint64_t* seeds, const int64_t* positions, const int64_t* choices,
    int64_t* ids, const int64_t* penalty_of, const int64_t* penalty_ids, const int64_t* penalty_counts,
    const float* repetition, const float* presence, const float* frequency, const int64_t* mask_of,
    const uint32_t* masks, int64_t words) {
  const Sample work{logits, row_stride, vocab, temperature, top_k, top_p, min_p, seeds, positions, choices, ids,
                    {penalty_ids, penalty_counts, repetition, presence, frequency}, penalty_of,
                    mask_of, masks, words};
  share(rows, kernels().sample, work);
}

// See Logprobs.
FISSILE_API void fissile_logprobs(
    const float* logits, int64_t row_stride, int64_t rows, int64_t vocab, const int64_t* tokens, int64_t top,
    float* highest, int64_t* masses, int64_t* ranks, int64_t* top_ids, float* top_logits) {
  const Logprobs work{logits, row_stride, vocab, tokens, top, highest, masses, ranks, top_ids, top_logits};
  share(rows, kernels().logprobs, work);
}
