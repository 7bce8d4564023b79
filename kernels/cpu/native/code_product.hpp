// Products with weights in codes (CodeLayout in kernels.hpp), batch-invariant. Each number of y is a sum over groups of
// k, in order: the sum of x * (code - middle) over the group, from zero, times the scale of the group. A group's offset
// is multiplied by the sum of its numbers of x, which is computed once for each row. The number of rows, their places
// and the threads do not matter.
//
// Few rows decode codes in registers; a task with more rows decodes each block once, in memory, for all its tiles. The
// decoded numbers are exact and are added in the same order.
//
// `Math` is the arithmetic of an instruction set:
//   Factor, STEP      a number of the packed x, and how many values of k it holds
//   Column            a vector of decoded numbers for one Factor
//   ROWS              most rows of a tile
//   FEW_ROWS          most rows that decode in registers
//   panels(rows)      panels that a tile of `rows` rows multiplies at once, if it decodes in registers
//   add()             a sum plus the products of a Factor and a Column
//   Decoder<BITS>     load() of a vector of packed numbers, of which `UPPER` bytes for each column are apart, and its
//                     `COUNT` columns by column()
//   pack_rows()       copies rows of x to [Factors][rows]
#pragma once

#include "kernels.hpp"
#include "row_tiles.hpp"
#include "vec.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::CodeLayout;
using fissile::K_BLOCK;
using fissile::Linear;
using fissile::PANEL;

// Vectors of a panel, and the bytes of one number for each column.
constexpr int PANEL_VECTORS = PANEL / WIDTH;
constexpr int64_t PANEL_WORDS = PANEL * 4;

FISSILE_INLINE Floats load_halves(const char* from) {
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  __m256i halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return (Floats)_mm512_cvtph_ps(halves);
#else
  return load(reinterpret_cast<const Half*>(from));
#endif
}

FISSILE_INLINE Floats load_int8(const char* from) {
  return __builtin_convertvector((Ints)(load_bytes(from) << 24) >> 24, Floats);
}

// Scales of a group, of WIDTH columns of a panel from `column` on. Products of codes and factors are exact.
FISSILE_INLINE Floats scale_of(const CodeLayout& layout, const char* block, int64_t group, int64_t column) {
  const int64_t number = group * PANEL + column;
  if (layout.scales == fissile::FLOAT32) return load(reinterpret_cast<const float*>(block) + number);
  if (layout.scales == fissile::BFLOAT16) return load(reinterpret_cast<const Bf16*>(block) + number);
  if (layout.scales == fissile::FLOAT16) return load_halves(block + 2 * number);
  return load_int8(block + number) * load_halves(block + layout.factors_at() + 2 * column);
}

// Offsets of a group, likewise; `scale` is what scale_of() gives. Rounded once.
FISSILE_INLINE Floats offset_of(const CodeLayout& layout, const char* block, int64_t group, int64_t column,
                                Floats scale) {
  const char* const offsets = block + layout.offsets_at();
  const int64_t number = group * PANEL + column;
  if (!layout.has_factors()) return load(reinterpret_cast<const float*>(offsets) + number);
  const Floats factor = load_halves(block + layout.factors_at() + 2 * (PANEL + column));
  return splat(static_cast<float>(layout.middle())) * scale - load_int8(offsets + number) * factor;
}

// A block of adjacent panels: its numbers and its scales, with the bytes from panel to panel.
struct CodeBlock {
  const char* numbers;
  int64_t numbers_stride;
  const char* scales;
  int64_t scales_stride;
};

// Numbers of x for one block: Factors [K_BLOCK / STEP][rows] and, if groups have offsets, their sums [groups][rows].
template <class Factor>
struct BlockRows {
  const Factor* factors;
  const float* sums;
};

// Calls `f` for each row, panel and vector of a panel, unrolled.
template <int ROW_COUNT, int PANELS, class F>
FISSILE_INLINE void each_vector(const F& f) {
#pragma GCC unroll 16
  for (int r = 0; r < ROW_COUNT; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int v = 0; v < PANEL_VECTORS; v++) f(r, p, v);
}

// totals[row][column] += x times a block, for ROW_COUNT rows and PANELS panels. If it decodes numbers, it prefetches a
// block from `next` on for each panel.
template <class Math, class Source, int ROW_COUNT, int PANELS>
__attribute__((noinline)) void multiply_codes(const CodeLayout& layout, BlockRows<typename Math::Factor> x,
                                              const CodeBlock& block, const char* next, float* totals, int64_t width) {
  constexpr bool PREFETCHES = Source::COUNT > 1;
  // Totals stay in registers beside the sums of a group if both fit, with numbers and decoded numbers.
  constexpr bool KEEPS_TOTALS = (2 * ROW_COUNT + 2) * PANELS * PANEL_VECTORS <= 28;
  const Source source;
  const char* numbers = block.numbers;
  const char* upper = numbers + fissile::UPPER_BITS;
  float* const first_total = totals;
  Floats kept[ROW_COUNT][PANELS][PANEL_VECTORS];
  if constexpr (KEEPS_TOTALS)
    each_vector<ROW_COUNT, PANELS>([&](int r, int p, int v) __attribute__((always_inline)) {
      kept[r][p][v] = load(first_total + r * width + p * PANEL + v * WIDTH);
    });
  for (int64_t group = 0, count = layout.groups(); group < count; group++) {
    Floats sums[ROW_COUNT][PANELS][PANEL_VECTORS];
    each_vector<ROW_COUNT, PANELS>(
        [&](int r, int p, int v) __attribute__((always_inline)) { sums[r][p][v] = zeros(); });
    for (int64_t k = 0; k < layout.group; k += Source::COUNT * Math::STEP) {
      typename Source::Loaded loaded[PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        if (PREFETCHES) __builtin_prefetch(next + p * block.numbers_stride, 0, 3);
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++)
          loaded[p][v] = source.load(load_words(numbers + p * block.numbers_stride + v * sizeof(Words)),
                                     upper + p * block.numbers_stride + v * WIDTH * Source::UPPER);
      }
#pragma GCC unroll 8
      for (int i = 0; i < Source::COUNT; i++) {
        typename Math::Column columns[PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
          for (int v = 0; v < PANEL_VECTORS; v++) columns[p][v] = source.column(loaded[p][v], i);
#pragma GCC unroll 16
        for (int r = 0; r < ROW_COUNT; r++) {
          const typename Math::Column factor = Math::spread(x.factors[i * ROW_COUNT + r]);
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECTORS; v++) sums[r][p][v] = Math::add(sums[r][p][v], factor, columns[p][v]);
        }
      }
      numbers += PANEL_WORDS;
      upper += PANEL * Source::UPPER;
      x.factors += Source::COUNT * ROW_COUNT;
      if (PREFETCHES) next += PANEL_WORDS;
    }
    Floats scales[PANELS][PANEL_VECTORS], offsets[PANELS][PANEL_VECTORS];
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < PANEL_VECTORS; v++) {
        const char* const of_panel = block.scales + p * block.scales_stride;
        scales[p][v] = scale_of(layout, of_panel, group, v * WIDTH);
        if (x.sums) offsets[p][v] = offset_of(layout, of_panel, group, v * WIDTH, scales[p][v]);
      }
    each_vector<ROW_COUNT, PANELS>([&](int r, int p, int v) __attribute__((always_inline)) {
      float* const at = first_total + r * width + p * PANEL + v * WIDTH;
      if constexpr (KEEPS_TOTALS) kept[r][p][v] = fma(sums[r][p][v], scales[p][v], kept[r][p][v]);
      else store(at, fma(sums[r][p][v], scales[p][v], load(at)));
    });
    if (x.sums)
      each_vector<ROW_COUNT, PANELS>([&](int r, int p, int v) __attribute__((always_inline)) {
        float* const at = first_total + r * width + p * PANEL + v * WIDTH;
        const Floats sum = splat(x.sums[group * ROW_COUNT + r]);
        if constexpr (KEEPS_TOTALS) kept[r][p][v] = fma(sum, offsets[p][v], kept[r][p][v]);
        else store(at, fma(sum, offsets[p][v], load(at)));
      });
  }
  if constexpr (KEEPS_TOTALS)
    each_vector<ROW_COUNT, PANELS>([&](int r, int p, int v) __attribute__((always_inline)) {
      store(first_total + r * width + p * PANEL + v * WIDTH, kept[r][p][v]);
    });
  // What the loop above did not prefetch.
  if (PREFETCHES)
    for (int64_t line = K_BLOCK / (Source::COUNT * Math::STEP) * PANEL_WORDS; line < layout.block_bytes();
         line += PANEL_WORDS, next += PANEL_WORDS)
      for (int p = 0; p < PANELS; p++) __builtin_prefetch(next + p * block.numbers_stride, 0, 3);
}

// Decoded numbers in memory.
template <class Math>
struct Decoded {
  static constexpr int COUNT = 1, UPPER = 0;
  using Loaded = typename Math::Column;
  FISSILE_INLINE Loaded load(Words words, const char*) { return (Loaded)words; }
  FISSILE_INLINE Loaded column(Loaded loaded, int) { return loaded; }
};

// Panels that tiles of decoded numbers multiply at once.
template <class Math>
constexpr int DECODED_PANELS = Math::panels(Math::ROWS);

template <class Math, class Source, int ROW_COUNT>
void multiply_panels(int64_t panels, const CodeLayout& layout, BlockRows<typename Math::Factor> x,
                     const CodeBlock& block, const char* next, float* totals, int64_t width) {
  constexpr int MOST = Source::COUNT > 1 ? Math::panels(ROW_COUNT) : DECODED_PANELS<Math>;
  if (panels == 1) multiply_codes<Math, Source, ROW_COUNT, 1>(layout, x, block, next, totals, width);
  else multiply_codes<Math, Source, ROW_COUNT, MOST>(layout, x, block, next, totals, width);
}

// Calls multiply_panels for `rows` rows, FIRST to LAST.
template <class Math, class Source, int FIRST, int LAST>
void multiply_tile(int64_t rows, int64_t panels, const CodeLayout& layout, BlockRows<typename Math::Factor> x,
                   const CodeBlock& block, const char* next, float* totals, int64_t width) {
  if constexpr (FIRST < LAST)
    if (rows > FIRST)
      return multiply_tile<Math, Source, FIRST + 1, LAST>(rows, panels, layout, x, block, next, totals, width);
  multiply_panels<Math, Source, FIRST>(panels, layout, x, block, next, totals, width);
}

// Decodes a panel's block to Columns [K_BLOCK / STEP][PANEL_VECTORS] and scales float32. Prefetches a block from `next`
// on.
template <class Math, class Source>
void decode_block(const CodeLayout& layout, const char* packed, const char* next, char* to, float* scales) {
  const Source source;
  const char* numbers = packed + layout.numbers_at();
  const char* upper = numbers + fissile::UPPER_BITS;
  for (int64_t group = 0, count = layout.groups(); group < count; group++)
    for (int v = 0; v < PANEL_VECTORS; v++) {
      const Floats scale = scale_of(layout, packed, group, v * WIDTH);
      store(scales + group * PANEL + v * WIDTH, scale);
      if (layout.has_offsets)
        store(scales + (count + group) * PANEL + v * WIDTH, offset_of(layout, packed, group, v * WIDTH, scale));
    }
  const char* const end = next + layout.block_bytes();
  for (int64_t k = 0; k < K_BLOCK; k += Source::COUNT * Math::STEP, numbers += PANEL_WORDS, next += PANEL_WORDS) {
    __builtin_prefetch(next, 0, 3);
    typename Source::Loaded loaded[PANEL_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; v++)
      loaded[v] = source.load(load_words(numbers + v * sizeof(Words)), upper + v * WIDTH * Source::UPPER);
    upper += PANEL * Source::UPPER;
#pragma GCC unroll 8
    for (int i = 0; i < Source::COUNT; i++, to += PANEL_WORDS)
#pragma GCC unroll 2
      for (int v = 0; v < PANEL_VECTORS; v++) {
        const typename Math::Column column = source.column(loaded[v], i);
        __builtin_memcpy(to + v * sizeof column, &column, sizeof column);
      }
  }
  for (; next < end; next += PANEL_WORDS) __builtin_prefetch(next, 0, 3);
}

// Products of one arithmetic, as the entries of the kernel table.
template <class Math>
class CodeProduct {
  using Factor = typename Math::Factor;
  static constexpr int64_t TASK_TILES = 72 / Math::ROWS;
  // Columns of a task: fewer with many rows, so that threads end at about the same time.
  static constexpr int64_t FEW_ROWS_PANELS = 4, PANELS = 2;
  static constexpr int64_t FACTORS = K_BLOCK / Math::STEP;
  // Scales and offsets of a panel's block, at most.
  static constexpr int64_t SCALES = 2 * K_BLOCK / 16 * PANEL;
  // A single block ahead arrives too late: one takes a fifth of a microsecond.
  static constexpr int64_t BLOCKS_AHEAD = 2;
  // Rows of the smallest tile that reads decoded numbers.
  static constexpr int SMALLEST = (Math::ROWS + 1) / 2 < Math::FEW_ROWS ? (Math::ROWS + 1) / 2 : Math::FEW_ROWS + 1;

 public:
  static int64_t scratch(const Linear& work) {
    return work.rows * (blocks(work) * FACTORS + (CodeLayout(work.weight.dtype).has_offsets ? groups(work) : 0));
  }

  static int64_t pack_tasks(const Linear& work) { return parts(work.rows, Math::ROWS); }

  // Copies tile `task` of x, padded with zeros to whole blocks, and sums its groups.
  static void pack(const Linear& work, int64_t task) {
    const RowTile tile = tile_of(work, task);
    Math::pack_rows(work, tile, factors(work, tile), blocks(work) * FACTORS);
    if (!CodeLayout(work.weight.dtype).has_offsets) return;
    for (int64_t r = 0; r < tile.rows; r++)
      if (work.dtype == fissile::FLOAT32) sum_groups<float>(work, tile, r);
      else sum_groups<Bf16>(work, tile, r);
  }

  static int64_t tasks(const Linear& work) {
    return parts(parts(work.weight.columns, PANEL), task_panels(work)) * parts(all_tiles(work), TASK_TILES);
  }

  static void run(const Linear& work, int64_t task) {
    const int64_t first_tile = task % parts(all_tiles(work), TASK_TILES) * TASK_TILES;
    const int64_t width = task_panels(work) * PANEL;
    const int64_t tile_count = at_most(TASK_TILES, all_tiles(work) - first_tile);
    const RowTile last = tile_of(work, first_tile + tile_count - 1);
    const int64_t first_row = tile_of(work, first_tile).first, rows = last.first + last.rows - first_row;
    alignas(64) float totals[TASK_TILES * Math::ROWS * PANELS * PANEL];
    static_assert(TASK_TILES * Math::ROWS * PANELS >= Math::FEW_ROWS * FEW_ROWS_PANELS);
    __builtin_memset(totals, 0, rows * width * sizeof(float));
    const int64_t first_panel = task / parts(all_tiles(work), TASK_TILES) * task_panels(work);
    const int64_t panels = at_most(task_panels(work), parts(work.weight.columns, PANEL) - first_panel);
    CodeProduct(work, first_panel, first_tile, tile_count, totals, width).multiply(panels);
    if (work.dtype == fissile::FLOAT32) write<float>(work, totals, width, first_row, rows, first_panel, panels);
    else write<Bf16>(work, totals, width, first_row, rows, first_panel, panels);
  }

 private:
  CodeProduct(const Linear& work, int64_t first_panel, int64_t first_tile, int64_t tile_count, float* totals,
              int64_t width)
      : work_(work),
        layout_(work.weight.dtype),
        panel_stride_(fissile::panel_bytes(work.weight.dtype, work.weight.inner)),
        weights_(static_cast<const char*>(work.weight.panels) + first_panel * panel_stride_),
        first_tile_(first_tile),
        tile_count_(tile_count),
        totals_(totals),
        width_(width) {}

  static int64_t blocks(const Linear& work) { return parts(work.weight.inner, K_BLOCK); }
  static int64_t groups(const Linear& work) { return blocks(work) * CodeLayout(work.weight.dtype).groups(); }
  static int64_t all_tiles(const Linear& work) { return parts(work.rows, Math::ROWS); }
  static RowTile tile_of(const Linear& work, int64_t tile) { return row_tile(work.rows, Math::ROWS, tile); }
  static bool in_registers(const Linear& work) { return work.rows <= Math::FEW_ROWS; }

  static int64_t task_panels(const Linear& work) {
    return in_registers(work) && Math::panels(work.rows) == FEW_ROWS_PANELS ? FEW_ROWS_PANELS : PANELS;
  }

  static Factor* factors(const Linear& work, const RowTile& tile) {
    return reinterpret_cast<Factor*>(work.packed_x) + tile.first * blocks(work) * FACTORS;
  }

  static float* sums(const Linear& work, const RowTile& tile) {
    return work.packed_x + work.rows * blocks(work) * FACTORS + tile.first * groups(work);
  }

  template <class Number>
  static void sum_groups(const Linear& work, const RowTile& tile, int64_t r) {
    const Number* const from = static_cast<const Number*>(work.x) + (tile.first + r) * work.x_stride;
    const int64_t inner = work.weight.inner, group = CodeLayout(work.weight.dtype).group;
    float* const to = sums(work, tile);
    for (int64_t g = 0; g < groups(work); g++) {
      Floats total = zeros();
      for (int64_t k = g * group; k < at_most(inner, (g + 1) * group); k += WIDTH) {
        const int64_t left = at_most(WIDTH, inner - k);
        if (work.weight.order) {
          float gathered[WIDTH] = {};
          for (int64_t i = 0; i < left; i++) gathered[i] = widened(from[work.weight.order[k + i]]);
          total += ::FISSILE_ISA::load(gathered);
        } else {
          total += load_up_to(from + k, left);
        }
      }
      to[g * tile.rows + r] = sum(total);
    }
  }

  template <class Number>
  static void write(const Linear& work, const float* totals, int64_t width, int64_t first_row, int64_t rows,
                    int64_t first_panel, int64_t panels) {
    Number* y = static_cast<Number*>(work.y) + first_row * work.y_stride + first_panel * PANEL;
    for (int64_t r = 0; r < rows; r++, y += work.y_stride)
      for (int64_t p = 0; p < panels; p++)
        write_row(work, totals + r * width + p * PANEL, (first_panel + p) * PANEL, y + p * PANEL);
  }

  void multiply(int64_t panels) const {
    const int64_t most = in_registers(work_) ? Math::panels(work_.rows) : DECODED_PANELS<Math>;
    for (int64_t block = 0; block < blocks(work_); block++)
      for (int64_t p = 0, count; p < panels; p += count) {
        count = panels - p >= most ? most : 1;
        if (layout_.bits == 4) multiply_block<typename Math::template Decoder<4>>(block, p, count);
        else if (layout_.bits == 5) multiply_block<typename Math::template Decoder<5>>(block, p, count);
        else if (layout_.bits == 6) multiply_block<typename Math::template Decoder<6>>(block, p, count);
        else multiply_block<typename Math::template Decoder<8>>(block, p, count);
      }
  }

  const char* at(int64_t panel, int64_t block) const {
    return weights_ + panel * panel_stride_ + block * layout_.block_bytes();
  }

  // A block to prefetch, some blocks ahead in this task's panels or in the next one's.
  const char* after(int64_t panel, int64_t block) const {
    const int64_t next = block + BLOCKS_AHEAD, all = blocks(work_);
    return next < all ? at(panel, next) : at(panel + task_panels(work_), next - all);
  }

  BlockRows<Factor> rows_of(const RowTile& tile, int64_t block) const {
    const float* const of_tile = layout_.has_offsets ? sums(work_, tile) : nullptr;
    return {factors(work_, tile) + block * FACTORS * tile.rows,
            of_tile ? of_tile + block * layout_.groups() * tile.rows : nullptr};
  }

  template <class Source>
  void multiply_block(int64_t block, int64_t panel, int64_t count) const {
    const char* const packed = at(panel, block);
    float* const to = totals_ + panel * PANEL;
    if (in_registers(work_)) {
      const RowTile tile = tile_of(work_, 0);
      return multiply_tile<Math, Source, 1, Math::FEW_ROWS>(
          tile.rows, count, layout_, rows_of(tile, block),
          {packed + layout_.numbers_at(), panel_stride_, packed, panel_stride_}, after(panel, block), to, width_);
    }
    alignas(64) char decoded[PANELS * FACTORS * PANEL_WORDS];
    alignas(64) float scales[PANELS * SCALES];
    for (int64_t p = 0; p < count; p++)
      decode_block<Math, Source>(layout_, at(panel + p, block), after(panel + p, block),
                                 decoded + p * FACTORS * PANEL_WORDS, scales + p * SCALES);
    const CodeBlock numbers{decoded, FACTORS * PANEL_WORDS, reinterpret_cast<const char*>(scales),
                            SCALES * static_cast<int64_t>(sizeof(float))};
    CodeLayout layout = layout_;
    layout.scales = fissile::FLOAT32;
    const int64_t first_row = tile_of(work_, first_tile_).first;
    for (int64_t t = first_tile_; t < first_tile_ + tile_count_; t++) {
      const RowTile tile = tile_of(work_, t);
      multiply_tile<Math, Decoded<Math>, SMALLEST, Math::ROWS>(tile.rows, count, layout, rows_of(tile, block), numbers,
                                                               nullptr, to + (tile.first - first_row) * width_, width_);
    }
  }

  const Linear& work_;
  const CodeLayout layout_;
  const int64_t panel_stride_;
  const char* const weights_;
  const int64_t first_tile_;
  const int64_t tile_count_;
  float* const totals_;
  const int64_t width_;
};

}  // namespace
}  // namespace FISSILE_ISA
