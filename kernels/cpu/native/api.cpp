// The C interface that kernels/cpu/library.py calls. Sizes and strides are counted in numbers, not bytes.
#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"
#include "scratch.hpp"
#include "select.hpp"

#define FISSILE_API extern "C" __attribute__((visibility("default")))

// The digest of the sources, which the build puts into the library so that a stale one is found.
FISSILE_API const char* fissile_sources() { return "fissile-sources:" FISSILE_SOURCES; }

using namespace fissile;

namespace {

const Kernels* chosen = nullptr;

const Kernels& kernels() { return *chosen; }

struct PackCall {
  int64_t dtype;
  const void* weight;
  int64_t columns;
  int64_t inner;
  void* panels;
};

}  // namespace

// Takes the named instruction set, or the best one for null. Its name, or null where this machine can not run it.
FISSILE_API const char* fissile_select(const char* name) {
  const Kernels* found = select_kernels(name);
  if (!found) return nullptr;
  chosen = found;
  return found->name;
}

FISSILE_API void fissile_set_threads(int64_t threads) { set_threads(threads); }

FISSILE_API int64_t fissile_threads() { return threads(); }

// Runs f(i) for i in [0, tasks): tests look at the pool itself.
FISSILE_API void fissile_share(int64_t tasks, void (*f)(const void*, int64_t), const void* context) {
  share(tasks, f, context);
}

// A weight [columns, inner], contiguous, into panels: `panels` has room for columns rounded up to 16.
FISSILE_API void fissile_pack_linear(
    int64_t dtype, const void* weight, int64_t columns, int64_t inner, void* panels) {
  const PackCall call{dtype, weight, columns, inner, panels};
  share((columns + PANEL - 1) / PANEL, [](const void* context, int64_t task) {
    const PackCall& c = *static_cast<const PackCall*>(context);
    kernels().pack_panel(c.dtype, c.weight, c.columns, c.inner, c.panels, task);
  }, &call);
}

// 0, or 1 when memory ran out.
FISSILE_API int fissile_linear(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, const void* panels,
    const float* bias, void* y, int64_t y_stride) {
  Linear work{dtype, x, x_stride, rows, inner, columns, panels, bias, y, y_stride, nullptr};
  work.packed_x = scratch(OF_CALL, rows * inner);
  if (!work.packed_x) return 1;
  share(kernels().linear_pack_tasks(work), kernels().linear_pack, work);
  share(kernels().linear_tasks(work), kernels().linear, work);
  return 0;
}

FISSILE_API void fissile_norm(
    int64_t dtype, const void* x, int64_t rows, int64_t inner, int64_t outer_stride, int64_t inner_stride,
    int64_t width, const void* residual, const void* weight, const void* bias, float eps, void* out, void* total) {
  const Norm work{dtype, x, rows, inner, outer_stride, inner_stride, width, residual, weight, bias, eps, out, total};
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
  const SiluAndMul work{dtype, x, rows, row_stride, width, out};
  share(kernels().silu_and_mul_tasks(work), kernels().silu_and_mul, work);
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

// Rows of a query tile, about: enough to use the keys often that one has fetched, few enough to share a prefill.
constexpr int64_t QUERY_ROWS = 32;

// Splits the step's tokens into query tiles, those with the most keys first: at the end the threads wait for small ones.
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

// Several tasks for the keys of one row only where there would be too few tasks for the threads.
int64_t splits(const std::vector<QueryTile>& tiles, int64_t kv_heads) {
  if (threads() == 1 || static_cast<int64_t>(tiles.size()) * kv_heads >= 4 * threads()) return 1;
  return (tiles.front().position + tiles.front().tokens + KV_SPLIT - 1) / KV_SPLIT;
}

}  // namespace

// The first `cu_seqlens[sequences]` rows of `out`, contiguous. 0, or 1 when memory ran out.
FISSILE_API int fissile_attention(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const void* keys,
    const void* values, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, float scale,
    int64_t window, const float* sinks, void* out) {
  const int64_t tile_tokens = std::max<int64_t>(1, QUERY_ROWS / (heads / kv_heads));
  const std::vector<QueryTile> tiles = query_tiles(sequences, cu_seqlens, seq_lens, tile_tokens);
  if (tiles.empty()) return 0;
  Attention work{dtype, kv_dtype, q, q_row_stride, q_head_stride, keys, values, heads, kv_heads, dim, block_size,
                 block_tables, table_stride, seq_lens, scale, window, sinks, out, tiles.data(),
                 static_cast<int64_t>(tiles.size()), tile_tokens, splits(tiles, kv_heads), nullptr};
  if (work.splits > 1) {
    work.states = scratch(OF_CALL, kernels().attention_tasks(work) * kernels().attention_state_size(work));
    if (!work.states) return 1;
  }
  share(kernels().attention_tasks(work), kernels().attention, work);
  if (work.splits > 1) share(kernels().attention_merge_tasks(work), kernels().attention_merge, work);
  return 0;
}

FISSILE_API void fissile_sample(
    const float* logits, int64_t row_stride, int64_t rows, int64_t vocab, const float* temperature,
    const int64_t* top_k, const float* top_p, const float* min_p, const uint64_t* seeds, const int64_t* positions,
    const int64_t* choices, int64_t* ids) {
  const Sample work{logits, row_stride, vocab, temperature, top_k, top_p, min_p, seeds, positions, choices, ids};
  share(rows, kernels().sample, work);
}
