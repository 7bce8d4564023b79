// A vector of WIDTH floats on the vector extensions of GCC and Clang, with the operations that these lack.
//
// Only sources that are compiled once per instruction set may include this file, inside the namespace FISSILE_ISA. They
// must not use inline functions of the standard library: the linker keeps one copy for all instruction sets, and that
// may be the AVX-512 one.
//
// Compiled with -ffp-contract=off, so a product and a sum are fused only where the source calls fma(), in every
// instantiation.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if FISSILE_WIDTH == 16
#define FISSILE_LANES(expression) \
  { expression(0), expression(1), expression(2), expression(3), expression(4), expression(5), expression(6), \
    expression(7), expression(8), expression(9), expression(10), expression(11), expression(12), expression(13), \
    expression(14), expression(15) }
#else
#define FISSILE_LANES(expression) \
  { expression(0), expression(1), expression(2), expression(3), expression(4), expression(5), expression(6), \
    expression(7) }
#endif

namespace FISSILE_ISA {

constexpr int WIDTH = FISSILE_WIDTH;

using Floats = float __attribute__((vector_size(WIDTH * 4)));
using Ints = int32_t __attribute__((vector_size(WIDTH * 4)));
using Words = uint32_t __attribute__((vector_size(WIDTH * 4)));
using Bytes = uint8_t __attribute__((vector_size(WIDTH)));
using Halves = uint16_t __attribute__((vector_size(WIDTH * 2)));
using Floats8 = float __attribute__((vector_size(32)));
using Floats4 = float __attribute__((vector_size(16)));

// bfloat16: the upper half of a float32.
struct Bf16 {
  uint16_t bits;
};

// IEEE half precision.
struct Half {
  uint16_t bits;
};

// FP8 E4M3: bias 7, largest number 448, no infinities; NaN has all exponent and mantissa bits set.
struct Fp8 {
  uint8_t bits;
};

#define FISSILE_INLINE static inline __attribute__((always_inline))

FISSILE_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
FISSILE_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// Number of parts of at most `size` elements in `count` elements.
FISSILE_INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// -infinity, the score of a key that no row sees.
FISSILE_INLINE float lowest() { return -__builtin_inff(); }

FISSILE_INLINE float widened(float value) { return value; }

FISSILE_INLINE float widened(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

FISSILE_INLINE Floats splat(float value) {
#define FISSILE_SAME(lane) value
  return Floats FISSILE_LANES(FISSILE_SAME);
#undef FISSILE_SAME
}

FISSILE_INLINE Words splat_word(uint32_t value) {
#define FISSILE_SAME(lane) value
  return Words FISSILE_LANES(FISSILE_SAME);
#undef FISSILE_SAME
}

// x with denormals replaced by zeros. bfloat16 instructions always flush denormal inputs and outputs, whatever the
// thread's mode.
FISSILE_INLINE Floats flushed(Floats x) {
  const Words magnitude = (Words)x & splat_word(0x7FFFFFFFu);
  return (Floats)(magnitude < splat_word(0x00800000u) ? (Words)x & splat_word(0x80000000u) : (Words)x);
}

// Moves byte `byte` of each lane to the lane's highest byte and zeros the rest.
FISSILE_INLINE Words byte_to_top(Words words, int byte) {
#if FISSILE_WIDTH == 8 && defined(__AVX2__)
  const int lowest = 0x808080;
  if (byte == 0) return words << 24;
  const int first = (byte << 24) | lowest;
  const __m256i order = _mm256_setr_epi32(first, first + (4 << 24), first + (8 << 24), first + (12 << 24),
                                          first, first + (4 << 24), first + (8 << 24), first + (12 << 24));
  return (Words)_mm256_shuffle_epi8((__m256i)words, order);
#else
  return (words << (24 - 8 * byte)) & splat_word(0xFF000000u);
#endif
}

FISSILE_INLINE Ints lane_numbers() {
#define FISSILE_SAME(lane) lane
  return Ints FISSILE_LANES(FISSILE_SAME);
#undef FISSILE_SAME
}

FISSILE_INLINE Floats zeros() { return splat(0.0f); }

// a * b + c, rounded once if the instruction set has FMA and twice otherwise.
FISSILE_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif FISSILE_WIDTH == 8 && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif FISSILE_WIDTH == 16 && defined(__FMA__)
  union {
    Floats whole;
    __m256 parts[2];
  } x{a}, y{b}, z{c};
  for (int i = 0; i < 2; i++) z.parts[i] = _mm256_fmadd_ps(x.parts[i], y.parts[i], z.parts[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// Returns b if a and b are equal or one is NaN, as the instructions do.
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
FISSILE_INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
FISSILE_INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
#else
FISSILE_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
FISSILE_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
#endif

// Keeps the value in a register. Otherwise the compiler reads it from memory again for each use.
FISSILE_INLINE Floats kept(Floats value) {
#if (FISSILE_WIDTH == 8 && defined(__AVX__)) || (FISSILE_WIDTH == 16 && defined(__AVX512F__))
  asm("" : "+v"(value));
#endif
  return value;
}

// WIDTH unsigned numbers of 8 or 16 bits. Intrinsics, since compilers convert such vectors in pieces.
FISSILE_INLINE Words load_bytes(const void* from) {
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif FISSILE_WIDTH == 8 && defined(__AVX2__)
  int64_t eight;
  __builtin_memcpy(&eight, &bytes, sizeof eight);
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

FISSILE_INLINE Words load_shorts(const void* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif FISSILE_WIDTH == 8 && defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

using FloatsAnywhere = float __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

FISSILE_INLINE Floats load(const float* from) { return *(const FloatsAnywhere*)from; }

FISSILE_INLINE Floats load(const Bf16* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
#if FISSILE_WIDTH == 8 && defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);
#elif FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#else
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Converts a narrower format to float32. `magnitude` holds its exponent and mantissa, shifted to the positions of
// float32; its exponent bias is lower by `bias`. Denormals of the narrower format are converted exactly, by subtracting
// the smallest normal number. No float32 denormal occurs on the way, since processors compute with these slowly.
FISSILE_INLINE Floats rebiased(Words magnitude, uint32_t bias) {
  const Words smallest = splat_word((bias + 1) << 23);
  Floats small = (Floats)(magnitude + smallest) - (Floats)smallest;
  return magnitude < splat_word(1u << 23) ? small : (Floats)(magnitude + splat_word(bias << 23));
}

FISSILE_INLINE Floats load(const Half* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
#if FISSILE_WIDTH == 8 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  Words words = __builtin_convertvector(halves, Words), magnitude = (words & splat_word(0x7FFF)) << 13;
  Words special = magnitude + splat_word((255u - 31u) << 23);
  Floats value = magnitude < splat_word(0x7C00u << 13) ? rebiased(magnitude, 112) : (Floats)special;
  return (Floats)((Words)value | ((words & splat_word(0x8000)) << 16));
#endif
}

FISSILE_INLINE Floats load(const Fp8* from) {
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
#if FISSILE_WIDTH == 8 && defined(__AVX2__)
  int64_t eight;
  __builtin_memcpy(&eight, &bytes, sizeof eight);
  Words words = (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
#else
  Words words = __builtin_convertvector(bytes, Words);
#endif
  Words magnitude = words & splat_word(0x7F);
  Floats value = rebiased(magnitude << 20, 120);
  value = magnitude == splat_word(0x7F) ? (Floats)splat_word(0x7FC00000u) : value;
  return (Floats)((Words)value | ((words & splat_word(0x80)) << 24));
}

FISSILE_INLINE void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }

FISSILE_INLINE Words load_words(const void* from) {
  Words words;
  // NOLINTNEXTLINE(clang-analyzer-unix.cstring.NullArg): the analyzer assumes a null pointer that no caller passes.
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

FISSILE_INLINE void store_words(void* to, Words words) { __builtin_memcpy(to, &words, sizeof words); }

// Two vectors of numbers, and how many numbers they hold.
constexpr int64_t TWO = 2 * WIDTH;
struct Two {
  Floats first;
  Floats second;
};

// In memory order.
FISSILE_INLINE Two load_two(const float* from) { return {load(from), load(from + WIDTH)}; }

FISSILE_INLINE Two load_two(const Half* from) { return {load(from), load(from + WIDTH)}; }
FISSILE_INLINE Two load_two(const Fp8* from) { return {load(from), load(from + WIDTH)}; }

// Even positions first, then odd ones: this takes one shift and one mask. Memory order would take twice as long.
FISSILE_INLINE Two load_two(const Bf16* from) {
  Words words;
  __builtin_memcpy(&words, from, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & splat_word(0xFFFF0000u))};
}

FISSILE_INLINE void store_two(float* to, Two two) {
  store(to, two.first);
  store(to + WIDTH, two.second);
}

#if FISSILE_WIDTH == 16
#define FISSILE_SHUFFLED(a, b, at) \
  __builtin_shufflevector(a, b, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), \
                          at(12), at(13), at(14), at(15))
#else
#define FISSILE_SHUFFLED(a, b, at) __builtin_shufflevector(a, b, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7))
#endif

// as_loaded reorders numbers from memory order to load_two's order for the type; as_stored reverses it.
FISSILE_INLINE Two as_loaded(Two two, const float*) { return two; }
FISSILE_INLINE Two as_stored(Two two, const float*) { return two; }

FISSILE_INLINE Two as_loaded(Two two, const Bf16*) {
#define FISSILE_EVEN(lane) (2 * (lane))
#define FISSILE_ODD(lane) (2 * (lane) + 1)
  return {FISSILE_SHUFFLED(two.first, two.second, FISSILE_EVEN), FISSILE_SHUFFLED(two.first, two.second, FISSILE_ODD)};
#undef FISSILE_EVEN
#undef FISSILE_ODD
}

FISSILE_INLINE Two as_stored(Two two, const Bf16*) {
#define FISSILE_LOWER(lane) ((lane) / 2 + (lane) % 2 * WIDTH)
#define FISSILE_UPPER(lane) (WIDTH / 2 + (lane) / 2 + (lane) % 2 * WIDTH)
  return {FISSILE_SHUFFLED(two.first, two.second, FISSILE_LOWER),
          FISSILE_SHUFFLED(two.first, two.second, FISSILE_UPPER)};
#undef FISSILE_LOWER
#undef FISSILE_UPPER
}

// Rounds to bfloat16, ties to even. The bfloat16 bits are in the upper half of each word; the lower half is undefined.
// Wrong for NaN.
FISSILE_INLINE Words nearest(Floats value) {
  const Words bits = (Words)value;
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  // Adds under a mask, since the processor has only one port for shifts.
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, (__m512i)splat_word(0x10000));
  const Words down = bits + splat_word(0x7FFF);
  return (Words)_mm512_mask_add_epi32((__m512i)down, odd, (__m512i)bits, (__m512i)splat_word(0x8000));
#else
  return bits + splat_word(0x7FFF) + ((bits >> 16) & splat_word(1));
#endif
}

// The bits of the nearest bfloat16 in the lower half of each word; NaN stays NaN.
FISSILE_INLINE Words narrowed(Floats value) {
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  // An intrinsic, since compilers turn `value == value` into two comparisons.
  const __mmask16 numbers = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  return (Words)_mm512_mask_srli_epi32((__m512i)splat_word(0x7FC0), numbers, (__m512i)nearest(value), 16);
#else
  return (Words)(value == value) ? nearest(value) >> 16 : splat_word(0x7FC0);
#endif
}

FISSILE_INLINE void store(Bf16* to, Floats value) {
  Words words = narrowed(value);
#if FISSILE_WIDTH == 8 && defined(__AVX2__)
  __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif FISSILE_WIDTH == 16 && defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)words));
#else
  Halves halves = __builtin_convertvector(words, Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
#endif
}

// Clamps x to [-most, most], the range of a narrower format; NaN stays NaN.
FISSILE_INLINE Floats limited(Floats x, float most) {
  return x > splat(most) ? splat(most) : (x < splat(-most) ? splat(-most) : x);
}

// Rounds to a format with `dropped` fewer mantissa bits and an exponent bias lower by `bias`, ties to even. Returns
// exponent and mantissa without the sign. The value must be within the format's range. Results that are denormal in the
// format are rounded by a float32 addition.
FISSILE_INLINE Words narrowed_to(Floats value, int dropped, uint32_t bias) {
  Words magnitude = (Words)value & splat_word(0x7FFFFFFFu);
  Words rounded = magnitude + splat_word((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & splat_word(1));
  Words normal = (rounded >> dropped) - splat_word(bias << (23 - dropped));
  const Words unit = splat_word((bias + 1 + dropped) << 23);
  Words small = (Words)((Floats)magnitude + (Floats)unit) - unit;
  return magnitude < splat_word((bias + 1) << 23) ? small : normal;
}

// Values beyond the range of Half or Fp8 are stored as the largest number of the format.
FISSILE_INLINE void store(Half* to, Floats value) {
  Words words = narrowed_to(limited(value, 65504.0f), 13, 112);
  words = ((Words)(value == value) ? words : splat_word(0x7E00)) | (((Words)value >> 16) & splat_word(0x8000));
  Halves halves = __builtin_convertvector(words, Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}

FISSILE_INLINE void store(Fp8* to, Floats value) {
  Words words = narrowed_to(limited(value, 448.0f), 20, 120);
  words = ((Words)(value == value) ? words : splat_word(0x7F)) | (((Words)value >> 24) & splat_word(0x80));
  Bytes bytes = __builtin_convertvector(words, Bytes);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

// The value rounded to `Number`, as float32.
FISSILE_INLINE Floats rounded(Floats value, const float*) { return value; }
FISSILE_INLINE Floats rounded(Floats value, const Bf16*) {
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  const __mmask16 numbers = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  const __m512i upper = (__m512i)splat_word(0xFFFF0000u), nan = (__m512i)splat_word(0x7FC00000u);
  return (Floats)_mm512_mask_and_epi32(nan, numbers, (__m512i)nearest(value), upper);
#else
  return (Floats)(narrowed(value) << 16);
#endif
}

FISSILE_INLINE void store_two(Bf16* to, Two two) {
  store_words(to, (Words)rounded(two.first, to) >> 16 | (Words)rounded(two.second, to));
}

// Loads the first `count` < WIDTH numbers and fills up with zeros.
template <class Number>
FISSILE_INLINE Floats load_part(const Number* from, int64_t count) {
  Number buffer[WIDTH] = {};
  for (int64_t i = 0; i < count; i++) buffer[i] = from[i];
  return load(buffer);
}

// Loads the first `count` < 2 * WIDTH numbers and fills up with zeros, in load_two's order.
template <class Number>
FISSILE_INLINE Two load_two_part(const Number* from, int64_t count) {
  Number buffer[2 * WIDTH] = {};
  for (int64_t i = 0; i < count; i++) buffer[i] = from[i];
  return load_two(buffer);
}

template <class Number>
FISSILE_INLINE void store_part(Number* to, Floats value, int64_t count) {
  Number buffer[WIDTH];
  store(buffer, value);
  for (int64_t i = 0; i < count; i++) to[i] = buffer[i];
}

// Loads the first WIDTH of `count` numbers: one vector load if there are enough, otherwise number by number.
template <class Number>
FISSILE_INLINE Floats load_up_to(const Number* from, int64_t count) {
  return count >= WIDTH ? load(from) : load_part(from, count);
}

template <class Number>
FISSILE_INLINE void store_up_to(Number* to, Floats value, int64_t count) {
  if (count >= WIDTH) store(to, value);
  else store_part(to, value, count);
}

// Loads the first TWO of `count` numbers in load_two's order.
template <class Number>
FISSILE_INLINE Two load_two_up_to(const Number* from, int64_t count) {
  return count >= TWO ? load_two(from) : load_two_part(from, count);
}

template <class Number>
FISSILE_INLINE void store_two_up_to(Number* to, Two two, int64_t count) {
  if (count >= TWO) return store_two(to, two);
  Number buffer[TWO];
  store_two(buffer, two);
  for (int64_t i = 0; i < count; i++) to[i] = buffer[i];
}

#if FISSILE_WIDTH == 16
FISSILE_INLINE Floats8 folded(Floats x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else
FISSILE_INLINE Floats8 folded(Floats x) { return x; }
#endif

// Sums of the lanes of four vectors. Each vector uses the same tree of additions, whichever of the four it is.
FISSILE_INLINE Floats4 sums_of_4(const Floats* x) {
  Floats8 pairs[2];
  for (int i = 0; i < 2; i++) {
    Floats8 a = folded(x[2 * i]), b = folded(x[2 * i + 1]);
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Floats8 fours = __builtin_shufflevector(pairs[0], pairs[1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(pairs[0], pairs[1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(fours, fours, 0, 1, 2, 3) + __builtin_shufflevector(fours, fours, 4, 5, 6, 7);
}

// Sum of a vector's lanes, always by the same tree of additions.
FISSILE_INLINE float sum(Floats x) {
  Floats8 eight = folded(x);
  Floats4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

FISSILE_INLINE float largest(Floats x) {
#if FISSILE_WIDTH == 16
  Floats8 upper = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  Floats8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  eight = eight > upper ? eight : upper;
#else
  Floats8 eight = x;
#endif
  Floats4 a = __builtin_shufflevector(eight, eight, 0, 1, 2, 3), b = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  a = a > b ? a : b;
  b = __builtin_shufflevector(a, a, 2, 3, 0, 1);
  a = a > b ? a : b;
  return a[0] > a[1] ? a[0] : a[1];
}

// e^x to about one unit in the last place for x in [-87, 88]. x outside that range is clamped to it; NaN gives NaN.
//
// Reduces x by ln 2 in two parts (Cody and Waite), then evaluates a polynomial with the coefficients of Cephes' expf.
FISSILE_INLINE Floats exp(Floats x) {
  // maximum and minimum return their second argument for NaN, so NaN stays NaN.
  Floats clamped = minimum(splat(88.0f), maximum(splat(-87.0f), x));
  Floats shifted = fma(clamped, splat(1.44269504088896341f), splat(12582912.0f));
  Floats whole = shifted - splat(12582912.0f);
  Floats rest = fma(whole, splat(-0.693359375f), clamped);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  Floats y = splat(1.9875691500e-4f);
  y = fma(y, rest, splat(1.3981999507e-3f));
  y = fma(y, rest, splat(8.3334519073e-3f));
  y = fma(y, rest, splat(4.1665795894e-2f));
  y = fma(y, rest, splat(1.6666665459e-1f));
  y = fma(y, rest, splat(5.0000001201e-1f));
  y = fma(y, rest * rest, rest) + splat(1.0f);
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return _mm512_scalef_ps(y, whole);
#else
  Ints exponent = ((Ints)shifted - (Ints)splat(12582912.0f)) << 23;
  Floats result = (Floats)((Ints)y + exponent);
  return x == x ? result : x;
#endif
}

// cap * tanh(x / cap), which bounds x smoothly to +-cap; NaN gives NaN.
FISSILE_INLINE Floats softcapped(Floats x, float cap) {
  return splat(cap) - splat(2.0f * cap) / (exp(x * splat(2.0f / cap)) + splat(1.0f));
}

}  // namespace FISSILE_ISA
