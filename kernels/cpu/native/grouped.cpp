// Products with weights in codes, by fused multiply-adds of float32.
#include "grouped.hpp"

#include "code_product.hpp"

namespace FISSILE_ISA {
namespace {

// Bits of 2^23; ored to those of a smaller integer, they are the bits of the float 2^23 plus the integer.
constexpr uint32_t LARGE = 0x4B000000;

// Decodes codes to float32: one column for each value of k.
template <int BITS>
class FloatDecoder {
 public:
  static constexpr int COUNT = 32 / BITS, UPPER = 0;
  using Loaded = Words;

  __attribute__((always_inline)) Words load(Words words, const char*) const { return words; }

  __attribute__((always_inline)) Floats column(Words words, int k) const {
    if constexpr (BITS == 8) return __builtin_convertvector((Ints)(words << (24 - 8 * k)) >> 24, Floats);
    const Words shifted = words >> (4 * (k / 2) + 16 * (k % 2));
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
    // The instruction reads the lower four bits of an index.
    return (Floats)_mm512_permutexvar_ps((__m512i)shifted, (__m512)values_);
#else
    return __builtin_convertvector((Ints)(shifted & splat_word(15)), Floats) - splat(8.0f);
#endif
  }

#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
 private:
  const Floats values_ = __builtin_convertvector(lane_numbers(), Floats) - splat(8.0f);
#endif
};

// The same for codes whose upper bits are apart, UPPER_COUNT of them.
template <int UPPER_COUNT>
class SplitFloatDecoder {
 public:
  static constexpr int COUNT = 8, UPPER = UPPER_COUNT;
  struct Loaded {
    Words lower;
    Words upper;
  };

  __attribute__((always_inline)) Loaded load(Words words, const char* upper) const {
    return {words, UPPER == 1 ? load_bytes(upper) : load_shorts(upper)};
  }

  __attribute__((always_inline)) Floats column(const Loaded& loaded, int k) const {
    const int from = UPPER * (k / 2 + 4 * (k % 2));
    const Words lower = loaded.lower >> (4 * (k / 2) + 16 * (k % 2)) & splat_word(15);
    const Words upper = (from < 4 ? loaded.upper << (4 - from) : loaded.upper >> (from - 4)) & splat_word(MASK);
    return (Floats)(lower | upper | splat_word(LARGE)) - splat(8388608.0f + (8 << UPPER));
  }

 private:
  static constexpr uint32_t MASK = ((1u << UPPER) - 1) << 4;
};

template <>
class FloatDecoder<5> : public SplitFloatDecoder<1> {};
template <>
class FloatDecoder<6> : public SplitFloatDecoder<2> {};

struct FloatMath {
  using Factor = float;
  using Column = Floats;
  static constexpr int STEP = 1;
  static constexpr int ROWS = 6, FEW_ROWS = 6;

  // Enough sums to hide the latency of fma, as far as registers hold them.
  static constexpr int panels(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? WIDTH / 4 : WIDTH / 8; }

  template <int BITS>
  using Decoder = FloatDecoder<BITS>;

  FISSILE_INLINE Floats spread(float factor) { return splat(factor); }
  FISSILE_INLINE Floats add(Floats sum, Floats factor, Floats column) { return fma(factor, column, sum); }

  static void pack_rows(const Linear& work, const RowTile& tile, float* to, int64_t count) {
    if (work.dtype == fissile::FLOAT32) pack_rows_of<float>(work, tile, to, count);
    else pack_rows_of<Bf16>(work, tile, to, count);
  }

 private:
  template <class Number>
  static void pack_rows_of(const Linear& work, const RowTile& tile, float* to, int64_t count) {
    const int64_t inner = work.weight.inner, *const order = work.weight.order;
    for (int64_t r = 0; r < tile.rows; r++) {
      const Number* const from = static_cast<const Number*>(work.x) + (tile.first + r) * work.x_stride;
      for (int64_t k = 0; k < inner; k++) to[k * tile.rows + r] = widened(from[order ? order[k] : k]);
      for (int64_t k = inner; k < count; k++) to[k * tile.rows + r] = 0.0f;
    }
  }
};

using Product = CodeProduct<FloatMath>;

}  // namespace

int64_t grouped_scratch(const fissile::Linear& work) { return Product::scratch(work); }
int64_t grouped_pack_tasks(const fissile::Linear& work) { return Product::pack_tasks(work); }
void grouped_pack(const fissile::Linear& work, int64_t task) { Product::pack(work, task); }
int64_t grouped_tasks(const fissile::Linear& work) { return Product::tasks(work); }
void grouped(const fissile::Linear& work, int64_t task) { Product::run(work, task); }

}  // namespace FISSILE_ISA
