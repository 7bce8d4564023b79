// y = x W^T + b, batch-invariant: every number of y is summed over k in blocks of K_BLOCK in order, each block by one
// chain of fma's from zero, whatever the rows, their number and place, the threads and the vectors' width. A block's sum
// of an int8 weight is multiplied by the scale of its column and block when it is added.
//
// Packed weights (kernels.hpp) hold neighbours in k side by side, which is how the instructions for bfloat16 want them; a
// vector that is loaded gives the even k of bfloat16 after a shift, the odd ones after a mask. A block of a panel is one
// run of memory that stays in L1 while the rows of a task pass by; meanwhile the next one is fetched, so that memory and
// arithmetic work at the same time. x is copied to float32 tiles [inner][rows of the tile] of up to ROWS rows.
#include "linear.hpp"

#include "row_tiles.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::BLOCK_SCALES;
using fissile::K_BLOCK;
using fissile::PANEL;

// Most rows of a tile.
constexpr int64_t ROWS = 6;
// A task: so many panels, so many tiles.
constexpr int64_t TASK_PANELS = 4;
constexpr int64_t TASK_TILES = 24;
// Rows of a task from which on a block of weights is widened once for all its tiles; before, each does it in registers,
// which costs little for bfloat16 and one or two tiles of up to four rows. Never where vectors are wider.
template <class Number>
constexpr int64_t WIDEN_ROWS = WIDTH != 8 || sizeof(Number) == 4 ? INT64_MAX : sizeof(Number) == 2 ? 9 : 6;
// Where a panel is a stream of its own, bytes that are asked for ahead of their use.
constexpr int64_t PREFETCH = 1024;
// Rows of y that are asked for ahead of their turn, line by line of so many bytes.
constexpr int64_t WRITE_AHEAD = 12;
constexpr uint64_t LINE = 64;
// Vectors of a panel.
constexpr int VECTORS = PANEL / WIDTH;
// Panels that tiles of three and more rows take at once: 16-wide vectors have more registers, and need more sums.
constexpr int SOME_PANELS = WIDTH / 8;

struct Int8 {
  int8_t value;
};

// A number of a block that was widened once for all tiles.
struct Widened {
  float value;
};

template <class Number>
constexpr fissile::Dtype DTYPE_OF = sizeof(Number) == 4   ? fissile::FLOAT32
                                    : sizeof(Number) == 2 ? fissile::BFLOAT16
                                                          : fissile::INT8;

// Neighbours in k that stand side by side in a panel.
template <class Number>
constexpr int GROUP = fissile::group_of(DTYPE_OF<Number>);

// Up to so many rows a tile is mostly alone in its task, and waits for memory: what comes next is fetched into the second
// cache then, where more lines can be under way. With more tiles a block stays in the first cache for long enough.
constexpr int64_t few_rows(const void*) { return 2; }
constexpr int64_t few_rows(const float*) { return 4; }
constexpr int64_t few_rows(const Widened*) { return 0; }

template <class Number, int ROW_COUNT>
FISSILE_INLINE void fetch(const char* line) {
  __builtin_prefetch(line, 0, ROW_COUNT <= few_rows(static_cast<const Number*>(nullptr)) ? 2 : 3);
}

// int8 comes as so many times the number, exactly, in all instruction sets.
constexpr float INT8_FACTOR = 1 << 24;

// Number g of WIDTH columns' groups.
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

// A block of neighbouring panels: its numbers, its scales or null, and bytes from panel to panel.
struct Block {
  const void* numbers;
  const float* scales;
  int64_t panel_stride;
};

// Memory that comes next, in each panel: fetched by and by, `step` bytes with each group. Of panels that are streams, from
// k `near` on it is `skip` bytes further.
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

// totals[row][column] += the sum over `depth` numbers of k, whole groups, for ROW_COUNT rows and PANELS panels.
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
        // Numbers are loaded anew for each g: kept, they would need registers that the sums have.
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

// Panels that tiles of so many rows take at once: enough sums to hide what an fma takes, as many as registers hold.
constexpr int at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 * SOME_PANELS : SOME_PANELS; }

template <class Number, int ROW_COUNT>
void multiply_rows(int64_t panels, const float* x, const Block& block, int64_t depth, Ahead ahead, float* totals) {
  if (panels == 1) multiply<Number, ROW_COUNT, 1>(x, block, depth, ahead, totals);
  else multiply<Number, ROW_COUNT, at_once(ROW_COUNT)>(x, block, depth, ahead, totals);
}

// A tile of `rows` rows, and one panel or at_once(rows).
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

// `depth` numbers of k of one panel as [depth][PANEL].
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

// A task: its panels, its tiles, and memory for them.
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

  // Panel `p` and those behind it, numbers k to the end of their block.
  Block block(int64_t p, int64_t k) const {
    const char* at = weights + p * panel_stride + fissile::block_offset(DTYPE_OF<Number>, k);
    if (sizeof(Number) > 1) return {at, nullptr, panel_stride};
    return {at + BLOCK_SCALES, reinterpret_cast<const float*>(at), panel_stride};
  }

  // What is needed after block (p, k): the next panels', those of the next k, or those of the next task.
  const char* after(int64_t p, int64_t count, int64_t k) const {
    if (p + count < panels) return weights + (p + count) * panel_stride + fissile::block_offset(DTYPE_OF<Number>, k);
    if (k + K_BLOCK < inner) return weights + fissile::block_offset(DTYPE_OF<Number>, k + K_BLOCK);
    return weights + TASK_PANELS * panel_stride;
  }

  template <class Wide>
  void multiply_tiles(const Block& block, int64_t p, int64_t count, int64_t k, int64_t depth) const {
    constexpr int64_t BYTES = K_BLOCK * PANEL * sizeof(Number), GROUPS = K_BLOCK / GROUP<Wide>;
    // Streams that end go on in the next task's panels.
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

  // All tiles by `count` panels from p on.
  void multiply_block(int64_t p, int64_t count, int64_t k) const {
    const int64_t depth = at_most(K_BLOCK, inner - k);
    const Block packed = block(p, k);
    if (rows < WIDEN_ROWS<Number>) return multiply_tiles<Number>(packed, p, count, k, depth);
    alignas(64) Widened wide[K_BLOCK * PANEL];
    widen(static_cast<const Number*>(packed.numbers), depth, wide);
    multiply_tiles<Widened>({wide, packed.scales, 0}, p, 1, k, depth);
  }
};

// A task's rows of y. They lie far apart, and a store waits for its line.
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

// Tile `task` of x: [inner][rows of the tile].
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

// What a weight is divided by before it is rounded to int8: column by column for one block.
template <class Source>
void find_scales(const Source* weight, int64_t columns, int64_t inner, int64_t first, int64_t k, float* scales) {
  for (int64_t c = 0; c < PANEL; c++) {
    float most = 0.0f;
    for (int64_t i = k; first + c < columns && i < at_most(inner, k + K_BLOCK); i++) {
      const float size = __builtin_fabsf(widened(weight[(first + c) * inner + i]));
      // A NaN stays, so that it shows in all products of its block.
      if (size > most || size != size) most = size;
    }
    scales[c] = most / 127.0f;
  }
}

float converted(float value, float, const float*) { return value; }

Bf16 converted(Bf16 value, float, const Bf16*) { return value; }

// The nearest of the 255 numbers, ties to even, by IEEE operations alone: the same in every instruction set.
template <class Source>
Int8 converted(Source value, float scale, const Int8*) {
  if (!(scale > 0.0f && scale <= 3.4028234663852886e38f)) return {0};
  const float nearest = widened(value) / scale + 12582912.0f - 12582912.0f;
  // More than 127 where the scale is so small that it was rounded much.
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
  return work.rows * fissile::padded_inner(work.weight.dtype, work.weight.inner);
}

int64_t linear_pack_tasks(const fissile::Linear& work) { return parts(work.rows, ROWS); }

void linear_pack(const fissile::Linear& work, int64_t task) {
  if (work.dtype == fissile::FLOAT32) pack_rows<float>(work, task);
  else pack_rows<Bf16>(work, task);
}

int64_t linear_tasks(const fissile::Linear& work) {
  return parts(parts(work.weight.columns, PANEL), TASK_PANELS) * parts(parts(work.rows, ROWS), TASK_TILES);
}

void linear(const fissile::Linear& work, int64_t task) {
  if (work.weight.dtype == fissile::FLOAT32) run<float>(work, task);
  else if (work.weight.dtype == fissile::BFLOAT16) run<Bf16>(work, task);
  else run<Int8>(work, task);
}

}  // namespace FISSILE_ISA
