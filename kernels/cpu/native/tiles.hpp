// The eight AMX tile registers, with the operations that bfloat16 products need. With FISSILE_EMULATED, the registers
// are in memory and follow the pseudo-code of Intel's manual (volume 2, TDPBF16PS). Tests thus run the kernels of
// linear_amx.cpp on any AVX2 machine.
//
// The instructions are inline assembly, because compilers' intrinsics accept registers only as literals, not as
// template arguments. The compiler itself never uses tiles.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

// Most rows of a tile, bytes of a row, and pairs of bfloat16 in a row.
constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;
constexpr int TILE_PAIRS = 16;

// The operand of LDTILECFG. All tiles have rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef FISSILE_EMULATED

struct Tile {
  uint8_t rows;
  alignas(64) uint8_t bytes[TILE_ROWS][TILE_BYTES];
};

// Zero rows: the thread has not loaded tile shapes.
inline thread_local Tile emulated_tiles[8];

// Traps, as the processor does for a tile that has no shape or does not fit.
FISSILE_INLINE void require(bool fits) {
  if (!fits) __builtin_trap();
}

static void load_tile_shapes(const TileShapes& shapes) {
  require(shapes.palette == 1 && shapes.start_row == 0);
  for (int t = 0; t < 8; t++) {
    require(shapes.rows[t] <= TILE_ROWS && shapes.bytes[t] == (shapes.rows[t] ? TILE_BYTES : 0));
    emulated_tiles[t] = Tile{shapes.rows[t], {}};
  }
}

static void release_tiles() { load_tile_shapes(TileShapes{}); }

template <int TILE>
void tile_zero() {
  require(emulated_tiles[TILE].rows > 0);
  __builtin_memset(emulated_tiles[TILE].bytes, 0, sizeof emulated_tiles[TILE].bytes);
}

template <int TILE>
void tile_load(const void* from, int64_t stride = TILE_BYTES) {
  Tile& tile = emulated_tiles[TILE];
  tile_zero<TILE>();
  for (int row = 0; row < tile.rows; row++)
    __builtin_memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, TILE_BYTES);
}

template <int TILE>
void tile_store(void* to, int64_t stride = TILE_BYTES) {
  const Tile& tile = emulated_tiles[TILE];
  require(tile.rows > 0);
  for (int row = 0; row < tile.rows; row++)
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], TILE_BYTES);
}

// The first or the second numbers of pairs, as float32.
FISSILE_INLINE Floats first_of(Words pairs) { return flushed((Floats)(pairs << 16)); }
FISSILE_INLINE Floats second_of(Words pairs) { return flushed((Floats)(pairs & splat_word(0xFFFF0000u))); }

// sums += rows of A times columns of B. One chain of fma's adds the products of the pairs' first numbers, another those
// of the second numbers.
template <int SUMS, int A, int B>
void tile_multiply() {
  Tile& sums = emulated_tiles[SUMS];
  const Tile &a = emulated_tiles[A], &b = emulated_tiles[B];
  require(sums.rows > 0 && a.rows == sums.rows && b.rows == TILE_PAIRS);
  for (int row = 0; row < sums.rows; row++)
    for (int column = 0; column < TILE_BYTES / 4; column += WIDTH) {
      Floats first = zeros(), second = zeros(), sum;
      for (int pair = 0; pair < TILE_PAIRS; pair++) {
        uint32_t factor;
        Words factors;
        __builtin_memcpy(&factor, a.bytes[row] + 4 * pair, sizeof factor);
        __builtin_memcpy(&factors, b.bytes[pair] + 4 * column, sizeof factors);
        first = flushed(fma(first_of(splat_word(factor)), first_of(factors), first));
        second = flushed(fma(second_of(splat_word(factor)), second_of(factors), second));
      }
      uint8_t* place = sums.bytes[row] + 4 * column;
      __builtin_memcpy(&sum, place, sizeof sum);
      sum = flushed(flushed(sum) + flushed(first + second));
      __builtin_memcpy(place, &sum, sizeof sum);
    }
}

#else

FISSILE_INLINE void load_tile_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

FISSILE_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
FISSILE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows are `stride` bytes apart.
template <int TILE>
FISSILE_INLINE void tile_load(const void* from, int64_t stride = TILE_BYTES) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
FISSILE_INLINE void tile_store(void* to, int64_t stride = TILE_BYTES) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUMS, int A, int B>
FISSILE_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

#endif

}  // namespace FISSILE_ISA
