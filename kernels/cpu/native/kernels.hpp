// The micro-kernels of one instruction set, and the arguments that they share.
//
// A kernel is cut into tasks of a fixed size, which any thread may do in any order: a task writes what no other writes.
// Neighbours are mostly done by one thread, one after the other, and those of neighbouring rows stand side by side.
// How many threads there are can therefore not show in the bits. An instruction set fills one `Kernels`; AVX512-BF16
// and AMX take AVX-512's and put products (own_linear.hpp) and attention of their own into it.
#pragma once

#include <cstdint>

namespace fissile {

// INT8 is of packed weights only, FLOAT16 and FLOAT8 (E4M3 with NaN and without infinities) of KV caches.
enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3, FLOAT8 = 4 };

inline constexpr int64_t size_of(int64_t dtype) {
  return dtype == FLOAT32 ? 4 : dtype == INT8 || dtype == FLOAT8 ? 1 : 2;
}

// The place so many numbers behind `base`.
inline const void* offset(const void* base, int64_t dtype, int64_t numbers) {
  return static_cast<const char*>(base) + numbers * size_of(dtype);
}

inline void* offset(void* base, int64_t dtype, int64_t numbers) {
  return static_cast<char*>(base) + numbers * size_of(dtype);
}

// Columns of a panel of packed weights.
constexpr int64_t PANEL = 16;
// Numbers of k that are summed by one chain, and that share a scale of int8 weights. Longer chains err more, shorter ones
// cost additions.
constexpr int64_t K_BLOCK = 128;
// Bytes of the scales of a block of a panel of int8 weights: float32 [PANEL].
constexpr int64_t BLOCK_SCALES = PANEL * 4;

// Packed weights are the same for every instruction set: panels [columns / 16][inner / group][16][group], where the
// neighbours of a group are side by side; what is missing of the last panel and group is zero. In a panel of int8 each
// block of K_BLOCK numbers of k (the last one may be shorter) is preceded by its scales: number times scale is the weight.
constexpr int64_t group_of(int64_t dtype) { return 4 / size_of(dtype); }

constexpr int64_t padded_inner(int64_t dtype, int64_t inner) {
  return (inner + group_of(dtype) - 1) / group_of(dtype) * group_of(dtype);
}

// Bytes from the begin of a panel to block k / K_BLOCK, its scales included.
constexpr int64_t block_offset(int64_t dtype, int64_t k) {
  return k * PANEL * size_of(dtype) + (dtype == INT8 ? k / K_BLOCK * BLOCK_SCALES : 0);
}

constexpr int64_t panel_bytes(int64_t dtype, int64_t inner) {
  const int64_t scales = dtype == INT8 ? (inner + K_BLOCK - 1) / K_BLOCK * BLOCK_SCALES : 0;
  return padded_inner(dtype, inner) * PANEL * size_of(dtype) + scales;
}

// Bytes of a packed weight.
constexpr int64_t packed_bytes(int64_t dtype, int64_t columns, int64_t inner) {
  return (columns + PANEL - 1) / PANEL * panel_bytes(dtype, inner);
}

// Keys of a tile of attention, and of a split, whose tiles one task computes (attention.cpp).
constexpr int64_t KV_TILE = 64;
constexpr int64_t KV_SPLIT = 512;

// A weight [columns, inner] of `dtype`, contiguous, to be packed as `packed_dtype`: the same, or INT8.
struct Packing {
  int64_t dtype;
  const void* weight;
  int64_t columns;
  int64_t inner;
  int64_t packed_dtype;
  void* panels;
};

// A packed weight, aligned to 64 bytes, and a bias or null.
struct Weight {
  int64_t dtype;
  const void* panels;
  const float* bias;
  int64_t columns;
  int64_t inner;
};

// y [rows, columns] = x [rows, inner] * weight^T + bias; x and y in `dtype`, the weight in that or INT8. See linear.cpp.
struct Linear {
  int64_t dtype;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  // Rows of x that can be read, `rows` or more; what stands in the others does not matter.
  int64_t readable_rows;
  Weight weight;
  void* y;
  int64_t y_stride;
  // The first half of the columns are gates and the second one ups, and y is silu(gate) * up: only where multiplies_gated().
  bool gated;
  // x as this instruction set's products want it: memory of linear_scratch() numbers, filled by the packing tasks.
  float* packed_x;
};

// RMS norm, or layer norm where there is a bias, of rows [outer][inner] of `width` numbers into rows of `out`; with a
// residual (contiguous) of the rounded sum of both, which goes to `total`.
struct Norm {
  int64_t dtype;
  const void* x;
  int64_t rows;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t width;
  const void* residual;
  const void* weight;
  const void* bias;
  float eps;
  void* out;
  int64_t out_stride;
  void* total;
};

// Rotates the pairs (i, half + i) of each head of x [rows, heads, dim] into contiguous `out`; cos and sin [rows, half].
struct Rope {
  int64_t dtype;
  const void* x;
  int64_t rows;
  int64_t row_stride;
  int64_t heads;
  int64_t head_stride;
  int64_t dim;
  const float* cos;
  const float* sin;
  int64_t half;
  void* out;
};

// silu(x[:, :width]) * x[:, width:] of x [rows, 2 width] into rows of `out`; where `limit` is above 0 gpt-oss's
// activation instead (kernels/interface.py, ClampedSwiglu).
struct SiluAndMul {
  int64_t dtype;
  const void* x;
  int64_t rows;
  int64_t row_stride;
  int64_t width;
  void* out;
  int64_t out_stride;
  float alpha;
  float limit;
};

// y[row] = the sum over slots, in their order, of weights[row][slot] * x[places[row][slot]]; a place below 0 adds nothing.
struct Combine {
  int64_t dtype;
  const void* x;
  int64_t rows;
  int64_t slots;
  int64_t width;
  const int64_t* places;
  const float* weights;
  void* y;
};

// Rows of k and v [rows, heads, dim] into their slots of one layer's cache [blocks, heads, block_size, dim]; `v` is null
// where only keys are stored.
struct WriteKV {
  int64_t dtype;
  int64_t kv_dtype;
  const void* k;
  int64_t k_row_stride;
  int64_t k_head_stride;
  const void* v;
  int64_t v_row_stride;
  int64_t v_head_stride;
  int64_t rows;
  int64_t heads;
  int64_t dim;
  int64_t block_size;
  const int64_t* slots;
  void* keys;
  void* values;
};

// Some query tokens of one sequence.
struct QueryTile {
  int64_t sequence;
  // Its first row of the step, how many, and the first one's position.
  int64_t row;
  int64_t tokens;
  int64_t position;
  // Where tasks share keys: into how many splits its keys fall, its first task of the wave, and where its states are.
  int64_t splits = 1;
  int64_t first_task = 0;
  int64_t states = 0;
};

// Causal attention of q [tokens, heads, dim] over one layer's cache, by the query tiles; see attention.cpp. Where `values`
// are `keys`, they are the first `value_dim` numbers of these; rows of `out` are [heads, value_dim].
struct Attention {
  int64_t dtype;
  int64_t kv_dtype;
  const void* q;
  int64_t q_row_stride;
  int64_t q_head_stride;
  const void* keys;
  const void* values;
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t value_dim;
  int64_t block_size;
  const int64_t* block_tables;
  int64_t table_stride;
  // Null, or the positions [tokens, topk] of the keys that stand for those of positions 0, 1, ... of query tiles of one
  // token; ascending.
  const int64_t* selected;
  int64_t topk;
  float scale;
  // How many keys a row sees, its own included; 0 for all.
  int64_t window;
  const float* sinks;
  int64_t out_row_stride;
  void* out;
  const QueryTile* tiles;
  int64_t num_tiles;
  int64_t tile_tokens;
  // 0 where a task takes all keys of a tile, of so many heads one after the other. Else tasks take a split each, whose
  // states wait in `states` to be merged: so many of a tile and a head, the first of which is what has been merged.
  int64_t slots;
  int64_t task_heads;
  float* states;
  // The splits that are computed now, and how many tiles, the first ones, and tasks have any of them.
  int64_t first_split = 0;
  int64_t end_split = 0;
  int64_t wave_tiles = 0;
  int64_t wave_tasks = 0;
};

// The indexer of sparse attention: which keys the tokens of query tiles attend to, by scores that are sums over heads of
// weights [tokens, heads] times the positive part of the product of a query and the key.
struct SelectTokens {
  // q, and the cache of index keys; its values, its window and what follows its tiles are not used.
  Attention keys;
  const float* weights;
  int64_t topk;
  // [tokens, topk], ascending; a token that sees fewer leaves the rest as it is.
  int64_t* positions;
};

enum Scoring : int64_t { SOFTMAX = 0, SIGMOID = 1, TOPK_SOFTMAX = 2 };

// Experts of rows of float32 logits [rows, experts] with `row_stride`; see kernels/interface.py, Routing.
struct Route {
  const float* logits;
  int64_t row_stride;
  int64_t rows;
  int64_t experts;
  // Of each expert, to choose by; or null.
  const float* correction_bias;
  int64_t scoring;
  int64_t top_k;
  int64_t renormalize;
  int64_t num_groups;
  int64_t top_groups;
  float scale;
  // [rows, top_k]
  int64_t* ids;
  float* weights;
};

// Penalties of some rows; see kernels/penalties.py.
struct Penalties {
  // Of each the address of its int32 ids, each once, and how many.
  const int64_t* ids;
  // Of each the address of its float32 counts.
  const int64_t* counts;
  const float *repetition, *presence, *frequency;
};

// Token ids of rows of float32 logits; ids[row] is -1 where kernels/sampling.py has to decide. See sampling.cpp.
struct Sample {
  float* logits;
  int64_t row_stride;
  int64_t vocab;
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seeds;
  const int64_t* positions;
  const int64_t* choices;
  int64_t* ids;
  Penalties penalties;
  // Of each row its place among the penalties, below 0 for none; null where no row has any.
  const int64_t* penalty_of;
  // Likewise among masks of `words` words each, 32 ids a word, of which those alone are allowed whose bit is set.
  const int64_t* mask_of;
  const uint32_t* masks;
  int64_t words;
};

// In place of a token: of a row without a finite largest number; of one that there was no memory for.
constexpr int64_t NO_TOKEN = -1, NO_MEMORY = -2;

// What logprobs of rows of float32 logits are made of (kernels/logprobs.py): of each row the largest logit, the sum of the
// masses, the rank of a token, and the `top` largest logits with their ids, best first, lower ids first among equals.
struct Logprobs {
  const float* logits;
  int64_t row_stride;
  int64_t vocab;
  const int64_t* tokens;
  int64_t top;
  float* highest;
  // NO_MEMORY where kernels/logprobs.py has to decide; 0 where the largest is not finite, and then nothing else is known.
  int64_t* masses;
  int64_t* ranks;
  // [rows, top]
  int64_t* top_ids;
  float* top_logits;
};

// Of each row of y [rows, columns] in `dtype` the largest number and its first place; -infinity and 0 where there is none
// above that. NaN counts as the lowest.
struct Largest {
  int64_t dtype;
  const void* y;
  int64_t row_stride;
  int64_t columns;
  float* values;
  int64_t* places;
};

struct Kernels {
  const char* name;
  // Packs panel `task`.
  void (*pack_panel)(const Packing&, int64_t task);
  // Numbers of float32 that packed_x needs room for.
  int64_t (*linear_scratch)(const Linear&);
  int64_t (*linear_pack_tasks)(const Linear&);
  void (*linear_pack)(const Linear&, int64_t task);
  int64_t (*linear_tasks)(const Linear&);
  void (*linear)(const Linear&, int64_t task);
  bool (*multiplies_gated)(const Linear&);
  int64_t (*norm_tasks)(const Norm&);
  void (*norm)(const Norm&, int64_t task);
  int64_t (*rope_tasks)(const Rope&);
  void (*rope)(const Rope&, int64_t task);
  int64_t (*silu_and_mul_tasks)(const SiluAndMul&);
  void (*silu_and_mul)(const SiluAndMul&, int64_t task);
  int64_t (*combine_tasks)(const Combine&);
  void (*combine)(const Combine&, int64_t task);
  int64_t (*write_kv_tasks)(const WriteKV&);
  void (*write_kv)(const WriteKV&, int64_t task);
  // Of a query tile of attention, about.
  int64_t query_rows;
  int64_t (*attention_state_size)(const Attention&, const QueryTile&);
  int64_t (*attention_tasks)(const Attention&);
  void (*attention)(const Attention&, int64_t task);
  int64_t (*attention_merge_tasks)(const Attention&);
  void (*attention_merge)(const Attention&, int64_t task);
  int64_t (*select_tokens_tasks)(const SelectTokens&);
  void (*select_tokens)(const SelectTokens&, int64_t task);
  int64_t (*route_tasks)(const Route&);
  void (*route)(const Route&, int64_t task);
  void (*sample)(const Sample&, int64_t row);
  void (*largest_of_row)(const Largest&, int64_t row);
  void (*logprobs)(const Logprobs&, int64_t row);
};

}  // namespace fissile
