// y = x W^T + b, batch-invariant. Each number of y is a sum over k in blocks of K_BLOCK, in order. One chain of fma's
// sums each block from zero. The number of rows, their places, the threads and the vector width do not matter. The
// block sum of an int8 weight is multiplied by the scale of its column and block before it is added.
//
// In packed weights (kernels.hpp), consecutive values of k are adjacent, as the bfloat16 instructions need them. Of a
// loaded vector of bfloat16, a shift gives the even k and a mask the odd k. A block of a panel is contiguous and stays
// in L1 while all rows of a task use it. The next block is prefetched meanwhile, so that memory and arithmetic work in
// parallel. x is copied to float32 tiles [inner][rows of the tile] of at most ROWS rows.
#include "linear.hpp"

#include "grouped.hpp"
#include "row_tiles.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::BLOCK_SCALES;
using fissile::K_BLOCK;
using fissile::PANEL;

// Most rows of a tile.
constexpr int64_t ROWS = 6;
// Most panels and most tiles of a task.
constexpr int64_t TASK_PANELS = 4;
constexpr int64_t TASK_TILES = 24;
// Number of rows of a task from which on a block of weights is widened once, in memory, for all tiles. With fewer rows
// each tile widens it in registers: for bfloat16 and one or two tiles of up to four rows this costs little. Never with
// vectors of other widths than 8, or for float32.
template <class Number>
constexpr int64_t WIDEN_ROWS = WIDTH != 8 || sizeof(Number) == 4 ? INT64_MAX : sizeof(Number) == 2 ? 9 : 6;
// Bytes between a prefetch and its use, if each panel is a memory stream of its own.
constexpr int64_t PREFETCH = 1024;
// Rows of y between a prefetch and its write; the bytes of a cache line.
constexpr int64_t WRITE_AHEAD = 12;
constexpr uint64_t LINE = 64;
// Vectors per panel row.
constexpr int VECTORS = PANEL / WIDTH;
// Panels that tiles of three or more rows multiply at once. 16-wide vectors have twice as many registers, and need more
// sums to hide the latency of fma.
constexpr int SOME_PANELS = WIDTH / 8;

struct Int8 {
  int8_t value;
};

// A float32 number of a block that was widened once for all tiles.
struct Widened {
  float value;
};

template <class Number>
constexpr fissile::Dtype DTYPE_OF = sizeof(Number) == 4   ? fissile::FLOAT32
                                    : sizeof(Number) == 2 ? fissile::BFLOAT16
                                                          : fissile::INT8;

// Number of consecutive values of k that are adjacent in a panel.
template <class Number>
constexpr int GROUP = fissile::group_of(DTYPE_OF<Number>);

// With at most this many rows, a tile is mostly alone in its task and waits for memory. It then prefetches into L2,
// which can have more outstanding lines. With more rows it prefetches into L1, where a block stays long enough.
constexpr int64_t few_rows(const void*) { return 2; }
constexpr int64_t few_rows(const float*) { return 4; }
constexpr int64_t few_rows(const Widened*) { return 0; }

template <class Number, int ROW_COUNT>
FISSILE_INLINE void fetch(const char* line) {
  __builtin_prefetch(line, 0, ROW_COUNT <= few_rows(static_cast<const Number*>(nullptr)) ? 2 : 3);
}

// columns_of() returns an int8 number times this factor, which is exact in all instruction sets.
constexpr float INT8_FACTOR = 1 << 24;

// Number g of the groups of WIDTH columns.
FISSILE_INLINE Floats columns_of(const float* from, int) { return load(from); }

FISSILE_INLINE Floats columns_of(const Widened* from, int) { return load(&from->value); }

FISSILE_INLINE Floats columns_of(const Bf16* from, int g) {
  Words words;
  __builtin_memcpy(&words, from, sizeof words);
  return (Floats)(g == 0 ? words << 16 : words & splat_word(0xFFFF0000u));
}

FISSILE_INLINE Floats columns_of(const Int8* from, int g) {
  Words words;
  __builtin_memcpy(&words, from, sizeof words);
  return __builtin_convertvector((Ints)(g == 3 ? words & splat_word(0xFF000000u) : byte_to_top(words, g)), Floats);
}

// A block of adjacent panels: its numbers, its scales or null, and the bytes from panel to panel.
struct Block {
  const void* numbers;
  const float* scales;
  int64_t panel_stride;
};

// Memory to prefetch, in each panel: `step` bytes per group, from `at` on. If panels are memory streams, `skip` bytes
// are added once, at k = `near`, where the stream continues in the next task's panels.
struct Ahead {
  const char* at;
  int64_t step;
  int64_t near;
  int64_t skip;
};

template <class Number>
FISSILE_INLINE const Number* panel_of(const Number* first, int64_t panel_stride, int64_t panel) {
  return reinterpret_cast<const Number*>(reinterpret_cast<const char*>(first) + panel * panel_stride);
}

// totals[row][column] += the sum over `depth` values of k, whole groups, for ROW_COUNT rows and PANELS panels.
template <class Number, int ROW_COUNT, int PANELS>
FISSILE_INLINE void multiply(const float* x, const Block& block, int64_t depth, Ahead ahead, float* totals) {
  const Number* const numbers = static_cast<const Number*>(block.numbers);
  Floats sums[ROW_COUNT][PANELS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROW_COUNT; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) sums[r][p][v] = zeros();
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k += GROUP<Number>, ahead.at += ahead.step) {
    if (PANELS > SOME_PANELS && k == ahead.near) ahead.at += ahead.skip;
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      fetch<Number, ROW_COUNT>(ahead.at + p * block.panel_stride);
      const Number* group = panel_of(numbers, block.panel_stride, p) + k * PANEL;
#pragma GCC unroll 4
      for (int g = 0; g < GROUP<Number>; g++) {
        // Forces a new load for each g. Keeping the numbers would take registers that the sums need.
        __asm__("" : "+r"(group));
        Floats columns[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) columns[v] = columns_of(group + v * WIDTH * GROUP<Number>, g);
#pragma GCC unroll 8
        for (int r = 0; r < ROW_COUNT; r++) {
          Floats factor = splat(x[(k + g) * ROW_COUNT + r]);
#pragma GCC unroll 2
          for (int v = 0; v < VECTORS; v++) sums[r][p][v] = fma(factor, columns[v], sums[r][p][v]);
        }
      }
    }
  }
  const Floats unit = splat(block.scales ? 1.0f / INT8_FACTOR : 1.0f);
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      const Floats scale = block.scales ? load(panel_of(block.scales, block.panel_stride, p) + v * WIDTH) : splat(1.0f);
#pragma GCC unroll 8
      for (int r = 0; r < ROW_COUNT; r++) {
        float* to = totals + (r * TASK_PANELS + p) * PANEL + v * WIDTH;
        store(to, fma(sums[r][p][v] * unit, scale, load(to)));
      }
    }
}

// Panels that a tile of `rows` rows multiplies at once: enough sums to hide the latency of fma, as far as registers
// hold them.
constexpr int at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 * SOME_PANELS : SOME_PANELS; }

template <class Number, int ROW_COUNT>
void multiply_rows(int64_t panels, const float* x, const Block& block, int64_t depth, Ahead ahead, float* totals) {
  if (panels == 1) multiply<Number, ROW_COUNT, 1>(x, block, depth, ahead, totals);
  else multiply<Number, ROW_COUNT, at_once(ROW_COUNT)>(x, block, depth, ahead, totals);
}

// Multiplies a tile of `rows` rows by one panel or by at_once(rows) panels.
template <class Number>
void multiply_tile(int64_t rows, int64_t panels, const float* x, const Block& block, int64_t depth, Ahead ahead,
                   float* totals) {
  switch (rows) {
    case 1: return multiply_rows<Number, 1>(panels, x, block, depth, ahead, totals);
    case 2: return multiply_rows<Number, 2>(panels, x, block, depth, ahead, totals);
    case 3: return multiply_rows<Number, 3>(panels, x, block, depth, ahead, totals);
    case 4: return multiply_rows<Number, 4>(panels, x, block, depth, ahead, totals);
    case 5: return multiply_rows<Number, 5>(panels, x, block, depth, ahead, totals);
    default: return multiply_rows<Number, 6>(panels, x, block, depth, ahead, totals);
  }
}

// Widens `depth` values of k of one panel to [depth][PANEL].
template <class Number>
void widen(const Number* from, int64_t depth, Widened* to) {
  for (int64_t k = 0; k < depth; k += GROUP<Number>)
#pragma GCC unroll 4
    for (int g = 0; g < GROUP<Number>; g++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++)
        store(&to[(k + g) * PANEL + v * WIDTH].value, columns_of(from + k * PANEL + v * WIDTH * GROUP<Number>, g));
}

RowTile tile_of(const fissile::Linear& work, int64_t tile) { return row_tile(work.rows, ROWS, tile); }

// A task: its panels, its tiles, and memory for its sums.
template <class Number>
struct Task {
  const fissile::Linear& work;
  int64_t inner;
  int64_t panel_stride;
  const char* weights;
  int64_t panels;
  int64_t first_tile;
  int64_t tile_count;
  int64_t first_row;
  int64_t rows;
  float* totals;

  // Panel `p` and the following ones, from k to the end of k's block.
  Block block(int64_t p, int64_t k) const {
    const char* at = weights + p * panel_stride + fissile::block_offset(DTYPE_OF<Number>, k);
    if (sizeof(Number) > 1) return {at, nullptr, panel_stride};
    return {at + BLOCK_SCALES, reinterpret_cast<const float*>(at), panel_stride};
  }

  // The memory needed after block (p, k): the same block of the next panels, the next block of k, or the next task's
  // panels.
  const char* after(int64_t p, int64_t count, int64_t k) const {
    if (p + count < panels) return weights + (p + count) * panel_stride + fissile::block_offset(DTYPE_OF<Number>, k);
    if (k + K_BLOCK < inner) return weights + fissile::block_offset(DTYPE_OF<Number>, k + K_BLOCK);
    return weights + TASK_PANELS * panel_stride;
  }

  template <class Wide>
  void multiply_tiles(const Block& block, int64_t p, int64_t count, int64_t k, int64_t depth) const {
    constexpr int64_t BYTES = K_BLOCK * PANEL * sizeof(Number), GROUPS = K_BLOCK / GROUP<Wide>;
    // A stream whose panel ends continues in the next task's panels.
    const int64_t left = PREFETCH / (PANEL * static_cast<int64_t>(sizeof(Number))), near = at_least(inner - left - k, 0);
    const bool streams = count > SOME_PANELS;
    const char* next = streams ? static_cast<const char*>(block.numbers) + PREFETCH : after(p, count, k);
    for (int64_t t = 0; t < tile_count; t++) {
      const RowTile tile = tile_of(work, first_tile + t);
      const float* x = work.packed_x + tile.first * inner + k * tile.rows;
      const Ahead ahead{next + BYTES * t / tile_count, BYTES / GROUPS / tile_count, near,
                        (TASK_PANELS - 1) * panel_stride};
      float* to = totals + ((tile.first - first_row) * TASK_PANELS + p) * PANEL;
      multiply_tile<Wide>(tile.rows, count, x, block, depth, ahead, to);
    }
  }

  // Multiplies all tiles by `count` panels from p on.
  void multiply_block(int64_t p, int64_t count, int64_t k) const {
    const int64_t depth = at_most(K_BLOCK, inner - k);
    const Block packed = block(p, k);
    if (rows < WIDEN_ROWS<Number>) return multiply_tiles<Number>(packed, p, count, k, depth);
    alignas(64) Widened wide[K_BLOCK * PANEL];
    widen(static_cast<const Number*>(packed.numbers), depth, wide);
    multiply_tiles<Widened>({wide, packed.scales, 0}, p, 1, k, depth);
  }
};

// Writes a task's rows of y. Prefetches them, since they are far apart and a store waits for its cache line.
template <class Number>
void write_rows(const fissile::Linear& work, const float* totals, int64_t first_row, int64_t rows, int64_t first_panel,
                int64_t panels) {
  Number* y = static_cast<Number*>(work.y) + first_row * work.y_stride + first_panel * PANEL;
  for (int64_t r = 0; r < rows; r++, y += work.y_stride) {
    if (r + WRITE_AHEAD < rows)
      for (int64_t p = 0; p < TASK_PANELS * PANEL; p += static_cast<int64_t>(LINE / sizeof(Number)))
        __builtin_prefetch(y + WRITE_AHEAD * work.y_stride + p, 1);
    for (int64_t p = 0; p < panels; p++)
      write_row(work, totals + (r * TASK_PANELS + p) * PANEL, (first_panel + p) * PANEL, y + p * PANEL);
  }
}

template <class Number>
void run(const fissile::Linear& work, int64_t task) {
  const int64_t all_panels = parts(work.weight.columns, PANEL), groups = parts(all_panels, TASK_PANELS);
  const int64_t first_panel = task % groups * TASK_PANELS, first_tile = task / groups * TASK_TILES;
  const int64_t panels = at_most(TASK_PANELS, all_panels - first_panel);
  const int64_t tile_count = at_most(TASK_TILES, parts(work.rows, ROWS) - first_tile);
  const int64_t stride = fissile::panel_bytes(DTYPE_OF<Number>, work.weight.inner);
  const RowTile first = tile_of(work, first_tile), last = tile_of(work, first_tile + tile_count - 1);
  const int64_t rows = last.first + last.rows - first.first;
  alignas(64) float totals[TASK_TILES * ROWS * TASK_PANELS * PANEL];
  __builtin_memset(totals, 0, rows * TASK_PANELS * PANEL * sizeof(float));
  const Task<Number> mine{work, fissile::padded_inner(DTYPE_OF<Number>, work.weight.inner), stride,
                          static_cast<const char*>(work.weight.panels) + first_panel * stride, panels, first_tile,
                          tile_count, first.first, rows, totals};
  for (int64_t k = 0; k < mine.inner; k += K_BLOCK)
    for (int64_t p = 0, count; p < panels; p += count) {
      count = panels - p >= at_once(first.rows) ? at_once(first.rows) : 1;
      mine.multiply_block(p, count, k);
    }
  if (work.dtype == fissile::FLOAT32) write_rows<float>(work, totals, first.first, rows, first_panel, panels);
  else write_rows<Bf16>(work, totals, first.first, rows, first_panel, panels);
}

// Copies tile `task` of x to float32 [inner][rows of the tile].
template <class Number>
void pack_rows(const fissile::Linear& work, int64_t task) {
  const RowTile tile = tile_of(work, task);
  const int64_t inner = work.weight.inner, padded = fissile::padded_inner(work.weight.dtype, inner);
  float* to = work.packed_x + tile.first * padded;
  for (int64_t r = 0; r < tile.rows; r++) {
    const Number* from = static_cast<const Number*>(work.x) + (tile.first + r) * work.x_stride;
    for (int64_t k = 0; k < inner; k++) to[k * tile.rows + r] = widened(from[k]);
    for (int64_t k = inner; k < padded; k++) to[k * tile.rows + r] = 0.0f;
  }
}

// Computes the scale of each column of a panel for one block: weights are divided by it before they are rounded to
// int8.
template <class Source>
void find_scales(const Source* weight, int64_t columns, int64_t inner, int64_t first, int64_t k, float* scales) {
  for (int64_t c = 0; c < PANEL; c++) {
    float most = 0.0f;
    for (int64_t i = k; first + c < columns && i < at_most(inner, k + K_BLOCK); i++) {
      const float size = __builtin_fabsf(widened(weight[(first + c) * inner + i]));
      // Keeps a NaN, so that it shows in all products of its block.
      if (size > most || size != size) most = size;
    }
    scales[c] = most / 127.0f;
  }
}

float converted(float value, float, const float*) { return value; }

Bf16 converted(Bf16 value, float, const Bf16*) { return value; }

// Rounds to the nearest of 255 int8 values, ties to even. Uses IEEE operations only, so the result is the same in every
// instruction set.
template <class Source>
Int8 converted(Source value, float scale, const Int8*) {
  if (!(scale > 0.0f && scale <= 3.4028234663852886e38f)) return {0};
  const float nearest = widened(value) / scale + 12582912.0f - 12582912.0f;
  // The quotient exceeds 127 if the scale is so small that it lost precision.
  return {static_cast<int8_t>(nearest > 127.0f ? 127.0f : nearest < -127.0f ? -127.0f : nearest)};
}

template <class Source, class Number>
void pack(const Source* weight, int64_t columns, int64_t inner, Number* panels, int64_t panel) {
  char* to = reinterpret_cast<char*>(panels) + panel * fissile::panel_bytes(DTYPE_OF<Number>, inner);
  for (int64_t k = 0; k < inner; k += K_BLOCK) {
    float scales[PANEL] = {};
    if (sizeof(Number) == 1) {
      find_scales(weight, columns, inner, panel * PANEL, k, scales);
      __builtin_memcpy(to, scales, BLOCK_SCALES);
      to += BLOCK_SCALES;
    }
    for (int64_t i = k; i < at_most(inner, k + K_BLOCK); i += GROUP<Number>)
      for (int64_t c = 0; c < PANEL; c++)
        for (int64_t g = 0; g < GROUP<Number>; g++, to += sizeof(Number)) {
          const int64_t column = panel * PANEL + c;
          const bool there = column < columns && i + g < inner;
          const Number value =
              there ? converted(weight[column * inner + i + g], scales[c], static_cast<Number*>(nullptr)) : Number{};
          __builtin_memcpy(to, &value, sizeof value);
        }
  }
}

}  // namespace

void pack_panel(const fissile::Packing& work, int64_t task) {
  const int64_t columns = work.columns, inner = work.inner;
  const float* const wide = static_cast<const float*>(work.weight);
  const Bf16* const narrow = static_cast<const Bf16*>(work.weight);
  if (work.packed_dtype == fissile::INT8) {
    Int8* const panels = static_cast<Int8*>(work.panels);
    if (work.dtype == fissile::FLOAT32) pack(wide, columns, inner, panels, task);
    else pack(narrow, columns, inner, panels, task);
  } else if (work.dtype == fissile::FLOAT32) {
    pack(wide, columns, inner, static_cast<float*>(work.panels), task);
  } else {
    pack(narrow, columns, inner, static_cast<Bf16*>(work.panels), task);
  }
}

int64_t linear_scratch(const fissile::Linear& work) {
  if (fissile::is_grouped(work.weight.dtype)) return grouped_scratch(work);
  return work.rows * fissile::padded_inner(work.weight.dtype, work.weight.inner);
}

int64_t linear_pack_tasks(const fissile::Linear& work) {
  return fissile::is_grouped(work.weight.dtype) ? grouped_pack_tasks(work) : parts(work.rows, ROWS);
}

void linear_pack(const fissile::Linear& work, int64_t task) {
  if (fissile::is_grouped(work.weight.dtype)) grouped_pack(work, task);
  else if (work.dtype == fissile::FLOAT32) pack_rows<float>(work, task);
  else pack_rows<Bf16>(work, task);
}

int64_t linear_tasks(const fissile::Linear& work) {
  if (fissile::is_grouped(work.weight.dtype)) return grouped_tasks(work);
  return parts(parts(work.weight.columns, PANEL), TASK_PANELS) * parts(parts(work.rows, ROWS), TASK_TILES);
}

void linear(const fissile::Linear& work, int64_t task) {
  if (fissile::is_grouped(work.weight.dtype)) grouped(work, task);
  else if (work.weight.dtype == fissile::FLOAT32) run<float>(work, task);
  else if (work.weight.dtype == fissile::BFLOAT16) run<Bf16>(work, task);
  else run<Int8>(work, task);
}

}  // namespace FISSILE_ISA
