// Sampling by Gumbel noise, to the token what kernels/sampling.py says (design-details section 4), without sorting.
//
// The order is (value descending, id ascending). A float's bits, turned so that they count upwards, give its place in that
// order, so the border of top-k and of top-p is found by histograms of bits, of counts or of integer masses: what is kept
// is everything above a border, and the first few ids that are equal to it. Noise is computed in float64, but only for
// ids that can still win.
#include "sampling.hpp"

#include "scratch.hpp"

namespace FISSILE_ISA {
namespace {

constexpr int64_t ALL = INT64_MAX;
// 2^44, the unit of masses; below this difference from the largest a mass rounds to zero.
constexpr double MASS_ONE = 17592186044416.0;
constexpr float NO_MASS_BELOW = -31.5f;
// More than any noise: -log(-log1p(-2^-33)) is 22.9.
constexpr double MOST_NOISE = 23.0;
constexpr double LN_2 = 0.6931471805599454;
constexpr uint32_t DOMAIN = 0x46534C31;
// Bits of a key that one histogram looks at, from the highest: 11 + 11 + 10.
constexpr int BITS[] = {11, 11, 10};
constexpr int64_t MOST_BINS = 1 << 11;

uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Larger for larger numbers; both zeros have one key.
uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is kept: keys above `key`, and of the ids with that key the first `ties`.
struct Border {
  uint32_t key = 0;
  int64_t ties = ALL;
};

// Philox4x32-10 (kernels/philox.py): the random words of four neighbouring ids.
struct Words {
  uint32_t x[4];
};

Words philox(uint32_t block, uint32_t position, uint32_t choice, uint64_t seed) {
  uint32_t c0 = block, c1 = position, c2 = choice, c3 = DOMAIN;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xD2511F53u} * c0, second = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

float gumbel(uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return static_cast<float>(-__builtin_log(-__builtin_log1p(-uniform)));
}

// At least gumbel(word): it is -log of something above `uniform`, which is at least 2^-(leading zeros + 1).
double noise_bound(uint32_t word) { return ((word ? __builtin_clz(word) : 32) + 1) * LN_2; }

// The largest of a row, or NaN if there is one.
float largest_or_nan(const float* values, int64_t count) {
  Floats best = splat(-__builtin_inff());
  Ints nan = {};
  for (int64_t i = 0; i < count; i += WIDTH) {
    Floats x = best;
    if (count - i >= WIDTH) x = load(values + i);
    else
      for (int64_t j = i; j < count; j++) x[j - i] = values[j];
    nan |= x != x;
    best = maximum(x, best);
  }
  for (int i = 0; i < WIDTH; i++)
    if (nan[i]) return __builtin_nanf("");
  return largest(best);
}

// The first id of the largest number; NaN counts as the lowest.
int64_t first_largest(const float* values, int64_t count) {
  int64_t best = 0;
  float highest = -__builtin_inff();
  for (int64_t i = 0; i < count; i++)
    if (values[i] > highest) {
      highest = values[i];
      best = i;
    }
  return best;
}

int64_t first_equal(const float* values, int64_t count, float value) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] == value) return i;
  return 0;
}

// ceil(fraction * total) for 0 <= fraction < 1, exactly; at least 1, since one id is always kept.
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

float widened(float value) { return value; }

float widened(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
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

struct Row {
  const float* scaled;
  int64_t count;
  float highest;
  int64_t* bins;

  // Calls f(id) for what a border keeps, by ascending id.
  template <class Function>
  __attribute__((always_inline)) void each(Border border, Function f) const {
    int64_t ties = border.ties;
    for (int64_t i = 0; i < count; i++) {
      const uint32_t key = key_of(scaled[i]);
      if (key > border.key || (key == border.key && ties-- > 0)) f(i, key);
    }
  }

  int64_t mass(int64_t id) const {
    const float below = scaled[id] - highest;
    if (below < NO_MASS_BELOW) return 0;
    return static_cast<int64_t>(__builtin_rint(__builtin_exp(static_cast<double>(below)) * MASS_ONE));
  }

  // The key at which sums of weight(id), from the highest key downwards, reach `wanted` > 0; and what is still wanted
  // there, after all keys above.
  template <class Weight>
  __attribute__((always_inline)) uint32_t border_key(Border from, int64_t& wanted, Weight weight) const {
    uint32_t known = 0;
    int shift = 32;
    for (int bits : BITS) {
      const int above = shift;
      shift -= bits;
      const int64_t size = int64_t{1} << bits;
      __builtin_memset(bins, 0, static_cast<uint64_t>(size) * sizeof *bins);
      each(from, [&](int64_t id, uint32_t key) {
        if (above == 32 || key >> above == known) bins[(key >> shift) & static_cast<uint32_t>(size - 1)] += weight(id);
      });
      int64_t bin = size - 1;
      for (; bin > 0 && bins[bin] < wanted; bin--) wanted -= bins[bin];
      known = (known << bits) | static_cast<uint32_t>(bin);
    }
    return known;
  }

  Border min_p(float fraction) const {
    const float lowest = highest + static_cast<float>(__builtin_log(static_cast<double>(fraction)));
    return {key_of(lowest), ALL};
  }

  Border top_k(Border from, int64_t k) const {
    int64_t kept = 0;
    each(from, [&](int64_t, uint32_t) { kept++; });
    if (k >= kept) return from;
    int64_t left = k;
    const uint32_t key = border_key(from, left, [](int64_t) { return int64_t{1}; });
    return {key, left};
  }

  Border top_p(Border from, float fraction) const {
    int64_t total = 0;
    each(from, [&](int64_t id, uint32_t) { total += mass(id); });
    int64_t left = ceil_product(fraction, total);
    const uint32_t key = border_key(from, left, [&](int64_t id) { return mass(id); });
    int64_t one = 0;
    each(from, [&](int64_t id, uint32_t of) {
      if (of == key) one = mass(id);
    });
    return {key, (left + one - 1) / one};
  }

  // The best of value plus noise among what is kept, the lower id of equals.
  int64_t best(Border border, uint64_t seed, int64_t position, int64_t choice) const {
    int64_t found = 0, block = -1;
    float score = -__builtin_inff();
    double hopeless = -__builtin_inf();
    Words words{};
    each(border, [&](int64_t id, uint32_t) {
      const double value = scaled[id];
      if (value + MOST_NOISE < hopeless) return;
      if (id >> 2 != block) {
        block = id >> 2;
        words = philox(static_cast<uint32_t>(block), static_cast<uint32_t>(position), static_cast<uint32_t>(choice), seed);
      }
      const uint32_t word = words.x[id & 3];
      if (value + noise_bound(word) < hopeless) return;
      const float own = scaled[id] + gumbel(word);
      if (own > score) {
        score = own;
        found = id;
        // Room for the rounding of scores to float32.
        hopeless = score - 1e-6 * (1.0 + __builtin_fabs(score));
      }
    });
    return found;
  }
};

}  // namespace

void largest_of_row(const fissile::Largest& work, int64_t row) {
  float& value = work.values[row];
  int64_t& place = work.places[row];
  if (work.dtype == fissile::FLOAT32)
    find_largest(static_cast<const float*>(work.y) + row * work.row_stride, work.columns, value, place);
  else
    find_largest(static_cast<const Bf16*>(work.y) + row * work.row_stride, work.columns, value, place);
}

void sample(const fissile::Sample& work, int64_t row) {
  const float* logits = work.logits + row * work.row_stride;
  const float temperature = work.temperature[row];
  int64_t& id = work.ids[row];
  const float highest = largest_or_nan(logits, work.vocab);
  if (!__builtin_isfinite(highest)) {
    id = first_largest(logits, work.vocab);
    return;
  }
  if (temperature == 0.0f) {
    id = first_equal(logits, work.vocab, highest);
    return;
  }
  float* scaled = fissile::scratch(fissile::OF_TASK, work.vocab + 2 * MOST_BINS);
  id = -1;
  if (!scaled || !__builtin_isfinite(highest / temperature)) return;
  int64_t* bins = reinterpret_cast<int64_t*>(scaled);
  scaled += 2 * MOST_BINS;
  for (int64_t i = 0; i < work.vocab; i++) scaled[i] = logits[i] / temperature;
  const Row one{scaled, work.vocab, highest / temperature, bins};
  Border border;
  if (work.min_p[row] > 0.0f) border = one.min_p(work.min_p[row]);
  if (work.top_k[row] > 0) border = one.top_k(border, work.top_k[row]);
  if (work.top_p[row] < 1.0f) border = one.top_p(border, work.top_p[row]);
  id = one.best(border, work.seeds[row], work.positions[row], work.choices[row]);
}

}  // namespace FISSILE_ISA
