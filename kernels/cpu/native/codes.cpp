// Weights in codes: packing (CodeLayout in kernels.hpp), and rounding of floats to the nearest codes of 4 bits. Compiled
// once, without instructions that not every processor has, so that all choose the same codes.
#include <algorithm>
#include <cstring>
#include <limits>

#include "api.hpp"
#include "kernels.hpp"
#include "pool.hpp"

using namespace fissile;

namespace {

// Copies the scales, offsets and factors of column `c` of a block.
void pack_scales(const CodePacking& work, int64_t column, int64_t c, int64_t first, char* block) {
  const CodeLayout layout(work.packed_dtype);
  const int64_t bytes = size_of(layout.scales), groups = (work.inner + work.group - 1) / work.group;
  for (int64_t g = 0; g < layout.groups() && first + g * layout.group < work.inner; g++) {
    const int64_t from = column * groups + (first + g * layout.group) / work.group, to = g * PANEL + c;
    std::memcpy(block + to * bytes, work.scales + from * bytes, static_cast<size_t>(bytes));
    if (layout.has_offsets)
      std::memcpy(block + layout.offsets_at() + to * layout.offset_bytes(), work.offsets + from * layout.offset_bytes(),
                  static_cast<size_t>(layout.offset_bytes()));
  }
  if (!layout.has_factors()) return;
  const int64_t blocks = (work.inner + K_BLOCK - 1) / K_BLOCK, count = layout.has_offsets ? 2 : 1;
  for (int64_t i = 0; i < count; i++)
    std::memcpy(block + layout.factors_at() + (i * PANEL + c) * 2,
                work.factors + (column * blocks + first / K_BLOCK) * count + i, 2);
}

// Adds a code of 4 to 6 bits, for value k of column c, to zeroed numbers.
void pack_code(char* numbers, int64_t bits, int64_t k, int64_t c, int64_t code) {
  // Two codes of one byte are two pairs apart.
  char& byte = numbers[(k / 8 * PANEL + c) * 4 + k % 2 * 2 + k % 8 / 4];
  byte = static_cast<char>(byte | (code & 15) << (k % 4 / 2 * 4));
  const int64_t high = bits - 4, from = high * (k % 8 / 2 + 4 * (k % 2));
  if (!high) return;
  char& upper = numbers[UPPER_BITS + (k / 8 * PANEL + c) * high + from / 8];
  upper = static_cast<char>(upper | code >> 4 << from % 8);
}

// Packs panel `panel` of a weight in codes.
void pack_code_panel(const CodePacking& work, int64_t panel) {
  const CodeLayout layout(work.packed_dtype);
  char* block = work.panels + panel * panel_bytes(work.packed_dtype, work.inner);
  for (int64_t first = 0; first < work.inner; first += K_BLOCK, block += layout.block_bytes()) {
    std::memset(block, 0, static_cast<size_t>(layout.block_bytes()));
    char* const numbers = block + layout.numbers_at();
    for (int64_t c = 0; c < PANEL; c++) {
      const int64_t column = panel * PANEL + c;
      if (column < work.columns) pack_scales(work, column, c, first, block);
      for (int64_t k = 0; k < K_BLOCK; k++) {
        const bool there = column < work.columns && first + k < work.inner;
        const int64_t code = there ? work.codes[column * work.inner + first + k] : layout.middle();
        if (layout.bits == 8) numbers[(k / 4 * PANEL + c) * 4 + k % 4] = static_cast<char>(code - layout.middle());
        else pack_code(numbers, layout.bits, k, c, code);
      }
    }
  }
}

}  // namespace

// Packs codes as CodePacking says. A group is `group` columns, which the packed dtype's group divides or equals.
FISSILE_API void fissile_pack_codes(
    int64_t packed_dtype, const uint8_t* codes, const char* scales, const char* offsets, const uint16_t* factors,
    int64_t columns, int64_t inner, int64_t group, char* panels) {
  const CodePacking work{packed_dtype, codes, scales, offsets, factors, columns, inner, group, panels};
  share((columns + PANEL - 1) / PANEL, pack_code_panel, work);
}

namespace {

// As kernels/grouped_weight.py: columns that share a scale, and the divisors that nearest_codes() tries.
constexpr int64_t GROUP = 32;

struct Rounding {
  const float* weight;
  int64_t inner;
  const float* divisors;
  int64_t num_divisors;
  uint8_t* codes;
  uint16_t* scales;
};

// The nearest bfloat16 as float32, ties to even.
float to_bfloat16(float value) {
  if (value != value) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// Four numbers, which every processor has vectors for.
using Four = float __attribute__((vector_size(16)));
constexpr int64_t FOURS = GROUP / 4;

// Multiples of `scale` nearest to a group's numbers, from -8 to 7; 0 where the scale is 0 or not finite.
void round_group(const Four* numbers, float scale, Four* rounded) {
  constexpr float WHOLE = 12582912.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  const Four zero = {}, high = zero + 7.0f, low = zero - 8.0f;
  for (int64_t i = 0; i < FOURS; i++) {
    Four value = numbers[i] * inverse;
    value = value > high ? high : value;
    value = value < low ? low : value;
    value = value == value ? value : zero;
    rounded[i] = value + WHOLE - WHOLE;
  }
}

// Adds up by halves, the order in which kernels/grouped_weight.py adds.
float squared_error(const Four* numbers, const Four* rounded, float scale) {
  Four errors[FOURS];
  for (int64_t i = 0; i < FOURS; i++) {
    const Four error = rounded[i] * scale - numbers[i];
    errors[i] = error * error;
  }
  for (int64_t height = FOURS / 2; height; height /= 2)
    for (int64_t i = 0; i < height; i++) errors[i] += errors[i + height];
  const Four sum = errors[0];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

float largest_of(const float* numbers) {
  float low = numbers[0], high = numbers[0];
  for (int64_t k = 0; k < GROUP; k++) {
    if (numbers[k] != numbers[k]) return numbers[k];
    low = std::min(low, numbers[k]);
    high = std::max(high, numbers[k]);
  }
  return -low > high ? low : high;
}

void round_row(const Rounding& work, int64_t row) {
  const int64_t groups = (work.inner + GROUP - 1) / GROUP;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min(GROUP, work.inner - g * GROUP);
    Four fours[FOURS] = {}, rounded[FOURS];
    float numbers[GROUP] = {};
    std::copy_n(work.weight + row * work.inner + g * GROUP, count, numbers);
    std::memcpy(fours, numbers, sizeof fours);
    const float largest = largest_of(numbers);
    float best = to_bfloat16(largest / work.divisors[0]), least = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < work.num_divisors; i++) {
      const float scale = to_bfloat16(largest / work.divisors[i]);
      round_group(fours, scale, rounded);
      const float error = squared_error(fours, rounded, scale);
      if (error < least) best = scale, least = error;
    }
    round_group(fours, best, rounded);
    for (int64_t k = 0; k < count; k++)
      work.codes[row * work.inner + g * GROUP + k] = static_cast<uint8_t>(rounded[k / 4][k % 4] + 8.0f);
    uint32_t bits;
    std::memcpy(&bits, &best, sizeof bits);
    work.scales[row * groups + g] = static_cast<uint16_t>(bits >> 16);
  }
}

}  // namespace

// Rounds a weight [rows, inner] as nearest_codes() of kernels/grouped_weight.py: codes [rows, inner], and the bits of
// bfloat16 scales [rows, groups].
FISSILE_API void fissile_nearest_codes(
    const float* weight, int64_t rows, int64_t inner, const float* divisors, int64_t num_divisors, uint8_t* codes,
    uint16_t* scales) {
  const Rounding work{weight, inner, divisors, num_divisors, codes, scales};
  share(rows, round_row, work);
}
