// Matrix products of so few rows that AMX tiles would be mostly empty. They use fma in the order in which TDPBF16PS
// adds. Vectors load sooner than tiles, and sums of int8 weights need not be stored for each block. Of each 32 values
// of k, one chain sums the even ones from zero and another the odd ones. The sum of both chains is added to the block's
// sum. Denormals count as zeros. So the bits are those of tiles.
//
// x is widened to float32, in rows of padded_inner() numbers.
#pragma once

#include "bf16_rows.hpp"
#include "each.hpp"
#include "kernels.hpp"
#include "vec.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {

// While an object of this class lives, the thread treats denormals as zeros, as AMX tiles do.
class DenormalsAreZeros {
 public:
  DenormalsAreZeros() { _mm_setcsr(before_ | FLUSH | ZEROS); }
  ~DenormalsAreZeros() { _mm_setcsr(before_); }
  DenormalsAreZeros(const DenormalsAreZeros&) = delete;
  DenormalsAreZeros& operator=(const DenormalsAreZeros&) = delete;

 private:
  static constexpr unsigned FLUSH = 0x8000, ZEROS = 0x0040;
  const unsigned before_ = _mm_getcsr();
};

// Most rows with int8 weights and with bfloat16 weights, values of k per step, most panels of a task, and bytes of each
// panel between a prefetch and its use.
constexpr int64_t FEW_ROWS = 6;
constexpr int64_t FEW_ROWS_OF_BF16 = 2;
constexpr int64_t FEW_STEP = 32;
constexpr int64_t FEW_PANELS = 8;
constexpr int64_t FEW_AHEAD = 2048;

FISSILE_INLINE bool has_few_rows(const fissile::Linear& work) {
  return work.rows <= (work.weight.dtype == fissile::INT8 ? FEW_ROWS : FEW_ROWS_OF_BF16);
}

// The G-th int8 of each group.
template <int G>
FISSILE_INLINE Ints int8_of(Words groups) {
#ifdef __AVX512VNNI__
  // Sums four products by 1 and 0. This is one instruction instead of two shifts, and it does not need the core's first
  // port.
  return (Ints)_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32(1 << (8 * G)), (__m512i)groups);
#else
  return (Ints)(groups << (24 - 8 * G)) >> 24;
#endif
}

// The G-th number of each group, as float32.
template <int64_t DTYPE, int G>
FISSILE_INLINE Floats number_of(Words groups) {
  if constexpr (DTYPE == fissile::INT8) return __builtin_convertvector(int8_of<G>(groups), Floats);
  else return (Floats)(G ? groups & splat_word(0xFFFF0000u) : groups << 16);
}

// Some values of k of adjacent panels, with their scales before them if there are any. Prefetches FEW_AHEAD bytes
// ahead. From k = `near` on this would leave the panel, so `skip` is added, which leads to the next task's panels.
struct FewBlock {
  const char* at;
  int64_t panel_bytes;
  int64_t depth;
  int64_t near;
  int64_t skip;

  FewBlock from(int64_t panel) const { return {at + panel * panel_bytes, panel_bytes, depth, near, skip}; }
};

// Sums are local variables only: as members they would be stored after each addition.
template <int64_t DTYPE, int ROWS, int PANELS>
struct FewRows {
  static constexpr int64_t GROUP = fissile::group_of(DTYPE);
  static constexpr int64_t SCALES = DTYPE == fissile::INT8 ? fissile::BLOCK_SCALES : 0;

  using Sums = Floats[ROWS][PANELS];

  template <class Body>
  FISSILE_INLINED static void each_sum(const Body& body) {
    each<ROWS>([&](auto r) FISSILE_INLINED { each<PANELS>([&](auto p) FISSILE_INLINED { body(r, p); }); });
  }

  FISSILE_INLINED static void clear(Sums& sums) {
    each_sum([&](auto r, auto p) FISSILE_INLINED { sums[r][p] = zeros(); });
  }

  // Adds number G of one group of each panel.
  template <int G>
  FISSILE_INLINED static void add_one(const float* x, int64_t inner, const Words* groups, Sums& sums) {
    each<PANELS>([&](auto p) FISSILE_INLINED {
      const Floats number = number_of<DTYPE, G>(groups[p]);
      each<ROWS>([&](auto r) FISSILE_INLINED { sums[r][p] = fma(splat(x[r * inner + G]), number, sums[r][p]); });
    });
  }

  FISSILE_INLINED static void add_step(const float* x, int64_t inner, const FewBlock& block, int64_t k, Sums& sums) {
    Sums even, odd;
    clear(even);
    clear(odd);
    const char* at = block.at + SCALES + k / GROUP * static_cast<int64_t>(sizeof(Words));
    const int64_t ahead = k < block.near ? FEW_AHEAD : FEW_AHEAD + block.skip;
    for (int64_t i = k; i < at_most(k + FEW_STEP, block.depth); i += GROUP, at += sizeof(Words)) {
      Words groups[PANELS];
      each<PANELS>([&](auto p) FISSILE_INLINED {
        __builtin_prefetch(at + p * block.panel_bytes + ahead, 0, 2);
        groups[p] = load_words(at + p * block.panel_bytes);
      });
      each<GROUP / 2>([&](auto pair) FISSILE_INLINED {
        add_one<2 * pair>(x + i, inner, groups, even);
        add_one<2 * pair + 1>(x + i, inner, groups, odd);
      });
    }
    each_sum([&](auto r, auto p) FISSILE_INLINED { sums[r][p] += even[r][p] + odd[r][p]; });
  }

  // totals [ROWS][FEW_PANELS][PANEL] += the block's sums times its scales.
  __attribute__((noinline)) static void add_block(const float* x, int64_t inner, const FewBlock block, float* totals) {
    Sums sums;
    clear(sums);
    for (int64_t k = 0; k < block.depth; k += FEW_STEP) add_step(x, inner, block, k, sums);
    each<PANELS>([&](auto p) FISSILE_INLINED {
      const Floats scale = SCALES ? load(scales_of(block.at + p * block.panel_bytes)) : splat(1.0f);
      each<ROWS>([&](auto r) FISSILE_INLINED {
        float* const to = totals + (r * FEW_PANELS + p) * fissile::PANEL;
        store(to, fma(sums[r][p], scale, load(to)));
      });
    });
  }
};

// Multiplies AT_ONCE panels at a time, and the remaining ones in smaller groups.
template <int64_t DTYPE, int ROWS, int AT_ONCE>
void add_few(const float* x, int64_t inner, const FewBlock& block, int64_t panels, float* totals) {
  int64_t p = 0;
  for (; p + AT_ONCE <= panels; p += AT_ONCE)
    FewRows<DTYPE, ROWS, AT_ONCE>::add_block(x, inner, block.from(p), totals + p * fissile::PANEL);
  if constexpr (AT_ONCE > 1) {
    if (p == panels) return;
    add_few<DTYPE, ROWS, AT_ONCE == 8 ? 4 : 1>(x, inner, block.from(p), panels - p, totals + p * fissile::PANEL);
  }
}

// Multiplies as many panels at once as registers allow. Eight bfloat16 panels are no faster than four, because bfloat16
// loads faster.
template <int64_t DTYPE>
void add_few_rows(int64_t rows, const float* x, int64_t inner, const FewBlock& block, int64_t panels, float* totals) {
  if (rows == 1) return add_few<DTYPE, 1, DTYPE == fissile::INT8 ? 8 : 4>(x, inner, block, panels, totals);
  if constexpr (DTYPE == fissile::INT8) {
    if (rows == 3) return add_few<DTYPE, 3, 4>(x, inner, block, panels, totals);
    if (rows == 4) return add_few<DTYPE, 4, 2>(x, inner, block, panels, totals);
    if (rows == 5) return add_few<DTYPE, 5, 2>(x, inner, block, panels, totals);
    if (rows == 6) return add_few<DTYPE, 6, 2>(x, inner, block, panels, totals);
  }
  add_few<DTYPE, 2, 4>(x, inner, block, panels, totals);
}

// Panels of a task.
FISSILE_INLINE int64_t few_panels(int64_t dtype) { return dtype == fissile::INT8 ? FEW_PANELS : FEW_PANELS / 2; }

static int64_t few_tasks(const fissile::Linear& work) {
  return parts(parts(work.weight.columns, fissile::PANEL), few_panels(work.weight.dtype));
}

// Multiplies `panels` panels from `first` on. A block of int8 has its own scales; bfloat16 is a single block.
template <int64_t DTYPE>
void multiply_few(const fissile::Linear& work, int64_t first, int64_t panels, float* totals) {
  using fissile::PANEL;
  const DenormalsAreZeros mode;
  const int64_t inner = fissile::padded_inner(DTYPE, work.weight.inner);
  const int64_t bytes = fissile::panel_bytes(DTYPE, work.weight.inner);
  const int64_t block_depth = DTYPE == fissile::INT8 ? fissile::K_BLOCK : inner;
  // Number of last values of k for which FEW_AHEAD leads past the end of the panel.
  const int64_t last = DTYPE == fissile::INT8 ? fissile::K_BLOCK : FEW_AHEAD / (PANEL * static_cast<int64_t>(sizeof(Bf16)));
  const int64_t skip = (few_panels(DTYPE) - 1) * bytes;
  const char* const weights = static_cast<const char*>(work.weight.panels) + first * bytes;
  for (int64_t k = 0; k < inner; k += block_depth) {
    const FewBlock block{weights + fissile::block_offset(DTYPE, k), bytes, at_most(block_depth, inner - k),
                         inner - last - k, skip};
    add_few_rows<DTYPE>(work.rows, work.packed_x + k, inner, block, panels, totals);
  }
}

template <int64_t DTYPE>
void run_few_of(const fissile::Linear& work, int64_t task) {
  using fissile::PANEL;
  const int64_t first = task * few_panels(DTYPE);
  const int64_t panels = at_most(few_panels(DTYPE), parts(work.weight.columns, PANEL) - first);
  alignas(64) float totals[FEW_ROWS * FEW_PANELS * PANEL] = {};
  multiply_few<DTYPE>(work, first, panels, totals);
  for (int64_t r = 0; r < work.rows; r++)
    for (int64_t p = 0; p < panels; p++) {
      const int64_t column = (first + p) * PANEL;
      write_row(work, totals + (r * FEW_PANELS + p) * PANEL, column,
                static_cast<Bf16*>(work.y) + r * work.y_stride + column);
    }
}

// Writes y with denormals as zeros for int8 weights and without for bfloat16 weights, as the tile kernels do.
static void run_few(const fissile::Linear& work, int64_t task) {
  if (work.weight.dtype != fissile::INT8) return run_few_of<fissile::BFLOAT16>(work, task);
  const DenormalsAreZeros mode;
  run_few_of<fissile::INT8>(work, task);
}

// Widens row `task` of x.
static void widen_row(const fissile::Linear& work, int64_t task) {
  const int64_t inner = work.weight.inner, padded = fissile::padded_inner(work.weight.dtype, inner);
  const Bf16* const from = static_cast<const Bf16*>(work.x) + task * work.x_stride;
  float* const to = work.packed_x + task * padded;
  for (int64_t k = 0; k < inner; k++) to[k] = widened(from[k]);
  for (int64_t k = inner; k < padded; k++) to[k] = 0.0f;
}

}  // namespace FISSILE_ISA
