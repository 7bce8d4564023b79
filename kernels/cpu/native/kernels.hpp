// The kernel table of one instruction set, and the argument structs that all instruction sets share.
//
// Each kernel is split into tasks of a fixed size. Threads may run the tasks in any order, because no two tasks write
// the same memory. One thread mostly runs adjacent tasks in sequence, and adjacent tasks cover adjacent rows. The
// number of threads therefore never changes the bits of a result.
//
// Each instruction set fills one `Kernels` table. AVX512-BF16 and AMX copy the AVX-512 table and replace its matrix
// products (own_linear.hpp) and its attention.
#pragma once

#include <cstdint>

namespace fissile {

// INT8 occurs only in packed weights; FLOAT16 and FLOAT8 only in KV caches. FLOAT8 is E4M3 with NaN and without
// infinities.
enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3, FLOAT8 = 4 };

inline constexpr int64_t size_of(int64_t dtype) {
  return dtype == FLOAT32 ? 4 : dtype == INT8 || dtype == FLOAT8 ? 1 : 2;
}

// Pointer to element `numbers` of the array of `dtype` at `base`.
inline const void* offset(const void* base, int64_t dtype, int64_t numbers) {
  return static_cast<const char*>(base) + numbers * size_of(dtype);
}

inline void* offset(void* base, int64_t dtype, int64_t numbers) {
  return static_cast<char*>(base) + numbers * size_of(dtype);
}

// Columns of one panel of packed weights.
constexpr int64_t PANEL = 16;
// Values of k that one accumulator sums, and that share one scale in int8 weights. A longer block has a larger rounding
// error; a shorter one needs more additions.
constexpr int64_t K_BLOCK = 128;
// Bytes of the scales of one block in an int8 panel: float32 [PANEL].
constexpr int64_t BLOCK_SCALES = PANEL * 4;

// Weights in codes (kernels/grouped_weight.py) have a dtype from GROUPED on, which says how. Bits 0 and 1: 4, 5, 6 or 8
// bits. Bits 2 and 3: scales in float32, bfloat16, float16, or codes with factors. Bit 4: groups have offsets. Bits 5
// and 6: columns that share a scale, 16, 32, 64 or 128. packed_code() in kernels/cpu/linear.py makes the number.
constexpr int64_t GROUPED = 256;
// Several weights in codes, each in its own form, one below the other; see Joined.
constexpr int64_t JOINED = 512;

constexpr bool is_grouped(int64_t dtype) { return dtype >= GROUPED; }

// A panel of codes is a row of blocks of K_BLOCK values of k, the last padded with zeros. A block has scales [groups]
// [PANEL], offsets [groups][PANEL] or none, factors float16 or none, padding to 64 bytes, and numbers. The weight is
// (code - middle) * scale + offset, where the middle code is half of the number of codes.
//
// Without factors, offsets are float32. With factors [PANEL], scales are int8 times the column's factor. With factors
// [2][PANEL], offsets are int8 too: the offset is the middle code times the scale, minus the int8 times the second
// factor, as of K-quants, whose weights are code * scale - offset.
//
// 4 bits: [K_BLOCK / 8][PANEL] words of 32 bits. Code k of eight is in the four bits from 4 * (k / 2) + 16 * (k % 2) on,
// so that a shift gives pairs of adjacent codes in the halves of a word. 8 bits: [K_BLOCK / 4][PANEL] words with four
// codes, minus 128, as int8. 5 and 6 bits: the lower four as with 4 bits, then the upper ones, [K_BLOCK / 8][PANEL] of
// one or two bytes: `high` bits of code k from high * (k / 2 + 4 * (k % 2)) on.
struct CodeLayout {
  int64_t bits;
  int64_t group;
  // FLOAT32, BFLOAT16 or FLOAT16; INT8 with factors.
  Dtype scales;
  bool has_offsets;

  constexpr explicit CodeLayout(int64_t dtype)
      : bits((dtype & 3) == 3 ? 8 : 4 + (dtype & 3)),
        group(int64_t{16} << (dtype >> 5 & 3)),
        scales((dtype >> 2 & 3) == 0   ? FLOAT32
               : (dtype >> 2 & 3) == 1 ? BFLOAT16
               : (dtype >> 2 & 3) == 2 ? FLOAT16
                                       : INT8),
        has_offsets(dtype >> 4 & 1) {}

  constexpr bool has_factors() const { return scales == INT8; }
  constexpr int64_t middle() const { return int64_t{1} << (bits - 1); }
  constexpr int64_t groups() const { return K_BLOCK / group; }
  constexpr int64_t offset_bytes() const { return has_factors() ? 1 : 4; }
  constexpr int64_t offsets_at() const { return groups() * PANEL * size_of(scales); }
  constexpr int64_t factors_at() const { return offsets_at() + (has_offsets ? groups() * PANEL * offset_bytes() : 0); }
  constexpr int64_t numbers_at() const {
    return (factors_at() + (has_factors() ? PANEL * (has_offsets ? 4 : 2) : 0) + 63) / 64 * 64;
  }
  constexpr int64_t block_bytes() const { return numbers_at() + K_BLOCK * PANEL * bits / 8; }
};

// Bytes from the lower to the upper bits of a block's codes of 5 and 6 bits.
constexpr int64_t UPPER_BITS = K_BLOCK * PANEL / 2;

// What the panels of a JOINED weight begin with: the number of its parts, and each part's dtype, columns, and the bytes
// from here to its panels. The parts have the weight's inner dimension and order; its columns are all of theirs.
struct Joined {
  struct Part {
    int64_t dtype;
    int64_t columns;
    int64_t at;
  };
  int64_t count;
  Part parts[];
};

// The layout of packed weights is the same for every instruction set: panels [columns / 16][inner / group][16][group].
// The `group` consecutive values of k of one column are adjacent. The last panel and the last group are padded with
// zeros. In an int8 panel, each block of K_BLOCK values of k follows its scales; the last block may be shorter. The
// weight is the int8 value times its scale.
constexpr int64_t group_of(int64_t dtype) { return 4 / size_of(dtype); }

constexpr int64_t padded_inner(int64_t dtype, int64_t inner) {
  if (is_grouped(dtype)) return (inner + K_BLOCK - 1) / K_BLOCK * K_BLOCK;
  return (inner + group_of(dtype) - 1) / group_of(dtype) * group_of(dtype);
}

// Bytes from the start of a panel to the start of block k / K_BLOCK, where the block's scales lie.
constexpr int64_t block_offset(int64_t dtype, int64_t k) {
  return k * PANEL * size_of(dtype) + (dtype == INT8 ? k / K_BLOCK * BLOCK_SCALES : 0);
}

constexpr int64_t panel_bytes(int64_t dtype, int64_t inner) {
  if (is_grouped(dtype)) return padded_inner(dtype, inner) / K_BLOCK * CodeLayout(dtype).block_bytes();
  const int64_t scales = dtype == INT8 ? (inner + K_BLOCK - 1) / K_BLOCK * BLOCK_SCALES : 0;
  return padded_inner(dtype, inner) * PANEL * size_of(dtype) + scales;
}

// Bytes of a whole packed weight.
constexpr int64_t packed_bytes(int64_t dtype, int64_t columns, int64_t inner) {
  return (columns + PANEL - 1) / PANEL * panel_bytes(dtype, inner);
}

// Keys per KV tile, the unit of attention, and keys per split, whose tiles one task computes (attention.cpp).
constexpr int64_t KV_TILE = 64;
constexpr int64_t KV_SPLIT = 512;

// A contiguous weight [columns, inner] of `dtype`, and where to pack it. `packed_dtype` is `dtype` or INT8.
struct Packing {
  int64_t dtype;
  const void* weight;
  int64_t columns;
  int64_t inner;
  int64_t packed_dtype;
  void* panels;
};

// Codes [columns, inner], scales and perhaps offsets [columns, groups] and factors [columns, blocks][1 or 2] of the
// layout's dtypes, and where to pack them. A group is `group` columns of a row; one that exceeds K_BLOCK is repeated in
// each block.
struct CodePacking {
  int64_t packed_dtype;
  const uint8_t* codes;
  const char* scales;
  const char* offsets;
  const uint16_t* factors;
  int64_t columns;
  int64_t inner;
  int64_t group;
  char* panels;
};

// A packed weight, aligned to 64 bytes. `bias` [columns] is null if the layer has none.
struct Weight {
  int64_t dtype;
  const void* panels;
  const float* bias;
  int64_t columns;
  int64_t inner;
  // [inner], of weights in codes only: the number of x that each packed k multiplies. Null if they are in order.
  const int64_t* order = nullptr;
};

// y [rows, columns] = x [rows, inner] * weight^T + bias. x and y are of `dtype`; the weight is of `dtype`, of INT8 or in
// codes. See linear.cpp and code_product.hpp.
struct Linear {
  int64_t dtype;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  // Rows of x whose memory may be read, at least `rows`. The contents of rows from `rows` on do not affect y.
  int64_t readable_rows;
  Weight weight;
  void* y;
  int64_t y_stride;
  // If true, the first half of the columns are gates, the second half are ups, and y is silu(gate) * up. Allowed only
  // if multiplies_gated() is true.
  bool gated;
  // x in the layout that this instruction set multiplies: linear_scratch() floats, filled by the packing tasks.
  float* packed_x;
};

// Normalizes rows [outer][inner] of `width` numbers into rows of `out`: layer norm if `bias` is set, RMS norm
// otherwise. If `residual` (contiguous) is set, the input is x + residual, rounded to `dtype`; that sum is written to
// `total`.
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

// Rotates the pairs (i, half + i) of each head of x [rows, heads, dim] into the contiguous `out`. cos and sin are
// [rows, half].
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

// Writes silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width] to rows of `out`. If `limit` is above 0, computes
// gpt-oss's activation instead (kernels/interface.py, ClampedSwiglu); if `gelu`, GELU with the tanh approximation.
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
  bool gelu = false;
};

// Writes cap * tanh(x / cap) of x [rows, width] to the contiguous `out`.
struct Softcap {
  const float* x;
  int64_t rows;
  int64_t row_stride;
  int64_t width;
  float cap;
  float* out;
};

// y[row] = the sum over slots, in slot order, of weights[row][slot] * x[places[row][slot]]. A place below 0 adds
// nothing.
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

// Writes rows of k and v [rows, heads, dim] to `slots` of one layer's cache [blocks, heads, block_size, dim]. `v` is
// null if the cache stores keys only.
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

// Consecutive query tokens of one sequence, which one task computes together.
struct QueryTile {
  int64_t sequence;
  // The tile's first row in the step, its number of tokens, and the position of its first token.
  int64_t row;
  int64_t tokens;
  int64_t position;
  // Used only if tasks share the tile's keys: number of splits of its keys, index of its first task in the wave, and
  // offset of its states in Attention::states, in floats.
  int64_t splits = 1;
  int64_t first_task = 0;
  int64_t states = 0;
};

// Causal attention of q [tokens, heads, dim] over one layer's paged cache, one query tile at a time; see attention.cpp.
// If `values` equals `keys`, the values are the first `value_dim` numbers of the keys. Rows of `out` are [heads,
// value_dim].
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
  // Sparse attention: key positions [tokens, topk], ascending, or null for dense attention. Key i of a query tile is
  // the one at position selected[token][i]. Every query tile then has one token.
  const int64_t* selected;
  int64_t topk;
  float scale;
  // Number of keys that a row sees, its own included; 0 for all.
  int64_t window;
  const float* sinks;
  int64_t out_row_stride;
  void* out;
  const QueryTile* tiles;
  int64_t num_tiles;
  int64_t tile_tokens;
  // 0 if each task computes all keys of a query tile, for `task_heads` key heads in sequence. Otherwise each task
  // computes one split and writes its state to `states`, where merge tasks combine them. `slots` is then the largest
  // number of states per tile and head; the first of them holds the merged result.
  int64_t slots;
  int64_t task_heads;
  float* states;
  // The splits that this wave computes, the number of leading tiles that have any of them, and the number of tasks.
  int64_t first_split = 0;
  int64_t end_split = 0;
  int64_t wave_tiles = 0;
  int64_t wave_tasks = 0;
  // Scaled scores s become softcap * tanh(s / softcap); 0 for off.
  float softcap = 0.0f;
};

// Indexer of sparse attention: selects the `topk` keys that each query token attends to. The score of a key is the sum
// over heads of weights [tokens, heads] times max(query * key, 0).
struct SelectTokens {
  // q, the query tiles and the cache of index keys. Its values, its window and the fields after `tile_tokens` are not
  // used.
  Attention keys;
  const float* weights;
  int64_t topk;
  // [tokens, topk], ascending. If a token sees fewer than `topk` keys, the rest of its row is not written.
  int64_t* positions;
};

enum Scoring : int64_t { SOFTMAX = 0, SIGMOID = 1, TOPK_SOFTMAX = 2 };

// Selects the experts of each row of float32 logits [rows, experts] with `row_stride`; see kernels/interface.py,
// Routing.
struct Route {
  const float* logits;
  int64_t row_stride;
  int64_t rows;
  int64_t experts;
  // [experts], added to the scores for the selection only; or null.
  const float* correction_bias;
  int64_t scoring;
  int64_t top_k;
  int64_t renormalize;
  int64_t num_groups;
  int64_t top_groups;
  int64_t group_best;
  float scale;
  // [rows, top_k]
  int64_t* ids;
  float* weights;
};

// Penalties of the rows that have any; see kernels/penalties.py.
struct Penalties {
  // Per penalized row: the address of its distinct int32 token ids, and their number.
  const int64_t* ids;
  // Per penalized row: the address of its float32 counts.
  const int64_t* counts;
  const float *repetition, *presence, *frequency;
};

// Samples one token id per row of float32 logits; see sampling.cpp. ids[row] is NO_TOKEN or NO_MEMORY if there is none;
// kernels/cpu/sampling.py leaves rows with NO_MEMORY to kernels/sampling.py.
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
  // Per row: its index among the penalties, below 0 for none. Null if no row has penalties.
  const int64_t* penalty_of;
  // Per row: its index among the masks, below 0 for none. Null if no row has a mask. A mask has `words` words of 32 ids
  // each; only ids whose bit is set are allowed.
  const int64_t* mask_of;
  const uint32_t* masks;
  int64_t words;
};

// Returned in place of a token: NO_TOKEN if the row's largest logit is not finite, NO_MEMORY if an allocation failed.
constexpr int64_t NO_TOKEN = -1, NO_MEMORY = -2;

// Inputs of logprobs (kernels/logprobs.py) for rows of float32 logits. Per row: the largest logit, the sum of the
// masses, the rank of the row's token, and the `top` largest logits with their ids. The top logits are in descending
// order; equal logits are in the order of their ids.
struct Logprobs {
  const float* logits;
  int64_t row_stride;
  int64_t vocab;
  const int64_t* tokens;
  int64_t top;
  float* highest;
  // NO_MEMORY if kernels/logprobs.py has to compute the row. 0 if the largest logit is not finite; the row's other
  // results are then undefined.
  int64_t* masses;
  int64_t* ranks;
  // [rows, top]
  int64_t* top_ids;
  float* top_logits;
};

// Per row of y [rows, columns] of `dtype`: the largest number and the first column that holds it. If no number is above
// -infinity, they are -infinity and 0. NaN counts as -infinity.
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
  // Number of floats that packed_x must have.
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
  int64_t (*softcap_tasks)(const Softcap&);
  void (*softcap)(const Softcap&, int64_t task);
  int64_t (*combine_tasks)(const Combine&);
  void (*combine)(const Combine&, int64_t task);
  int64_t (*write_kv_tasks)(const WriteKV&);
  void (*write_kv)(const WriteKV&, int64_t task);
  // Approximate number of rows of a query tile of attention.
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
