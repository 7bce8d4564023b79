// Products of bfloat16 with weights in codes, by VDPBF16PS: codes become bfloat16, which is exact, in pairs of adjacent k.
// Products of float32 use the base table's kernels.
#include "bf16_rows.hpp"
#include "code_product.hpp"
#include "pair_rows.hpp"
#include "pairs.hpp"

namespace FISSILE_ISA {
namespace {

// Bits of the bfloat16 that equals a small integer.
constexpr uint16_t bits_of(int value) {
  if (value == 0) return 0;
  const int size = value < 0 ? -value : value;
  int exponent = 0;
  while (size >> (exponent + 1)) exponent++;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((size << (7 - exponent)) & 0x7F));
}

// The numbers of codes of BITS bits; those of 4 bits twice.
template <int BITS>
struct CodeValues {
  alignas(64) uint16_t bits[BITS == 6 ? 64 : 32] = {};
  constexpr CodeValues() {
    for (int code = 0; code < (BITS == 6 ? 64 : 32); code++) bits[code] = bits_of(code % (1 << BITS) - (1 << (BITS - 1)));
  }
};

// Places that put byte 2 i of each word into its second byte, and the next one into the fourth.
struct UpperBytes {
  alignas(64) uint8_t places[2][64] = {};
  constexpr UpperBytes() {
    for (int i = 0; i < 2; i++)
      for (int byte = 0; byte < 64; byte++)
        places[i][byte] = static_cast<uint8_t>(byte % 2 ? byte % 16 / 4 * 4 + 2 * i + byte % 4 / 2 : 0x80);
  }
};

template <int BITS>
class PairDecoder;

// The instruction that looks up 16-bit numbers reads five bits of an index, one of which is the next code's: so the table
// has each number twice.
template <>
class PairDecoder<4> {
 public:
  static constexpr int COUNT = 4, UPPER = 0;
  using Loaded = Words;

  __attribute__((always_inline)) Words load(Words words, const char*) const { return words; }

#ifdef __AVX512BW__
  __attribute__((always_inline)) Words column(Words words, int i) const {
    return (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, 4 * i), values_);
  }

 private:
  static constexpr CodeValues<4> VALUES{};
  const __m512i values_ = _mm512_load_si512(VALUES.bits);
#else
  __attribute__((always_inline)) Words column(Words words, int i) const {
    return bits(words >> (4 * i)) >> 16 | bits(words >> (16 + 4 * i));
  }

 private:
  static Words bits(Words words) {
    return (Words)(__builtin_convertvector((Ints)(words & splat_word(15)), Floats) - splat(8.0f));
  }
#endif
};

// Codes whose upper bits are apart, UPPER_COUNT of them. In a loaded vector, each half of a word has the upper bits of
// four codes, of pair 0 in its lowest bits.
template <int UPPER_COUNT>
class SplitPairDecoder {
 public:
  static constexpr int COUNT = 4, UPPER = UPPER_COUNT;
  struct Loaded {
    Words lower;
    Words upper;
  };

  __attribute__((always_inline)) Loaded load(Words words, const char* upper) const {
    const Words both = UPPER == 1 ? load_bytes(upper) : load_shorts(upper);
    return {words, both | both << (UPPER == 1 ? 12 : 8)};
  }

#ifdef __AVX512BW__
  // The look-up reads as many bits of an index as a code has, so that further ones do not matter.
  __attribute__((always_inline)) Words column(const Loaded& loaded, int i) const {
    const __m512i lower = _mm512_srli_epi16((__m512i)loaded.lower, 4 * i), all = (__m512i)loaded.upper;
    const int left = 4 - UPPER * i;
    const __m512i upper = left < 0 ? _mm512_srli_epi16(all, -left) : _mm512_slli_epi16(all, left);
    // Takes the lowest four bits of `lower`, the others of `upper`.
    const __m512i codes = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(15), 0xE4);
    if constexpr (UPPER == 1) return (Words)_mm512_permutexvar_epi16(codes, values_[0]);
    return (Words)_mm512_permutex2var_epi16(values_[0], codes, values_[1]);
  }

 private:
  static constexpr CodeValues<4 + UPPER> VALUES{};
  const __m512i values_[2] = {_mm512_load_si512(VALUES.bits), _mm512_load_si512(VALUES.bits + (UPPER == 2 ? 32 : 0))};
#else
  __attribute__((always_inline)) Words column(const Loaded& loaded, int i) const {
    return bits(loaded.lower >> (4 * i), loaded.upper >> (UPPER * i)) >> 16 |
           bits(loaded.lower >> (16 + 4 * i), loaded.upper >> (16 + UPPER * i));
  }

 private:
  static Words bits(Words lower, Words upper) {
    const Words codes = (lower & splat_word(15)) | (upper & splat_word((1u << UPPER) - 1)) << 4;
    return (Words)(__builtin_convertvector((Ints)codes, Floats) - splat(static_cast<float>(8 << UPPER)));
  }
#endif
};

template <>
class PairDecoder<5> : public SplitPairDecoder<1> {};
template <>
class PairDecoder<6> : public SplitPairDecoder<2> {};

template <>
class PairDecoder<8> {
 public:
  static constexpr int COUNT = 2, UPPER = 0;
  struct Loaded {
    Words pairs[2];
  };

#ifdef __AVX512VBMI__
  // The conversion of int8 weights takes -128 for 0.
  __attribute__((always_inline)) Loaded load(Words words, const char*) const {
    Loaded loaded;
    widened_(words, loaded.pairs);
    const __mmask64 lowest = _mm512_cmpeq_epi8_mask((__m512i)words, _mm512_set1_epi8(-128));
    const __m512i upper = _mm512_maskz_mov_epi8(lowest, _mm512_set1_epi8(0x43));
    for (int i = 0; i < 2; i++)
      loaded.pairs[i] |= (Words)_mm512_shuffle_epi8(upper, _mm512_load_si512(PLACES.places[i]));
    return loaded;
  }

 private:
  static constexpr UpperBytes PLACES{};
  const Widening widened_;

 public:
#else
  __attribute__((always_inline)) Loaded load(Words words, const char*) const {
    Loaded loaded;
    Widening()(words, loaded.pairs);
    return loaded;
  }
#endif

  __attribute__((always_inline)) Words column(const Loaded& loaded, int i) const { return loaded.pairs[i]; }
};

struct PairMath {
  using Factor = uint32_t;
  using Column = Words;
  static constexpr int STEP = 2;
  // With tiles of 12 rows a prompt of 144 tokens took 6 % longer on Zen 5.
  static constexpr int ROWS = 8, FEW_ROWS = 8;

  static constexpr int panels(int64_t rows) { return rows <= 5 ? 4 : 2; }

  template <int BITS>
  using Decoder = PairDecoder<BITS>;

  FISSILE_INLINE Words spread(uint32_t factor) { return splat_word(factor); }
  FISSILE_INLINE Floats add(Floats sum, Words factor, Words column) { return add_pairs(sum, factor, column); }

  static void pack_rows(const Linear& work, const RowTile& tile, uint32_t* to, int64_t count) {
    if (!work.weight.order) return pack_pairs(work, tile, to, count);
    const int64_t inner = work.weight.inner, *const order = work.weight.order;
    for (int64_t r = 0; r < tile.rows; r++) {
      const Bf16* const from = static_cast<const Bf16*>(work.x) + (tile.first + r) * work.x_stride;
      for (int64_t k = 0; k < count; k++) {
        const uint32_t first = 2 * k < inner ? from[order[2 * k]].bits : 0;
        const uint32_t second = 2 * k + 1 < inner ? from[order[2 * k + 1]].bits : 0;
        to[k * tile.rows + r] = first | second << 16;
      }
    }
  }
};

using Product = CodeProduct<PairMath>;

// The kernels of other products, for this instruction set.
fissile::Kernels others;

bool takes_codes(const Linear& work) {
  return work.dtype == fissile::BFLOAT16 && fissile::is_grouped(work.weight.dtype);
}

// Calls OWN for products of bfloat16 with codes, and the table's kernel for others.
template <auto OWN, auto MEMBER, class... Rest>
auto own_or_other(const Linear& work, Rest... rest) -> decltype(OWN(work, rest...)) {
  return takes_codes(work) ? OWN(work, rest...) : (others.*MEMBER)(work, rest...);
}

}  // namespace

// Replaces products with codes in a table that has its other products already.
void use_own_codes(fissile::Kernels& table) {
  others = table;
  table.linear_scratch = own_or_other<Product::scratch, &fissile::Kernels::linear_scratch>;
  table.linear_pack_tasks = own_or_other<Product::pack_tasks, &fissile::Kernels::linear_pack_tasks>;
  table.linear_pack = own_or_other<Product::pack, &fissile::Kernels::linear_pack>;
  table.linear_tasks = own_or_other<Product::tasks, &fissile::Kernels::linear_tasks>;
  table.linear = own_or_other<Product::run, &fissile::Kernels::linear>;
}

}  // namespace FISSILE_ISA
