// Products of so few rows that tiles would be mostly empty: by fma, in the order in which TDPBF16PS adds. Vectors are read
// sooner than tiles, and sums of int8 weights need not be stored for each block. Of 32 k the even ones are summed in one
// chain from zero and the odd ones in another, both together are added to the sum of their block, and numbers too small to
// be normal are zeros: the bits are those of tiles.
//
// x is widened to float32, rows of padded_inner() numbers.
#pragma once

#include "bf16_rows.hpp"
#include "each.hpp"
#include "kernels.hpp"
#include "vec.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {

// While it lives, numbers that are not normal count as zeros, as they do in tiles.
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

// Most rows of int8 and of bfloat16 weights, k of a step, most panels of a task, and bytes of each panel that are asked for
// ahead of their use.
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
  // A sum of four products by 1 and 0: one instruction instead of two shifts, and not for the core's first port alone.
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

// Some k of neighbouring panels, behind the scales if there are any; bytes from panel to panel. What comes FEW_AHEAD after
// the first `near` k is in the same panels, after the others `skip` bytes further: in those of the next task.
struct FewBlock {
  const char* at;
  int64_t panel_bytes;
  int64_t depth;
  int64_t near;
  int64_t skip;

  FewBlock from(int64_t panel) const { return {at + panel * panel_bytes, panel_bytes, depth, near, skip}; }
};

// Sums in locals alone: as members they would be stored after each addition.
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

  // Number G of a group of each panel.
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

// AT_ONCE panels at a time, and those that are left by fewer.
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

// As many panels at once as registers take; eight of bfloat16, which is read faster, are no better than four.
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

// Some panels, from `first` on. A block of int8 has its scales; bfloat16 is one block.
template <int64_t DTYPE>
void multiply_few(const fissile::Linear& work, int64_t first, int64_t panels, float* totals) {
  using fissile::PANEL;
  const DenormalsAreZeros mode;
  const int64_t inner = fissile::padded_inner(DTYPE, work.weight.inner);
  const int64_t bytes = fissile::panel_bytes(DTYPE, work.weight.inner);
  const int64_t block_depth = DTYPE == fissile::INT8 ? fissile::K_BLOCK : inner;
  // Of a panel, the last k of which FEW_AHEAD is behind it.
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

// What tiles give of int8 is written in the mode, too, and of bfloat16 out of it.
static void run_few(const fissile::Linear& work, int64_t task) {
  if (work.weight.dtype != fissile::INT8) return run_few_of<fissile::BFLOAT16>(work, task);
  const DenormalsAreZeros mode;
  run_few_of<fissile::INT8>(work, task);
}

// Row `task` of x.
static void widen_row(const fissile::Linear& work, int64_t task) {
  const int64_t inner = work.weight.inner, padded = fissile::padded_inner(work.weight.dtype, inner);
  const Bf16* const from = static_cast<const Bf16*>(work.x) + task * work.x_stride;
  float* const to = work.packed_x + task * padded;
  for (int64_t k = 0; k < inner; k++) to[k] = widened(from[k]);
  for (int64_t k = inner; k < padded; k++) to[k] = 0.0f;
}

}  // namespace FISSILE_ISA
