// Products of bfloat16 by AVX512-BF16. As in linear.cpp every number of y is summed over k in blocks of K_BLOCK in order,
// each block from zero; VDPBF16PS adds two k at a time to it, in order. A block of int8 weights is brought to bfloat16,
// exactly, and its sum multiplied by the scale of its column. float32 is the base's.
//
// x is copied to tiles of ROWS rows [pairs of k][rows of the tile], a zero behind an odd last k. With FISSILE_EMULATED
// the instruction is made of others, by the pseudo-code of Intel's manual (volume 2, VDPBF16PS), for tests on AVX2.
#include "bf16_rows.hpp"
#include "own_linear.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::Linear;
using fissile::PANEL;

static_assert(WIDTH == PANEL);

using fissile::K_BLOCK;

// Of the numbers that are summed from zero.
constexpr int64_t PAIRS = K_BLOCK / 2;
constexpr int ROWS = 6;
// A task: so many panels, so many rows (a multiple of ROWS).
constexpr int64_t TASK_PANELS = 4;
constexpr int64_t TASK_ROWS = 72;
// Bytes that weights are asked for ahead of their use.
constexpr int64_t PREFETCH = 2048;

#ifdef FISSILE_EMULATED

// Not inlined, which would take the compiler half a minute.
__attribute__((noinline)) Floats add_pairs(Floats sum, Words a, Words b) {
  const Words upper = splat_word(0xFFFF0000u);
  sum = flushed(fma(flushed((Floats)(a & upper)), flushed((Floats)(b & upper)), flushed(sum)));
  return flushed(fma(flushed((Floats)(a << 16)), flushed((Floats)(b << 16)), sum));
}

#else

// sum += a's second numbers times b's, then the first ones.
FISSILE_INLINE Floats add_pairs(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#endif

FISSILE_INLINE Words load_words(const Bf16* from) {
  Words words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

// A block of some panels; with scales, or null, of each panel so many bytes further.
struct Block {
  const Bf16* weights;
  int64_t panel_size;
  const float* scales;
  int64_t scales_stride;
};

// totals[row][column] += the sums over some pairs, for ROW_COUNT rows and PANELS panels from `first` on.
template <int ROW_COUNT, int PANELS>
FISSILE_INLINE void multiply(const uint32_t* x, const Block& block, int64_t first, int64_t pairs, float* totals) {
  Floats sums[ROW_COUNT][PANELS];
  for (auto& row : sums)
    for (auto& one : row) one = zeros();
  for (int64_t k = 0; k < pairs; k++) {
    Words columns[PANELS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      const Bf16* pair = block.weights + (first + p) * block.panel_size + k * PANEL * 2;
      __builtin_prefetch(reinterpret_cast<const char*>(pair) + PREFETCH);
      columns[p] = load_words(pair);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROW_COUNT; r++) {
      const Words factors = splat_word(x[k * ROW_COUNT + r]);
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) sums[r][p] = add_pairs(sums[r][p], factors, columns[p]);
    }
  }
  for (int p = 0; p < PANELS; p++) {
    const char* scales = reinterpret_cast<const char*>(block.scales) + (first + p) * block.scales_stride;
    const Floats scale = block.scales ? load(reinterpret_cast<const float*>(scales)) : splat(1.0f);
    for (int r = 0; r < ROW_COUNT; r++) {
      float* to = totals + (r * TASK_PANELS + first + p) * PANEL;
      store(to, fma(sums[r][p], scale, load(to)));
    }
  }
}

template <int ROW_COUNT>
void multiply_panels(const uint32_t* x, const Block& block, int64_t panels, int64_t pairs, float* totals) {
  if (panels == TASK_PANELS) return multiply<ROW_COUNT, TASK_PANELS>(x, block, 0, pairs, totals);
  for (int64_t p = 0; p < panels; p++) multiply<ROW_COUNT, 1>(x, block, p, pairs, totals);
}

void multiply_tile(
    const uint32_t* x, int64_t rows, const Block& block, int64_t panels, int64_t pairs, float* totals) {
  switch (rows) {
    case 1: return multiply_panels<1>(x, block, panels, pairs, totals);
    case 2: return multiply_panels<2>(x, block, panels, pairs, totals);
    case 3: return multiply_panels<3>(x, block, panels, pairs, totals);
    case 4: return multiply_panels<4>(x, block, panels, pairs, totals);
    case 5: return multiply_panels<5>(x, block, panels, pairs, totals);
    default: return multiply_panels<6>(x, block, panels, pairs, totals);
  }
}

// The block of some panels from `pair` on; of int8 in `wide`.
Block block_of(const Linear& work, const char* weights, int64_t panels, int64_t pair, Bf16* wide) {
  const fissile::Weight& weight = work.weight;
  const int64_t stride = fissile::panel_bytes(weight.dtype, weight.inner);
  const char* at = weights + fissile::block_offset(weight.dtype, 2 * pair);
  if (weight.dtype == fissile::BFLOAT16) return {reinterpret_cast<const Bf16*>(at), stride / 2, nullptr, 0};
  const int64_t depth = at_most(K_BLOCK, fissile::padded_inner(weight.dtype, weight.inner) - 2 * pair);
  for (int64_t p = 0; p < panels; p++) {
    prefetch_block(at + p * stride + K_BLOCK * PANEL);
    widen_block(at + p * stride, depth, wide + p * K_BLOCK * PANEL);
  }
  return {wide, K_BLOCK * PANEL, scales_of(at), stride};
}

int64_t pairs_of(const Linear& work) { return parts(work.weight.inner, 2); }

int64_t scratch(const Linear& work) {
  return work.rows * pairs_of(work);
}

int64_t pack_tasks(const Linear& work) {
  return parts(work.rows, ROWS);
}

void pack_x(const Linear& work, int64_t task) {
  const int64_t first = task * ROWS, count = at_most(ROWS, work.rows - first), pairs = pairs_of(work);
  uint32_t* to = reinterpret_cast<uint32_t*>(work.packed_x) + first * pairs;
  for (int64_t r = 0; r < count; r++) {
    const Bf16* from = static_cast<const Bf16*>(work.x) + (first + r) * work.x_stride;
    for (int64_t k = 0; k < work.weight.inner / 2; k++) __builtin_memcpy(to + k * count + r, from + 2 * k, sizeof *to);
    if (work.weight.inner % 2) to[(pairs - 1) * count + r] = from[work.weight.inner - 1].bits;
  }
}

int64_t tasks(const Linear& work) {
  return parts(parts(work.weight.columns, PANEL), TASK_PANELS) * parts(work.rows, TASK_ROWS);
}

void run(const Linear& work, int64_t task) {
  // Tasks that follow each other share panels.
  const int64_t row_groups = parts(work.rows, TASK_ROWS), pairs = pairs_of(work);
  const int64_t first_panel = task / row_groups * TASK_PANELS, first_row = task % row_groups * TASK_ROWS;
  const int64_t panels = at_most(TASK_PANELS, parts(work.weight.columns, PANEL) - first_panel);
  const int64_t rows = at_most(TASK_ROWS, work.rows - first_row);
  const char* weights = static_cast<const char*>(work.weight.panels) +
                        first_panel * fissile::panel_bytes(work.weight.dtype, work.weight.inner);
  const uint32_t* x = reinterpret_cast<const uint32_t*>(work.packed_x) + first_row * pairs;
  alignas(64) float totals[TASK_ROWS * TASK_PANELS * PANEL];
  alignas(64) Bf16 wide[TASK_PANELS * K_BLOCK * PANEL];
  __builtin_memset(totals, 0, rows * TASK_PANELS * PANEL * sizeof(float));
  for (int64_t k = 0; k < pairs; k += PAIRS) {
    const Block block = block_of(work, weights, panels, k, wide);
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int64_t count = at_most(ROWS, rows - r);
      multiply_tile(x + r * pairs + k * count, count, block, panels, at_most(PAIRS, pairs - k),
                    totals + r * TASK_PANELS * PANEL);
    }
  }
  Bf16* y = static_cast<Bf16*>(work.y) + first_row * work.y_stride + first_panel * PANEL;
  for (int64_t r = 0; r < rows; r++, y += work.y_stride)
    for (int64_t p = 0; p < panels; p++)
      write_row(work, totals + (r * TASK_PANELS + p) * PANEL, (first_panel + p) * PANEL, y + p * PANEL);
}

}  // namespace

void use_own_linear(fissile::Kernels& table) { use<scratch, pack_tasks, pack_x, tasks, run>(table); }

}  // namespace FISSILE_ISA
