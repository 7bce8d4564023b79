// Conversion of int8 weights to bfloat16, for products by bfloat16 instructions.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

// The scales of a block of an int8 panel (kernels.hpp), which precede its numbers.
FISSILE_INLINE const float* scales_of(const char* block) { return reinterpret_cast<const float*>(block); }

#ifdef __AVX512VBMI__

// The lower and the upper bytes of 0 to 127 as bfloat16.
struct ByteTables {
  alignas(64) uint8_t lower[128] = {};
  alignas(64) uint8_t upper[128] = {};

  constexpr ByteTables() {
    for (int exponent = 0; exponent < 7; exponent++)
      for (int number = 1 << exponent; number < 2 << exponent; number++) {
        const int bits = (127 + exponent) << 7 | (number << (7 - exponent) & 0x7F);
        lower[number] = static_cast<uint8_t>(bits & 0xFF);
        upper[number] = static_cast<uint8_t>(bits >> 8);
      }
  }
};

// Permutation that interleaves vectors of lower and upper bytes: selects the first two numbers of each group of four.
// Adding 2 to each place selects the last two.
struct PairBytes {
  alignas(64) uint8_t places[64] = {};

  constexpr PairBytes() {
    for (int byte = 0; byte < 64; byte++)
      places[byte] = static_cast<uint8_t>(byte / 4 * 4 + byte % 4 / 2 + byte % 2 * 64);
  }
};

// Converts groups of four int8 numbers to two pairs of bfloat16 for each column.
class Widening {
 public:
  __attribute__((always_inline)) void operator()(Words words, Words* pairs) const {
    const __m512i numbers = (__m512i)words, sizes = _mm512_abs_epi8(numbers);
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], sizes, lower_[1]);
    // Adds the sign of the int8 number.
    const __m512i upper =
        _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(upper_[0], sizes, upper_[1]), numbers, sign_, 0xF8);
    pairs[0] = (Words)_mm512_permutex2var_epi8(lower, first_, upper);
    pairs[1] = (Words)_mm512_permutex2var_epi8(lower, second_, upper);
  }

 private:
  static constexpr ByteTables TABLES{};
  static constexpr PairBytes PLACES{};

  const __m512i lower_[2] = {_mm512_load_si512(TABLES.lower), _mm512_load_si512(TABLES.lower + 64)};
  const __m512i upper_[2] = {_mm512_load_si512(TABLES.upper), _mm512_load_si512(TABLES.upper + 64)};
  const __m512i sign_ = _mm512_set1_epi8(-128);
  const __m512i first_ = _mm512_load_si512(PLACES.places);
  const __m512i second_ = _mm512_add_epi8(first_, _mm512_set1_epi8(2));
};

#else

class Widening {
 public:
  __attribute__((always_inline)) void operator()(Words words, Words* pairs) const {
    // The float32 of an 8-bit integer has zeros in its lower half, so truncating it to bfloat16 is exact.
    Words numbers[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++)
      numbers[g] = (Words)__builtin_convertvector((Ints)(words << (24 - 8 * g)) >> 24, Floats);
    pairs[0] = numbers[0] >> 16 | numbers[1];
    pairs[1] = numbers[2] >> 16 | numbers[3];
  }
};

#endif

// Converts `depth` values of k of an int8 panel to pairs of bfloat16 [K_BLOCK / 2][PANEL][2], exactly, and pads with
// zeros. Unless `next` is null, prefetches as many numbers there, one line per line converted; all at once would take
// the line buffers of loads in flight.
static void widen_numbers(const char* from, int64_t depth, Bf16* to, const char* next = nullptr) {
  static_assert(WIDTH == fissile::PANEL);
  const Widening widened;
  for (int64_t k = 0; k < depth; k += 4, from += sizeof(Words), to += 4 * fissile::PANEL) {
    Words pairs[2];
    if (next) __builtin_prefetch(next + k * fissile::PANEL, 0, 2);
    widened(load_words(from), pairs);
    __builtin_memcpy(to, pairs, sizeof pairs);
  }
  if (depth < fissile::K_BLOCK) __builtin_memset(to, 0, (fissile::K_BLOCK - depth) * fissile::PANEL * sizeof *to);
}

// Converts a block that begins with its scales, and prefetches the next block.
FISSILE_INLINE void widen_block(const char* block, const char* next, int64_t depth, Bf16* to) {
  __builtin_prefetch(next, 0, 2);
  widen_numbers(block + fissile::BLOCK_SCALES, depth, to, next + fissile::BLOCK_SCALES);
}

}  // namespace FISSILE_ISA
