// y = x W^T + b, batch-invariant: every number of y is summed over k in blocks of K_BLOCK in order, each block by one
// chain of fma's from zero, whatever the rows, their number and place, the threads and the vectors' width.
//
// float32 weights lie in panels [columns / 16][inner][16]; bfloat16 ones in panels [columns / 16][inner / 2][16][2], pairs
// of neighbours in k side by side, the last one with a zero where inner is odd: that is how the instructions for
// bfloat16 want them, and a vector that is loaded holds the even k after a shift, the odd ones after a mask. A block of
// a panel is one run of memory that stays in L1 while all rows pass by, and a decode reads every weight once, in order.
// x is copied to float32 tiles of ROWS rows [inner, padded alike][rows of the tile].
#include "linear.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::PANEL;

// Numbers summed by one chain. Longer chains err more, shorter ones cost additions.
constexpr int64_t K_BLOCK = 128;
constexpr int ROWS = 6;
// A task: so many panels, so many rows (a multiple of ROWS).
constexpr int64_t TASK_PANELS = 4;
constexpr int64_t TASK_ROWS = 72;
// Bytes that weights are asked for ahead of their use.
constexpr int64_t PREFETCH = 1024;
// Vectors of a panel.
constexpr int VECTORS = PANEL / WIDTH;

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Neighbours in k that stand side by side in a panel.
template <class Number>
constexpr int64_t GROUP = fissile::group_of(sizeof(Number) == 2 ? fissile::BFLOAT16 : fissile::FLOAT32);

// WIDTH columns of a group of a panel: of each k one vector.
FISSILE_INLINE void load_group(const float* from, Floats* out) { out[0] = load(from); }

FISSILE_INLINE void load_group(const Bf16* from, Floats* out) {
  Words words;
  __builtin_memcpy(&words, from, sizeof words);
  out[0] = (Floats)(words << 16);
  out[1] = (Floats)(words & splat_word(0xFFFF0000u));
}

// totals[row][column] += the sum over `depth` numbers of k, whole groups, for ROW_COUNT rows and PANELS panels.
template <class Number, int ROW_COUNT, int PANELS>
FISSILE_INLINE void multiply(
    const float* x, const Number* panel, int64_t panel_stride, int64_t depth, float* totals, int64_t totals_stride) {
  Floats sums[ROW_COUNT][PANELS][VECTORS];
  for (auto& row : sums)
    for (auto& one : row)
      for (auto& vector : one) vector = zeros();
  for (int64_t k = 0; k < depth; k += GROUP<Number>) {
    Floats columns[PANELS][VECTORS][GROUP<Number>];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      const Number* group = panel + p * panel_stride + k * PANEL;
      __builtin_prefetch(group + PREFETCH / sizeof(Number));
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) load_group(group + v * WIDTH * GROUP<Number>, columns[p][v]);
    }
#pragma GCC unroll 2
    for (int64_t g = 0; g < GROUP<Number>; g++)
#pragma GCC unroll 8
      for (int r = 0; r < ROW_COUNT; r++) {
        Floats factor = splat(x[(k + g) * ROW_COUNT + r]);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sums[r][p][v] = fma(factor, columns[p][v][g], sums[r][p][v]);
      }
  }
  for (int r = 0; r < ROW_COUNT; r++)
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < VECTORS; v++) {
        float* to = totals + r * totals_stride + p * PANEL + v * WIDTH;
        store(to, load(to) + sums[r][p][v]);
      }
}

// The panels of a task for one tile of ROW_COUNT rows: as many panels at a time as registers hold.
template <class Number, int ROW_COUNT>
void multiply_panels(
    const float* x, const Number* panel, int64_t panel_stride, int64_t panels, int64_t depth, float* totals) {
  constexpr int AT_ONCE = ROW_COUNT == 1 ? 4 : ROW_COUNT <= 3 ? 2 : 1;
  constexpr int64_t STRIDE = TASK_PANELS * PANEL;
  int64_t p = 0;
  for (; p + AT_ONCE <= panels; p += AT_ONCE)
    multiply<Number, ROW_COUNT, AT_ONCE>(x, panel + p * panel_stride, panel_stride, depth, totals + p * PANEL, STRIDE);
  for (; p < panels; p++)
    multiply<Number, ROW_COUNT, 1>(x, panel + p * panel_stride, panel_stride, depth, totals + p * PANEL, STRIDE);
}

template <class Number>
void multiply_tile(const float* x, int64_t rows, const Number* panel, int64_t panel_stride, int64_t panels,
                   int64_t depth, float* totals) {
  switch (rows) {
    case 1: return multiply_panels<Number, 1>(x, panel, panel_stride, panels, depth, totals);
    case 2: return multiply_panels<Number, 2>(x, panel, panel_stride, panels, depth, totals);
    case 3: return multiply_panels<Number, 3>(x, panel, panel_stride, panels, depth, totals);
    case 4: return multiply_panels<Number, 4>(x, panel, panel_stride, panels, depth, totals);
    case 5: return multiply_panels<Number, 5>(x, panel, panel_stride, panels, depth, totals);
    default: return multiply_panels<Number, 6>(x, panel, panel_stride, panels, depth, totals);
  }
}

template <class Number>
void write_row(const fissile::Linear& work, const float* totals, int64_t row, int64_t column) {
  Number* y = static_cast<Number*>(work.y) + row * work.y_stride + column;
  for (int64_t c = 0; c < PANEL && column + c < work.columns; c += WIDTH) {
    int64_t left = work.columns - column - c;
    Floats value = load(totals + c);
    if (work.bias) value += load_up_to(work.bias + column + c, left);
    store_up_to(y + c, value, left);
  }
}

template <class Number>
void run(const fissile::Linear& work, int64_t task) {
  const int64_t all_panels = tiles(work.columns, PANEL);
  const int64_t groups = tiles(all_panels, TASK_PANELS);
  const int64_t first_panel = task % groups * TASK_PANELS, first_row = task / groups * TASK_ROWS;
  const int64_t panels = at_most(TASK_PANELS, all_panels - first_panel);
  const int64_t rows = at_most(TASK_ROWS, work.rows - first_row);
  const int64_t inner = fissile::padded_inner(work.dtype, work.inner), panel_stride = inner * PANEL;
  const Number* weights = static_cast<const Number*>(work.panels) + first_panel * panel_stride;
  alignas(64) float totals[TASK_ROWS * TASK_PANELS * PANEL];
  __builtin_memset(totals, 0, rows * TASK_PANELS * PANEL * sizeof(float));
  for (int64_t k = 0; k < inner; k += K_BLOCK) {
    int64_t depth = at_most(K_BLOCK, inner - k);
    for (int64_t r = 0; r < rows; r += ROWS) {
      int64_t count = at_most(ROWS, rows - r);
      const float* x = work.packed_x + (first_row + r) * inner + k * count;
      multiply_tile(x, count, weights + k * PANEL, panel_stride, panels, depth, totals + r * TASK_PANELS * PANEL);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t p = 0; p < panels; p++)
      write_row<Number>(work, totals + (r * TASK_PANELS + p) * PANEL, first_row + r, (first_panel + p) * PANEL);
}

float widened(float value) { return value; }

float widened(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Tile `task` of x: [inner][rows of the tile].
template <class Number>
void pack_rows(const fissile::Linear& work, int64_t task) {
  const int64_t first = task * ROWS, count = at_most(ROWS, work.rows - first), inner = fissile::padded_inner(work.dtype, work.inner);
  float* to = work.packed_x + first * inner;
  for (int64_t r = 0; r < count; r++) {
    const Number* from = static_cast<const Number*>(work.x) + (first + r) * work.x_stride;
    for (int64_t k = 0; k < work.inner; k++) to[k * count + r] = widened(from[k]);
    if (inner > work.inner) to[work.inner * count + r] = 0.0f;
  }
}

template <class Number>
void pack(const Number* weight, int64_t columns, int64_t inner, Number* panels, int64_t panel) {
  Number* to = panels + panel * tiles(inner, GROUP<Number>) * GROUP<Number> * PANEL;
  for (int64_t k = 0; k < inner; k += GROUP<Number>)
    for (int64_t c = 0; c < PANEL; c++)
      for (int64_t g = 0; g < GROUP<Number>; g++) {
        const int64_t column = panel * PANEL + c;
        const bool there = column < columns && k + g < inner;
        *to++ = there ? weight[column * inner + k + g] : Number{};
      }
}

}  // namespace

void pack_panel(int64_t dtype, const void* weight, int64_t columns, int64_t inner, void* panels, int64_t task) {
  if (dtype == fissile::FLOAT32)
    pack(static_cast<const float*>(weight), columns, inner, static_cast<float*>(panels), task);
  else
    pack(static_cast<const Bf16*>(weight), columns, inner, static_cast<Bf16*>(panels), task);
}

int64_t linear_scratch(const fissile::Linear& work) {
  return work.rows * fissile::padded_inner(work.dtype, work.inner);
}

int64_t linear_pack_tasks(const fissile::Linear& work) { return tiles(work.rows, ROWS); }

void linear_pack(const fissile::Linear& work, int64_t task) {
  if (work.dtype == fissile::FLOAT32) pack_rows<float>(work, task);
  else pack_rows<Bf16>(work, task);
}

int64_t linear_tasks(const fissile::Linear& work) {
  return tiles(tiles(work.columns, PANEL), TASK_PANELS) * tiles(work.rows, TASK_ROWS);
}

void linear(const fissile::Linear& work, int64_t task) {
  if (work.dtype == fissile::FLOAT32) run<float>(work, task);
  else run<Bf16>(work, task);
}

}  // namespace FISSILE_ISA
