// Matrix products of bfloat16 by AVX512-BF16. As in linear.cpp, each number of y is a sum over k in blocks of K_BLOCK,
// in order, and each block is summed from zero. VDPBF16PS adds two values of k at a time, in order. A block of int8
// weights is converted to bfloat16, which is exact, and its sum is multiplied by the scale of its column. Products of
// float32 use the base table's kernels.
//
// x is copied to tiles [pairs of k][rows of the tile]. An odd last k is paired with a zero.
#include "bf16_rows.hpp"
#include "own_linear.hpp"
#include "pair_rows.hpp"
#include "pairs.hpp"
#include "row_tiles.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::Linear;
using fissile::PANEL;

static_assert(WIDTH == PANEL);

using fissile::K_BLOCK;

// Pairs of k per block.
constexpr int64_t PAIRS = K_BLOCK / 2;
// Most rows of a tile.
constexpr int64_t ROWS = 12;
// Most rows of a tile that converts int8 to bfloat16 in registers, beside its sums.
constexpr int64_t ROWS_IN_REGISTERS = 8;
// Most panels and most tiles of a task.
constexpr int64_t MOST_PANELS = 4;
constexpr int64_t TASK_TILES = 6;

// A block of some panels, `panel_stride` bytes from panel to panel. `scales` is null, or the first panel's scales, with
// `scales_stride` bytes from panel to panel.
struct Block {
  const char* numbers;
  int64_t panel_stride;
  const char* scales;
  int64_t scales_stride;
};

// Memory to prefetch, in each panel: `step` bytes per pair of k, from `at` on.
struct Ahead {
  const char* at;
  int64_t panel_stride;
  int64_t step;
};

FISSILE_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 3); }

// Converts one vector of a block to PAIRS vectors of pairs of bfloat16. Registers hold the sums of MOST_PANELS panels
// for at most ROWS_BY_MOST_PANELS rows.
struct AsPairs {
  static constexpr int PAIRS = 1;
  static constexpr int64_t ROWS_BY_MOST_PANELS = 6;
  __attribute__((always_inline)) void operator()(Words words, Words* pairs) const { pairs[0] = words; }
};

struct AsInt8 : Widening {
  static constexpr int PAIRS = 2;
  static constexpr int64_t ROWS_BY_MOST_PANELS = 4;
};

// totals[row][column] += the sums over `pairs` pairs of k, for ROW_COUNT rows and PANELS panels. `width` is the row
// stride of `totals`.
template <int ROW_COUNT, int PANELS, class Numbers>
__attribute__((noinline)) void multiply(
    const uint32_t* x, const Block& block, int64_t pairs, Ahead ahead, float* totals, int64_t width) {
  const Numbers numbers;
  Floats sums[ROW_COUNT][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROW_COUNT; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) sums[r][p] = zeros();
  const char* at = block.numbers;
  for (int64_t k = 0; k < pairs; k += Numbers::PAIRS) {
    Words columns[PANELS][Numbers::PAIRS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      fetch(ahead.at + p * ahead.panel_stride);
      numbers(load_words(at + p * block.panel_stride), columns[p]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < Numbers::PAIRS; i++)
#pragma GCC unroll 16
      for (int r = 0; r < ROW_COUNT; r++) {
        const Words factors = splat_word(x[i * ROW_COUNT + r]);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) sums[r][p] = add_pairs(sums[r][p], factors, columns[p][i]);
      }
    at += sizeof(Words);
    x += Numbers::PAIRS * ROW_COUNT;
    ahead.at += ahead.step * Numbers::PAIRS;
  }
  // An int8 block is one line longer than the loop prefetches, because its scales precede its numbers.
  if (Numbers::PAIRS > 1)
    for (int p = 0; p < PANELS; p++) fetch(ahead.at + p * ahead.panel_stride);
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; p++) {
    const Floats scale =
        block.scales ? load(reinterpret_cast<const float*>(block.scales + p * block.scales_stride)) : splat(1.0f);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_COUNT; r++) {
      float* to = totals + r * width + p * PANEL;
      store(to, fma(sums[r][p], scale, load(to)));
    }
  }
}

// True if each tile converts int8 to bfloat16 again, in registers. That is best for one tile, and for two tiles if the
// rows do not fit into one tile of ROWS. For 9 to 12 rows it is better to convert a block once, in memory, for one
// tile; for more than two tiles, once for all of them.
bool in_registers(const Linear& work) {
  const int64_t most = work.rows <= ROWS ? ROWS_IN_REGISTERS : 2 * ROWS_IN_REGISTERS;
  return work.weight.dtype == fissile::INT8 && work.rows <= most;
}

int64_t rows_of_tiles(const Linear& work) { return in_registers(work) ? ROWS_IN_REGISTERS : ROWS; }

// Number of int8 rows from which on multiplying a step takes at least as long as loading its weights.
constexpr int64_t SLOW_ROWS = 4;

// Panels of a task: as many as have their sums in registers. With many rows, tasks are smaller, so that threads end at
// about the same time.
int64_t task_panels(const Linear& work) {
  const int64_t rows = in_registers(work) ? AsInt8::ROWS_BY_MOST_PANELS : AsPairs::ROWS_BY_MOST_PANELS;
  return work.rows <= rows ? MOST_PANELS : 2;
}

template <class Numbers, int ROW_COUNT>
void multiply_rows(const uint32_t* x, const Block& block, int64_t panels, int64_t pairs, Ahead ahead, float* totals,
                   int64_t width) {
  if (panels == 1) return multiply<ROW_COUNT, 1, Numbers>(x, block, pairs, ahead, totals, width);
  if constexpr (ROW_COUNT <= Numbers::ROWS_BY_MOST_PANELS)
    if (panels == MOST_PANELS) return multiply<ROW_COUNT, MOST_PANELS, Numbers>(x, block, pairs, ahead, totals, width);
  if constexpr (ROW_COUNT >= ROWS_IN_REGISTERS / 2)
    multiply<ROW_COUNT, 2, Numbers>(x, block, pairs, ahead, totals, width);
}

void multiply_int8(int64_t rows, const uint32_t* x, const Block& block, int64_t panels, int64_t pairs, Ahead ahead,
                   float* totals, int64_t width) {
  switch (rows) {
    case 1: return multiply_rows<AsInt8, 1>(x, block, panels, pairs, ahead, totals, width);
    case 2: return multiply_rows<AsInt8, 2>(x, block, panels, pairs, ahead, totals, width);
    case 3: return multiply_rows<AsInt8, 3>(x, block, panels, pairs, ahead, totals, width);
    case 4: return multiply_rows<AsInt8, 4>(x, block, panels, pairs, ahead, totals, width);
    case 5: return multiply_rows<AsInt8, 5>(x, block, panels, pairs, ahead, totals, width);
    case 6: return multiply_rows<AsInt8, 6>(x, block, panels, pairs, ahead, totals, width);
    case 7: return multiply_rows<AsInt8, 7>(x, block, panels, pairs, ahead, totals, width);
    default: return multiply_rows<AsInt8, 8>(x, block, panels, pairs, ahead, totals, width);
  }
}

// Multiplies a tile of `rows` rows by one panel or by all panels of a task.
void multiply_tile(int64_t rows, const uint32_t* x, const Block& block, int64_t panels, int64_t pairs, Ahead ahead,
                   float* totals, int64_t width) {
  switch (rows) {
    case 1: return multiply_rows<AsPairs, 1>(x, block, panels, pairs, ahead, totals, width);
    case 2: return multiply_rows<AsPairs, 2>(x, block, panels, pairs, ahead, totals, width);
    case 3: return multiply_rows<AsPairs, 3>(x, block, panels, pairs, ahead, totals, width);
    case 4: return multiply_rows<AsPairs, 4>(x, block, panels, pairs, ahead, totals, width);
    case 5: return multiply_rows<AsPairs, 5>(x, block, panels, pairs, ahead, totals, width);
    case 6: return multiply_rows<AsPairs, 6>(x, block, panels, pairs, ahead, totals, width);
    case 7: return multiply_rows<AsPairs, 7>(x, block, panels, pairs, ahead, totals, width);
    case 8: return multiply_rows<AsPairs, 8>(x, block, panels, pairs, ahead, totals, width);
    case 9: return multiply_rows<AsPairs, 9>(x, block, panels, pairs, ahead, totals, width);
    case 10: return multiply_rows<AsPairs, 10>(x, block, panels, pairs, ahead, totals, width);
    case 11: return multiply_rows<AsPairs, 11>(x, block, panels, pairs, ahead, totals, width);
    default: return multiply_rows<AsPairs, 12>(x, block, panels, pairs, ahead, totals, width);
  }
}

int64_t pairs_of(const Linear& work) { return parts(work.weight.inner, 2); }

int64_t scratch(const Linear& work) { return work.rows * pairs_of(work); }

RowTile tile_of(const Linear& work, int64_t tile) { return row_tile(work.rows, rows_of_tiles(work), tile); }

int64_t all_tiles(const Linear& work) { return parts(work.rows, rows_of_tiles(work)); }

int64_t pack_tasks(const Linear& work) { return all_tiles(work); }

// Copies tile `task` of x.
void pack_x(const Linear& work, int64_t task) {
  const RowTile tile = tile_of(work, task);
  pack_pairs(work, tile, reinterpret_cast<uint32_t*>(work.packed_x) + tile.first * pairs_of(work), pairs_of(work));
}

// A task: its panels, its tiles, and memory for its sums.
struct Task {
  const Linear& work;
  int64_t pairs;
  int64_t panel_stride;
  const char* weights;
  const RowTile* tiles;
  int64_t tile_count;
  int64_t rows;
  // [rows][width]
  float* totals;
  int64_t width;

  const char* at(int64_t panel, int64_t pair) const {
    return weights + panel * panel_stride + fissile::block_offset(work.weight.dtype, 2 * pair);
  }

  // The packed panels from `first` on, from `pair` to the end of its block.
  Block block(int64_t first, int64_t pair) const {
    const char* begin = at(first, pair);
    if (work.weight.dtype == fissile::BFLOAT16) return {begin, panel_stride, nullptr, 0};
    return {begin + fissile::BLOCK_SCALES, panel_stride, begin, panel_stride};
  }

  // Converts `count` panels of int8 to bfloat16 in `wide`.
  Block widened(const Block& packed, int64_t count, int64_t pair, Bf16* wide) const {
    const int64_t depth = at_most(K_BLOCK, fissile::padded_inner(fissile::INT8, work.weight.inner) - 2 * pair);
    for (int64_t p = 0; p < count; p++)
      widen_numbers(packed.numbers + p * packed.panel_stride, depth, wide + p * K_BLOCK * PANEL);
    return {reinterpret_cast<const char*>(wide), K_BLOCK * PANEL * 2, packed.scales, packed.scales_stride};
  }

  // True if the block after the next is prefetched instead of the next one. One tile of SLOW_ROWS or more int8 rows is
  // slow enough for this, and then need not wait if a line arrives late. With fewer rows or with bfloat16 blocks, more
  // lines would be outstanding than the processor has buffers for.
  bool asks_early() const { return work.weight.dtype == fissile::INT8 && tile_count == 1 && rows >= SLOW_ROWS; }

  const char* after(int64_t first, int64_t pair) const {
    const int64_t all = parts(pairs, PAIRS) * PAIRS, next = pair + (asks_early() ? 2 : 1) * PAIRS;
    if (next < all) return at(first, next);
    return at(first + task_panels(work), next - all);
  }

  // Multiplies all tiles by `count` panels from `first` on.
  template <auto MULTIPLY>
  void multiply_tiles(const Block& numbers, int64_t first, int64_t count, int64_t pair) const {
    // Prefetches every line: waiting for a single one costs as much as a tile.
    const int64_t bytes = fissile::block_offset(work.weight.dtype, K_BLOCK);
    const char* const next = after(first, pair);
    for (int64_t t = 0; t < tile_count; t++) {
      const Ahead ahead{next + bytes * t / tile_count, panel_stride, bytes / PAIRS / tile_count};
      const RowTile tile = tiles[t];
      const uint32_t* x = reinterpret_cast<const uint32_t*>(work.packed_x) + tile.first * pairs + pair * tile.rows;
      MULTIPLY(tile.rows, x, numbers, count, at_most(PAIRS, pairs - pair), ahead,
               totals + (tile.first - tiles->first) * width + first * PANEL, width);
    }
  }

  void multiply_block(int64_t first, int64_t count, int64_t pair) const {
    const Block packed = block(first, pair);
    if (work.weight.dtype == fissile::BFLOAT16) return multiply_tiles<multiply_tile>(packed, first, count, pair);
    // If the number of pairs is odd, x has no pair for the second half of the last int8 group.
    if (in_registers(work) && at_most(PAIRS, pairs - pair) % 2 == 0)
      return multiply_tiles<multiply_int8>(packed, first, count, pair);
    alignas(64) Bf16 wide[MOST_PANELS * K_BLOCK * PANEL];
    multiply_tiles<multiply_tile>(widened(packed, count, pair, wide), first, count, pair);
  }
};

int64_t tasks(const Linear& work) {
  return parts(parts(work.weight.columns, PANEL), task_panels(work)) * parts(all_tiles(work), TASK_TILES);
}

void run(const Linear& work, int64_t task) {
  // Consecutive tasks share panels.
  const int64_t groups = parts(all_tiles(work), TASK_TILES), most = task_panels(work);
  const int64_t first_panel = task / groups * most, first_tile = task % groups * TASK_TILES;
  const int64_t panels = at_most(most, parts(work.weight.columns, PANEL) - first_panel);
  const int64_t tile_count = at_most(TASK_TILES, all_tiles(work) - first_tile);
  RowTile tiles[TASK_TILES];
  for (int64_t t = 0; t < tile_count; t++) tiles[t] = tile_of(work, first_tile + t);
  const int64_t first_row = tiles->first, width = most * PANEL;
  // NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): every task has a tile.
  const int64_t rows = tiles[tile_count - 1].first + tiles[tile_count - 1].rows - first_row;
  const int64_t stride = fissile::panel_bytes(work.weight.dtype, work.weight.inner);
  alignas(64) float totals[TASK_TILES * ROWS * 2 * PANEL];
  static_assert(TASK_TILES * ROWS * 2 >= AsPairs::ROWS_BY_MOST_PANELS * MOST_PANELS);
  __builtin_memset(totals, 0, rows * width * sizeof(float));
  const Task mine{work, pairs_of(work), stride, static_cast<const char*>(work.weight.panels) + first_panel * stride,
                  tiles, tile_count, rows, totals, width};
  const int64_t at_once = panels == most ? most : 1;
  for (int64_t pair = 0; pair < mine.pairs; pair += PAIRS)
    for (int64_t p = 0; p < panels; p += at_once) mine.multiply_block(p, at_once, pair);
  Bf16* y = static_cast<Bf16*>(work.y) + first_row * work.y_stride + first_panel * PANEL;
  for (int64_t r = 0; r < rows; r++, y += work.y_stride)
    for (int64_t p = 0; p < panels; p++)
      write_row(work, totals + r * width + p * PANEL, (first_panel + p) * PANEL, y + p * PANEL);
}

}  // namespace

void use_own_linear(fissile::Kernels& table) { use<scratch, pack_tasks, pack_x, tasks, run>(table); }

}  // namespace FISSILE_ISA
