// Sampling with Gumbel noise, without sorting. Draws exactly the tokens of kernels/sampling.py
// (docs/explanation/determinism.md).
//
// Ids are ordered by value, descending, then by id, ascending. key_of() maps a float's bits to an integer of the same
// order. So the border of top-k or top-p is found with histograms of key bits, of counts or of integer masses. The kept
// ids are all ids above the border and the first few ids equal to it. Top-k and min-p look at few ids: one pass over
// the row divides by the temperature and stores the largest value of each block of ids, and later passes skip blocks
// whose values are all too small. Noise is computed in float64, but only for ids that can still win. Without a filter,
// most blocks are skipped by a bound on their largest noise, which vectors compute from their random words.
#include "sampling.hpp"

#include "scratch.hpp"

namespace FISSILE_ISA {
namespace {

constexpr int64_t ALL = INT64_MAX;
// A mass, in units of 2^-44, rounds to zero if the value is further than this below the largest.
constexpr float NO_MASS_BELOW = -31.5f;
// Above any noise: -log(-log1p(-2^-33)) is 22.9.
constexpr double MOST_NOISE = 23.0;
constexpr double LN_2 = 0.6931471805599454;
constexpr uint32_t DOMAIN = 0x46534C31;
// Bits of a key that each histogram covers, from the highest: 11 + 11 + 10.
constexpr int LEVELS = 3;
constexpr int BITS[LEVELS] = {11, 11, 10};
constexpr int64_t MOST_BINS = 1 << 11;

uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Maps a float to an integer of the same order; both zeros have the same key.
uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The ids that a filter keeps: those with keys above `key`, and the first `ties` ids with this key.
struct Border {
  uint32_t key = 0;
  int64_t ties = ALL;
};

// What random words depend on, beside the id.
struct Stream {
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
};

using Longs = int64_t __attribute__((vector_size(WIDTH * 4)));
using UnsignedLongs = uint64_t __attribute__((vector_size(WIDTH * 4)));
constexpr int LONGS = WIDTH / 2;

FISSILE_INLINE uint64_t product(uint64_t x, uint32_t factor) { return (x & 0xFFFFFFFFu) * factor; }

FISSILE_INLINE UnsignedLongs product(UnsignedLongs x, uint32_t factor) {
#if FISSILE_WIDTH == 16 && defined(__AVX512F__)
  return (UnsignedLongs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif FISSILE_WIDTH == 8 && defined(__AVX2__)
  return (UnsignedLongs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  return (x & 0xFFFFFFFFu) * factor;
#endif
}

// Philox4x32-10 (kernels/philox.py) of one number or of a vector. words[i] holds the random word of id 4 * ids_over_4 +
// i in its lower half; the upper half is undefined.
template <class Number>
struct Philox {
  Number words[4];

  Philox(Number ids_over_4, const Stream& stream)
      : words{ids_over_4, Number{} + stream.position, Number{} + stream.choice, Number{} + DOMAIN} {
    uint32_t k0 = static_cast<uint32_t>(stream.seed), k1 = static_cast<uint32_t>(stream.seed >> 32);
    for (int round = 0; round < 10; round++) {
      const Number first = product(words[0], 0xD2511F53u), second = product(words[2], 0xCD9E8D57u);
      words[0] = (second >> 32) ^ words[1] ^ k0;
      words[1] = second;
      words[2] = (first >> 32) ^ words[3] ^ k1;
      words[3] = first;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

float gumbel(uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return static_cast<float>(-__builtin_log(-__builtin_log1p(-uniform)));
}

// Upper bound of gumbel(word), which is -log of a number above `uniform`; `uniform` is at least 2^-(leading zeros + 1).
double noise_bound(uint32_t word) { return ((word ? __builtin_clz(word) : 32) + 1) * LN_2; }

// First index from `begin` on with values[index] == value. Such an index must exist.
int64_t first_equal(const float* values, int64_t begin, float value) {
  while (values[begin] != value) begin++;
  return begin;
}

// ceil(fraction * total) for 0 <= fraction < 1, exactly. At least 1, since one id is always kept.
int64_t ceil_product(float fraction, int64_t total) {
  const uint32_t bits = bits_of(fraction);
  const int exponent = static_cast<int>(bits >> 23);
  const uint64_t mantissa = exponent ? (bits & 0x7FFFFFu) | 0x800000u : bits & 0x7FFFFFu;
  const int shift = 150 - (exponent ? exponent : 1);
  using Wide = unsigned __int128;
  const Wide product = Wide{mantissa} * static_cast<uint64_t>(total);
  if (shift >= 100 || product == 0) return 1;
  return static_cast<int64_t>((product + ((Wide{1} << shift) - 1)) >> shift);
}

template <class Number>
void find_largest(const Number* y, int64_t columns, float& value, int64_t& place) {
  const int64_t whole = columns / WIDTH * WIDTH;
  Floats best = splat(-__builtin_inff());
  for (int64_t i = 0; i < whole; i += WIDTH) best = maximum(load(y + i), best);
  value = largest(best);
  for (int64_t i = whole; i < columns; i++) value = widened(y[i]) > value ? widened(y[i]) : value;
  place = 0;
  if (value == -__builtin_inff()) return;
  while (widened(y[place]) != value) place++;
}

// First id of the largest value, or NO_TOKEN if that is not finite. NaN counts as -infinity.
int64_t first_largest(const float* values, int64_t count) {
  float value;
  int64_t place;
  find_largest(values, count, value, place);
  return __builtin_isfinite(value) ? place : fissile::NO_TOKEN;
}

// |x|, also for NaN with a sign.
FISSILE_INLINE Floats magnitude(Floats x) { return (Floats)((Words)x & splat_word(0x7FFFFFFFu)); }

// One row's penalties, broadcast to all lanes; see kernels/penalties.py.
struct Penalty {
  Floats repetition, presence, frequency;

  __attribute__((always_inline)) Floats of(Floats before, Floats counts) const {
    const Floats infinity = splat(__builtin_inff()), most = splat(__FLT_MAX__);
    Floats value = before > 0.0f ? before / repetition : before * repetition;
    // A finite value that overflows by a small penalty stays finite, since infinity means that the model's output is
    // invalid.
    const Ints overflowed = (magnitude(value) == infinity) & (magnitude(before) != infinity);
    value = overflowed ? (value > 0.0f ? most : -most) : value;
    value -= counts > 0.0f ? presence : Floats{};
    value -= frequency * counts;
    return value;
  }
};

// Ids that are examined, or skipped, together.
constexpr int64_t BLOCK = 64;
// Floats of a cache line.
constexpr int64_t LINE = 16;

int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Applies penalties `i` to their row of logits. Gathers up to BLOCK values, changes them with vectors, and scatters
// them; each id occurs once, so no change depends on another. Prefetches the whole row first: the sampler reads all of
// it anyway, and scattered ids would wait for memory one by one.
void penalize(const fissile::Penalties& given, int64_t i, float* logits, int64_t vocab) {
  for (int64_t first = 0; first < vocab; first += LINE) __builtin_prefetch(logits + first);
  // NOLINTBEGIN(performance-no-int-to-ptr): Python passes arrays by their addresses, as integers.
  const int32_t* const ids = reinterpret_cast<const int32_t*>(given.ids[2 * i]);
  const float* const counts = reinterpret_cast<const float*>(given.counts[i]);
  // NOLINTEND(performance-no-int-to-ptr)
  const int64_t number = given.ids[2 * i + 1];
  const Penalty penalty{splat(given.repetition[i]), splat(given.presence[i]), splat(given.frequency[i])};
  float values[BLOCK] = {};
  for (int64_t first = 0; first < number; first += BLOCK) {
    const int64_t size = at_most(number - first, BLOCK);
    for (int64_t k = 0; k < size; k++) values[k] = logits[ids[first + k]];
    for (int64_t k = 0; k < size; k += WIDTH)
      store(values + k, penalty.of(load(values + k), load_up_to(counts + first + k, size - k)));
    for (int64_t k = 0; k < size; k++) logits[ids[first + k]] = values[k];
  }
}

// Sets the logits of ids to -infinity whose mask bit is not set, for `size` ids from `first` on. `first` is a multiple
// of 32.
FISSILE_INLINE void confine(const uint32_t* mask, float* logits, int64_t first, int64_t size) {
  constexpr int64_t BITS_OF_WORD = 32;
  const Floats none = splat(-__builtin_inff());
  const Words lanes = (Words)lane_numbers();
  for (int64_t i = first; i < first + size; i += BITS_OF_WORD) {
    const uint32_t word = mask[i / BITS_OF_WORD];
    if (word == 0xFFFFFFFFu) continue;
    const int64_t left = first + size - i;
    if (left < BITS_OF_WORD) {
      for (int64_t bit = 0; bit < left; bit++)
        if (!((word >> bit) & 1u)) logits[i + bit] = -__builtin_inff();
      continue;
    }
    for (int bit = 0; bit < BITS_OF_WORD; bit += WIDTH) {
      const Words own = (splat_word(word >> bit) >> lanes) & splat_word(1);
      store(logits + i + bit, own != splat_word(0) ? load(logits + i + bit) : none);
    }
  }
}

// Writes logits / temperature to `scaled` and the largest value of each block to `largest_of`. Returns the largest
// value, or NaN if the row has one. Calls `prepare(first, size)` before it reads a block, so that writing masks needs
// no pass of its own.
template <class Function>
__attribute__((always_inline)) inline float scale(const float* logits, int64_t count, float temperature, float* scaled,
                                                  float* largest_of, Function prepare) {
  const Floats divisor = splat(temperature);
  float highest = -__builtin_inff();
  bool nan = false;
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = count - first < BLOCK ? count - first : BLOCK;
    prepare(first, size);
    Floats best = splat(-__builtin_inff());
    Ints strange = {};
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      const Floats x = load(logits + first + i) / divisor;
      store(scaled + first + i, x);
      strange |= x != x;
      best = maximum(x, best);
    }
    float one = largest(best);
    for (int lane = 0; lane < WIDTH; lane++) nan |= strange[lane] != 0;
    for (; i < size; i++) {
      const float x = scaled[first + i] = logits[first + i] / temperature;
      nan |= x != x;
      one = x > one ? x : one;
    }
    largest_of[first / BLOCK] = one;
    highest = one > highest ? one : highest;
  }
  return nan ? __builtin_nanf("") : highest;
}

// The smallest random word of a block's ids, which gives the largest noise.
uint32_t least_word(int64_t first_id, const Stream& stream) {
  Longs least = Longs{} + INT64_MAX;
  for (int64_t i = 0; i < BLOCK / 4; i += LONGS) {
    UnsignedLongs ids_over_4;
    for (int lane = 0; lane < LONGS; lane++) ids_over_4[lane] = static_cast<uint64_t>(first_id / 4 + i + lane);
    const Philox<UnsignedLongs> made(ids_over_4, stream);
    for (const UnsignedLongs& word : made.words) {
      const Longs low = (Longs)(word & 0xFFFFFFFFu);
      least = low < least ? low : least;
    }
  }
  int64_t one = least[0];
  for (int lane = 1; lane < LONGS; lane++) one = least[lane] < one ? least[lane] : one;
  return static_cast<uint32_t>(one);
}

using Doubles = double __attribute__((vector_size(WIDTH * 4)));
using HalfFloats = float __attribute__((vector_size(WIDTH * 2)));
constexpr int DOUBLES = LONGS;
// Coefficients of the series of e^r, from the highest power to the square: 1 / 13!, ..., 1 / 2!.
constexpr double SERIES[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                             1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                             1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};

FISSILE_INLINE Doubles splat_double(double value) { return Doubles{} + value; }
FISSILE_INLINE HalfFloats splat_half(float value) { return HalfFloats{} + value; }

// rint(e^x * 2^44) for x in [NO_MASS_BELOW, 0]. Exact for 0; one result in 10^4 is off by one, since e^x is accurate to
// about one unit in the last place. Reduces x by ln 2 in two parts, then evaluates the series.
FISSILE_INLINE Longs masses_of(Doubles x) {
  const Doubles magic = splat_double(0x1.8p52);
  const Doubles shifted = x * splat_double(0x1.71547652b82fep0) + magic;
  const Doubles whole = shifted - magic;
  const Doubles r = (x - whole * splat_double(0x1.62e42fee00000p-1)) - whole * splat_double(0x1.a39ef35793c76p-33);
  Doubles y = {};
  for (const double factor : SERIES) y = y * r + splat_double(factor);
  y = y * r * r + r + splat_double(1.0);
  const Longs exponent = ((Longs)shifted - (Longs)magic + 44) << 52;
  return (Longs)((Doubles)((Longs)y + exponent) + magic) - (Longs)magic;
}

// Scratch memory for one row.
struct Room {
  float* scaled;
  float* largest_of;
  float* values;
  int64_t* ids;
  int64_t* masses;
  int64_t* places;
  int64_t* bins;

  static int64_t numbers(int64_t vocab) { return 8 * vocab + blocks_of(vocab) + 2 * MOST_BINS; }

  Room(float* memory, int64_t vocab)
      : bins(reinterpret_cast<int64_t*>(memory)) {
    masses = bins + MOST_BINS;
    ids = masses + vocab;
    places = ids + vocab;
    scaled = reinterpret_cast<float*>(places + vocab);
    values = scaled + vocab;
    largest_of = values + vocab;
  }
};

// Some ids of a row, in ascending order. The likeliest id is always among them.
struct Row {
  const float* values;
  // Null for all ids; only then `room.largest_of` has their blocks.
  const int64_t* ids;
  int64_t count;
  float highest;
  const Room& room;

  int64_t id_of(int64_t i) const { return ids ? ids[i] : i; }

  // Calls f(i, key) for each i of [begin, end) that the border keeps. Counts `ties` down.
  template <class Function>
  __attribute__((always_inline)) void each(int64_t begin, int64_t end, Border border, int64_t& ties, Function f) const {
    for (int64_t i = begin; i < end; i++) {
      const uint32_t key = key_of(values[i]);
      if (key > border.key || (key == border.key && ties-- > 0)) f(i, key);
    }
  }

  template <class Function>
  __attribute__((always_inline)) void each(Border border, Function f) const {
    int64_t ties = border.ties;
    each(0, count, border, ties, f);
  }

  // Masses of DOUBLES ids from `first` on; zero for values far below the highest and past the end.
  __attribute__((always_inline)) Longs masses_at(int64_t first) const {
    const int64_t size = at_most(count - first, DOUBLES);
    HalfFloats some = splat_half(-__builtin_inff());
    if (size == DOUBLES) __builtin_memcpy(&some, values + first, sizeof some);
    else __builtin_memcpy(&some, values + first, static_cast<uint64_t>(size) * sizeof *values);
    const Doubles below = __builtin_convertvector(some - highest, Doubles);
    const Longs seen = below >= splat_double(NO_MASS_BELOW);
    return masses_of(seen ? below : Doubles{}) & seen;
  }

  // The sum of all masses.
  int64_t mass() const {
    Longs sums = {};
    for (int64_t first = 0; first < count; first += DOUBLES) sums += masses_at(first);
    int64_t total = 0;
    for (int lane = 0; lane < DOUBLES; lane++) total += sums[lane];
    return total;
  }

  void weigh() const {
    for (int64_t first = 0; first < count; first += DOUBLES) {
      const Longs masses = masses_at(first);
      const int64_t size = at_most(count - first, DOUBLES);
      if (size == DOUBLES) __builtin_memcpy(room.masses + first, &masses, sizeof masses);
      else __builtin_memcpy(room.masses + first, &masses, static_cast<uint64_t>(size) * sizeof *room.masses);
    }
  }

  // The bin at which the sum of the bins, from the highest down, reaches `wanted` > 0. Subtracts the bins above it from
  // `wanted`.
  uint32_t border_bin(int64_t bins, int64_t& wanted) const {
    int64_t bin = bins - 1;
    for (; bin > 0 && room.bins[bin] < wanted; bin--) wanted -= room.bins[bin];
    return static_cast<uint32_t>(bin);
  }

  // The key at which the sum of weight(i), from the highest key down, reaches `wanted` > 0. Subtracts the weights of
  // all keys above it from `wanted`, and sets `place` to an index with this key. Levels after the first look only at
  // ids in the first level's bin.
  template <class Weight>
  __attribute__((always_inline)) uint32_t border_key(Border from, int64_t& wanted, int64_t& place, Weight weight) const {
    int shift = 32 - BITS[0];
    __builtin_memset(room.bins, 0, MOST_BINS * sizeof *room.bins);
    each(from, [&](int64_t i, uint32_t key) { room.bins[key >> shift] += weight(i); });
    uint32_t known = border_bin(int64_t{1} << BITS[0], wanted);
    int64_t inside = 0;
    each(from, [&](int64_t i, uint32_t key) {
      if (key >> shift == known) room.places[inside++] = i;
    });
    for (int level = 1; level < LEVELS; level++) {
      const int above = shift;
      shift -= BITS[level];
      const int64_t size = int64_t{1} << BITS[level];
      __builtin_memset(room.bins, 0, static_cast<uint64_t>(size) * sizeof *room.bins);
      for (int64_t j = 0; j < inside; j++) {
        const uint32_t key = key_of(values[room.places[j]]);
        if (key >> above == known) room.bins[(key >> shift) & static_cast<uint32_t>(size - 1)] += weight(room.places[j]);
      }
      known = (known << BITS[level]) | border_bin(size, wanted);
    }
    for (int64_t j = 0; j < inside; j++)
      if (key_of(values[room.places[j]]) == known) place = room.places[j];
    return known;
  }

  uint32_t key_at(Border from, int64_t& rank) const {
    int64_t place;
    return border_key(from, rank, place, [](int64_t) { return int64_t{1}; });
  }

  Border top_k(Border from, int64_t k) const {
    int64_t kept = 0;
    each(from, [&](int64_t, uint32_t) { kept++; });
    if (k >= kept) return from;
    int64_t left = k;
    const uint32_t key = key_at(from, left);
    return {key, left};
  }

  Border top_p(Border from, float fraction) const {
    weigh();
    return reaching(ceil_product(fraction, weighed(from)), from);
  }

  // The sum of the masses of the ids that the border keeps. Needs weigh().
  int64_t weighed(Border from) const {
    int64_t total = 0;
    each(from, [&](int64_t i, uint32_t) { total += room.masses[i]; });
    return total;
  }

  // The border that keeps a mass of at least `wanted`. Needs weigh().
  Border reaching(int64_t wanted, Border from) const {
    int64_t place = 0;
    const uint32_t key = border_key(from, wanted, place, [&](int64_t i) { return room.masses[i]; });
    return {key, (wanted + room.masses[place] - 1) / room.masses[place]};
  }

  // The ids whose value is at least `lowest`.
  Row at_least(float lowest) const {
    int64_t kept = 0;
    for (int64_t block = 0; block < blocks_of(count); block++) {
      if (room.largest_of[block] < lowest) continue;
      const int64_t end = (block + 1) * BLOCK < count ? (block + 1) * BLOCK : count;
      for (int64_t i = block * BLOCK; i < end; i++) {
        room.values[kept] = values[i];
        room.ids[kept] = i;
        kept += values[i] >= lowest;
      }
    }
    return {room.values, room.ids, kept, highest, room};
  }

  // The id with the largest value plus noise among those that the border keeps; the lower id among equals.
  int64_t best(Border border, const Stream& stream) const {
    int64_t four = -1;
    Philox<uint64_t> some(0, stream);
    auto word_of = [&](int64_t id) {
      if (id >> 2 != four) some = {static_cast<uint64_t>(four = id >> 2), stream};
      return static_cast<uint32_t>(some.words[id & 3]);
    };
    // Subtracts a margin for the rounding of scores to float32.
    auto below = [](float score) { return score - 1e-6 * (1.0 + __builtin_fabs(score)); };
    // Computes the score of the likeliest id first: every border keeps it, and few other ids come near its score.
    int64_t block_of_likeliest = 0;
    while (!ids && room.largest_of[block_of_likeliest] != highest) block_of_likeliest++;
    const int64_t likeliest = first_equal(values, block_of_likeliest * BLOCK, highest);
    int64_t found = id_of(likeliest);
    float score = highest + gumbel(word_of(found));
    double hopeless = below(score);
    auto consider = [&](int64_t i, uint32_t) {
      const double value = values[i];
      if (value + MOST_NOISE < hopeless) return;
      const int64_t id = id_of(i);
      const uint32_t word = word_of(id);
      if (value + noise_bound(word) < hopeless) return;
      const float own = values[i] + gumbel(word);
      if (own > score || (own == score && id < found)) {
        score = own;
        found = id;
        hopeless = below(score);
      }
    };
    int64_t ties = border.ties;
    for (int64_t first = 0; first < count; first += BLOCK) {
      // A block skipped by its values may hold ties of the border; later ties have the same value, so they cannot win
      // either. A block skipped by its random words may not, hence the test for ALL.
      const double most = ids ? 0.0 : room.largest_of[first / BLOCK];
      if (!ids && most + MOST_NOISE < hopeless) continue;
      if (!ids && border.ties == ALL && most + noise_bound(least_word(first, stream)) < hopeless) continue;
      each(first, first + BLOCK < count ? first + BLOCK : count, border, ties, consider);
    }
    return found;
  }
};

float value_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

float lowest_by_min_p(float highest, float fraction) {
  return highest + static_cast<float>(__builtin_log(static_cast<double>(fraction)));
}

// A lower bound of the k-th largest value: at least k blocks have a value that large.
float lowest_by_top_k(const Row& all, int64_t k) {
  const int64_t blocks = blocks_of(all.count);
  if (k > blocks) return -__builtin_inff();
  const Row largest_ones{all.room.largest_of, nullptr, blocks, all.highest, all.room};
  int64_t rank = k;
  return value_of(largest_ones.key_at(Border{}, rank));
}

// Distances below the highest value within which the ids of a nucleus are searched, before all ids are.
constexpr float NUCLEUS[] = {6.0f, 12.0f};

// Applies top-p to all ids. Returns the ids within the smallest distance of NUCLEUS that have enough mass, or all ids,
// and sets `border` for them.
Row nucleus(const Row& all, float fraction, Border& border) {
  const int64_t wanted = ceil_product(fraction, all.mass());
  for (const float below : NUCLEUS) {
    const Row likely = all.at_least(all.highest - below);
    likely.weigh();
    if (likely.weighed(border) < wanted) continue;
    border = likely.reaching(wanted, border);
    return likely;
  }
  all.weigh();
  border = all.reaching(wanted, border);
  return all;
}

int64_t sample_row(const fissile::Sample& work, int64_t row, const Row& all) {
  const float min_p = work.min_p[row], top_p = work.top_p[row];
  const int64_t top_k = work.top_k[row];
  float lowest = -__builtin_inff();
  if (min_p > 0.0f) lowest = lowest_by_min_p(all.highest, min_p);
  if (top_k > 0) {
    const float by_k = lowest_by_top_k(all, top_k);
    lowest = by_k > lowest ? by_k : lowest;
  }
  const Stream stream{work.seeds[row], static_cast<uint32_t>(work.positions[row]),
                      static_cast<uint32_t>(work.choices[row])};
  Border border;
  if (lowest == -__builtin_inff() && top_k == 0 && top_p < 1.0f)
    return nucleus(all, top_p, border).best(border, stream);
  const Row kept = lowest == -__builtin_inff() ? all : all.at_least(lowest);
  if (top_k > 0) border = kept.top_k(border, top_k);
  if (top_p < 1.0f) border = kept.top_p(border, top_p);
  return kept.best(border, stream);
}

// Number of values that are above `own`, or equal to it if OR_EQUAL.
template <bool OR_EQUAL>
int64_t count_above(const float* values, int64_t count, float own) {
  const Floats least = splat(own);
  // A true lane is -1.
  Ints found = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) found += OR_EQUAL ? load(values + i) >= least : load(values + i) > least;
  int64_t number = 0;
  for (int lane = 0; lane < WIDTH; lane++) number -= found[lane];
  for (; i < count; i++) number += OR_EQUAL ? values[i] >= own : values[i] > own;
  return number;
}

// Rank of a token, 1 for the likeliest id; equal logits rank in the order of their ids.
int64_t rank_of(const float* logits, int64_t vocab, int64_t token) {
  return 1 + count_above<true>(logits, token, logits[token]) +
         count_above<false>(logits + token + 1, vocab - token - 1, logits[token]);
}

// The `top` likeliest ids, best first, by insertion into a sorted list.
void find_top(const Row& all, int64_t top, int64_t* ids, float* logits) {
  const Row likely = all.at_least(lowest_by_top_k(all, top));
  int64_t found = 0;
  for (int64_t i = 0; i < likely.count; i++) {
    const float value = likely.values[i];
    if (found == top && value <= logits[top - 1]) continue;
    int64_t place = found < top ? found++ : top - 1;
    // Ids ascend, so an equal value that is in the list already stays before this one.
    for (; place > 0 && value > logits[place - 1]; place--) {
      ids[place] = ids[place - 1];
      logits[place] = logits[place - 1];
    }
    ids[place] = likely.id_of(i);
    logits[place] = value;
  }
}

}  // namespace

void largest_of_row(const fissile::Largest& work, int64_t row) {
  float& value = work.values[row];
  int64_t& place = work.places[row];
  if (work.dtype == fissile::FLOAT32)
    find_largest(static_cast<const float*>(work.y) + row * work.row_stride, work.columns, value, place);
  else
    find_largest(static_cast<const Bf16*>(work.y) + row * work.row_stride, work.columns, value, place);
}

void logprobs(const fissile::Logprobs& work, int64_t row) {
  const float* logits = work.logits + row * work.row_stride;
  int64_t& mass = work.masses[row];
  float* memory = fissile::scratch(fissile::OF_TASK, Room::numbers(work.vocab));
  mass = fissile::NO_MEMORY;
  if (!memory) return;
  const Room room(memory, work.vocab);
  // At temperature 1 this copies the logits and finds the largest of each block.
  const float highest = scale(logits, work.vocab, 1.0f, room.scaled, room.largest_of, [](int64_t, int64_t) {});
  work.highest[row] = highest;
  mass = 0;
  if (!__builtin_isfinite(highest)) return;
  const Row all{room.scaled, nullptr, work.vocab, highest, room};
  mass = all.mass();
  work.ranks[row] = rank_of(logits, work.vocab, work.tokens[row]);
  if (work.top) find_top(all, work.top, work.top_ids + row * work.top, work.top_logits + row * work.top);
}

void sample(const fissile::Sample& work, int64_t row) {
  float* logits = work.logits + row * work.row_stride;
  // Penalizes here rather than in a pass over all rows, since the row is in this core's cache afterwards.
  if (work.penalty_of && work.penalty_of[row] >= 0) penalize(work.penalties, work.penalty_of[row], logits, work.vocab);
  const uint32_t* const mask =
      work.mask_of && work.mask_of[row] >= 0 ? work.masks + work.mask_of[row] * work.words : nullptr;
  const float temperature = work.temperature[row];
  int64_t& id = work.ids[row];
  float* memory =
      temperature == 0.0f ? nullptr : fissile::scratch(fissile::OF_TASK, Room::numbers(work.vocab));
  if (!memory) {
    if (mask) confine(mask, logits, 0, work.vocab);
    id = temperature == 0.0f ? first_largest(logits, work.vocab) : fissile::NO_MEMORY;
    return;
  }
  const Room room(memory, work.vocab);
  const float highest = scale(logits, work.vocab, temperature, room.scaled, room.largest_of,
                              [&](int64_t first, int64_t size) { if (mask) confine(mask, logits, first, size); });
  if (__builtin_isfinite(highest)) id = sample_row(work, row, {room.scaled, nullptr, work.vocab, highest, room});
  // The row has a NaN, or the division by the temperature overflowed.
  else id = first_largest(logits, work.vocab);
}

}  // namespace FISSILE_ISA
