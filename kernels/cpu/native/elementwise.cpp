// Operations on one row at a time. They round where kernels/torch_backend/backend.py rounds: the sum with the residual,
// a normed number before its weight, and an activation before its product are rounded to the model's dtype.
#include "elementwise.hpp"

#include "activation.hpp"
#include "each.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::FLOAT32;

// Approximate numbers of a task, which take a few microseconds.
constexpr int64_t TASK_NUMBERS = 1 << 14;

int64_t rows_per_task(int64_t width) { return width >= TASK_NUMBERS ? 1 : TASK_NUMBERS / (width < 1 ? 1 : width); }

int64_t tasks(int64_t rows, int64_t width) { return (rows + rows_per_task(width) - 1) / rows_per_task(width); }

// The sum of f(i, width - i) over vectors from i = 0 on, with one chain per lane. f returns zeros past the end.
template <class Function>
FISSILE_INLINE float sum_of(int64_t width, Function f) {
  Floats sums = zeros();
  for (int64_t i = 0; i < width; i += WIDTH) sums += f(i, width - i);
  return sum(sums);
}

// Calls f(i, numbers left) for i in steps of TWO, the fastest unit to widen and narrow. Whole steps have a loop of
// their own: a partial step calls functions, around which the compiler would keep all values in memory.
template <class Function>
FISSILE_INLINE void each_two(int64_t width, Function f) {
  int64_t i = 0;
  for (; i + TWO <= width; i += TWO) f(i, TWO);
  if (i < width) f(i, width - i);
}

template <class Number>
struct NormRow {
  const Number* x;
  const Number* residual;
  const Number* weight;
  const Number* bias;
  Number* out;
  Number* total;
  int64_t width;
  float eps;
  // Elements from row to row. The next row is prefetched, as it may be in the cache of another core that computed it.
  int64_t to_next;

  // Returns x, or x + residual, rounded, which it also stores in `total`.
  FISSILE_INLINED Two add_residual(int64_t i, int64_t left) const {
    const Two value = load_two_up_to(x + i, left);
    __builtin_prefetch(x + i + to_next);
    if (!residual) return value;
    const Two more = load_two_up_to(residual + i, left);
    __builtin_prefetch(residual + i + to_next);
    const Two sums{rounded(value.first + more.first, x), rounded(value.second + more.second, x)};
    store_two_up_to(total + i, sums, left);
    return sums;
  }

  // Adds the residual. Returns the factor by which RMS norm multiplies the row before the weight.
  float add_for_rms() const {
    Two squares{zeros(), zeros()};
    each_two(width, [&](int64_t i, int64_t left) FISSILE_INLINED {
      const Two value = add_residual(i, left);
      squares = {fma(value.first, value.first, squares.first), fma(value.second, value.second, squares.second)};
    });
    const float mean = sum(squares.first + squares.second) / static_cast<float>(width);
    return 1.0f / __builtin_sqrtf(mean + eps);
  }

  void write_rms(Floats scale) const {
    const Number* const from = residual ? total : x;
    each_two(width, [&](int64_t i, int64_t left) FISSILE_INLINED {
      const Two value = load_two_up_to(from + i, left), by = load_two_up_to(weight + i, left);
      const Two normed{rounded(value.first * scale, from) * by.first, rounded(value.second * scale, from) * by.second};
      store_two_up_to(out + i, normed, left);
    });
  }

  void layer() const {
    float mean = sum_of(width, [&](int64_t i, int64_t left) { return load_up_to(x + i, left); }) /
                 static_cast<float>(width);
    float squares = sum_of(width, [&](int64_t i, int64_t left) {
      Floats centred = load_up_to(x + i, left) - splat(mean);
      if (left < WIDTH) centred = lane_numbers() < static_cast<int32_t>(left) ? centred : zeros();
      return centred * centred;
    });
    Floats scale = splat(1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps));
    for (int64_t i = 0; i < width; i += WIDTH) {
      Floats centred = load_up_to(x + i, width - i) - splat(mean);
      Floats weighted = centred * scale * load_up_to(weight + i, width - i);
      store_up_to(out + i, weighted + load_up_to(bias + i, width - i), width - i);
    }
  }
};

// Row `in` of the `inner` rows, `inner_stride` apart, of outer row `out`.
template <class Number>
NormRow<Number> norm_row(const fissile::Norm& work, int64_t out, int64_t in) {
  const int64_t row = out * work.inner + in, to = row * work.width;
  NormRow<Number> one{};
  one.x = static_cast<const Number*>(work.x) + out * work.outer_stride + in * work.inner_stride;
  if (work.residual) one.residual = static_cast<const Number*>(work.residual) + to;
  one.weight = static_cast<const Number*>(work.weight);
  one.bias = static_cast<const Number*>(work.bias);
  one.out = static_cast<Number*>(work.out) + row * work.out_stride;
  if (work.residual) one.total = static_cast<Number*>(work.total) + to;
  one.width = work.width;
  one.eps = work.eps;
  one.to_next = work.outer_stride;
  return one;
}

// Rows whose scales are computed in parallel: a single row would wait for its sum, its square root and its quotient.
constexpr int64_t NORMED_TOGETHER = 4;

template <class Number>
void norm_rows(const fissile::Norm& work, int64_t begin, int64_t end) {
  int64_t out = begin / work.inner, in = begin % work.inner;
  for (int64_t row = begin, count; row < end; row += count) {
    count = at_most(end - row, NORMED_TOGETHER);
    NormRow<Number> rows[NORMED_TOGETHER];
    float scales[NORMED_TOGETHER];
    for (int64_t r = 0; r < count; r++) {
      rows[r] = norm_row<Number>(work, out, in);
      if (++in == work.inner) in = 0, out++;
    }
    if (work.bias) {
      for (int64_t r = 0; r < count; r++) rows[r].layer();
      continue;
    }
    for (int64_t r = 0; r < count; r++) scales[r] = rows[r].add_for_rms();
    for (int64_t r = 0; r < count; r++) rows[r].write_rms(splat(scales[r]));
  }
}

// Products and differences are rounded separately, as in PyTorch, so that the bits are the same.
template <class Number>
FISSILE_INLINE void rotate(const Number* from, Two cos, Two sin, int64_t half, int64_t left, Number* to) {
  const Two a = load_two_up_to(from, left), b = load_two_up_to(from + half, left);
  const Two first{a.first * cos.first - b.first * sin.first, a.second * cos.second - b.second * sin.second};
  const Two second{b.first * cos.first + a.first * sin.first, b.second * cos.second + a.second * sin.second};
  store_two_up_to(to, first, left);
  store_two_up_to(to + half, second, left);
}

template <class Number>
void rope_row(const fissile::Rope& work, int64_t row) {
  const Number* const from = static_cast<const Number*>(work.x) + row * work.row_stride;
  Number* const to = static_cast<Number*>(work.out) + row * work.heads * work.dim;
  each_two(work.half, [&](int64_t i, int64_t left) FISSILE_INLINED {
    const Two cos = as_loaded(load_two_up_to(work.cos + row * work.half + i, left), from);
    const Two sin = as_loaded(load_two_up_to(work.sin + row * work.half + i, left), from);
    for (int64_t head = 0; head < work.heads; head++)
      rotate(from + head * work.head_stride + i, cos, sin, work.half, left, to + head * work.dim + i);
  });
  for (int64_t head = 0; head < work.heads; head++)
    for (int64_t i = 2 * work.half; i < work.dim; i++) to[head * work.dim + i] = from[head * work.head_stride + i];
}

template <class Number, bool GELU>
void gated_row(const fissile::SiluAndMul& work, int64_t row) {
  const Number* gates = static_cast<const Number*>(work.x) + row * work.row_stride;
  const Number* ups = gates + work.width;
  Number* out = static_cast<Number*>(work.out) + row * work.out_stride;
  for (int64_t i = 0; i < work.width; i += WIDTH) {
    const int64_t left = work.width - i;
    const Floats gate = load_up_to(gates + i, left), up = load_up_to(ups + i, left);
    store_up_to(out + i, GELU ? gelu_and_mul(gate, up, gates) : FISSILE_ISA::silu_and_mul(gate, up, gates), left);
  }
}

// Computes in float32 and rounds once.
template <class Number>
void clamped_swiglu_row(const fissile::SiluAndMul& work, int64_t row) {
  const Number* gates = static_cast<const Number*>(work.x) + row * work.row_stride;
  const Number* ups = gates + work.width;
  Number* out = static_cast<Number*>(work.out) + row * work.out_stride;
  const Floats limit = splat(work.limit), one = splat(1.0f);
  for (int64_t i = 0; i < work.width; i += WIDTH) {
    Floats gate = load_up_to(gates + i, work.width - i), up = load_up_to(ups + i, work.width - i);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    Floats glu = gate / (one + exp(-(gate * splat(work.alpha))));
    store_up_to(out + i, glu * (up + one), work.width - i);
  }
}

template <class Number>
auto activation_row(const fissile::SiluAndMul& work) {
  if (work.limit > 0.0f) return clamped_swiglu_row<Number>;
  return work.gelu ? gated_row<Number, true> : gated_row<Number, false>;
}

void softcap_row(const fissile::Softcap& work, int64_t row) {
  const float* const from = work.x + row * work.row_stride;
  float* const to = work.out + row * work.width;
  for (int64_t i = 0; i < work.width; i += WIDTH)
    store_up_to(to + i, softcapped(load_up_to(from + i, work.width - i), work.cap), work.width - i);
}

template <class Number>
void combine_row(const fissile::Combine& work, int64_t row) {
  const int64_t* places = work.places + row * work.slots;
  Number* y = static_cast<Number*>(work.y) + row * work.width;
  for (int64_t i = 0; i < work.width; i += WIDTH) {
    Floats total = zeros();
    for (int64_t slot = 0; slot < work.slots; slot++) {
      if (places[slot] < 0) continue;
      const Number* from = static_cast<const Number*>(work.x) + places[slot] * work.width + i;
      total += load_up_to(from, work.width - i) * splat(work.weights[row * work.slots + slot]);
    }
    store_up_to(y + i, total, work.width - i);
  }
}

// Limits values to bfloat16's largest number instead of infinity, as for narrower formats.
template <class To>
FISSILE_INLINE Floats saturated(Floats x, const To*) { return x; }
FISSILE_INLINE Floats saturated(Floats x, const Bf16*) { return limited(x, 0x1.FEp127f); }

template <class From, class To>
FISSILE_INLINE void convert(const From* from, To* to, int64_t count) {
  for (int64_t i = 0; i < count; i += WIDTH)
    store_up_to(to + i, saturated(load_up_to(from + i, count - i), to), count - i);
}

// Copies bfloat16 bit by bit, so that NaN and infinity stay as they are.
FISSILE_INLINE void convert(const Bf16* from, Bf16* to, int64_t count) {
  __builtin_memcpy(to, from, static_cast<uint64_t>(count) * sizeof(Bf16));
}

template <class From, class To>
void write_row(const fissile::WriteKV& work, int64_t row) {
  const int64_t block = work.slots[row] / work.block_size, offset = work.slots[row] % work.block_size;
  for (int64_t head = 0; head < work.heads; head++) {
    const int64_t to = ((block * work.heads + head) * work.block_size + offset) * work.dim;
    const From* key = static_cast<const From*>(work.k) + row * work.k_row_stride + head * work.k_head_stride;
    convert(key, static_cast<To*>(work.keys) + to, work.dim);
    if (!work.v) continue;
    const From* value = static_cast<const From*>(work.v) + row * work.v_row_stride + head * work.v_head_stride;
    convert(value, static_cast<To*>(work.values) + to, work.dim);
  }
}

template <class From>
auto write_row_for(int64_t kv_dtype) {
  switch (kv_dtype) {
    case fissile::BFLOAT16: return write_row<From, Bf16>;
    case fissile::FLOAT16: return write_row<From, Half>;
    case fissile::FLOAT8: return write_row<From, Fp8>;
    default: return write_row<From, float>;
  }
}

template <class Work>
void each_row(const Work& work, int64_t task, int64_t rows, int64_t width, void (*row_kernel)(const Work&, int64_t)) {
  const int64_t per_task = rows_per_task(width);
  for (int64_t row = task * per_task; row < at_most(rows, (task + 1) * per_task); row++) row_kernel(work, row);
}

}  // namespace

int64_t norm_tasks(const fissile::Norm& work) { return tasks(work.rows, work.width); }

void norm(const fissile::Norm& work, int64_t task) {
  const int64_t per_task = rows_per_task(work.width), begin = task * per_task, end = at_most(work.rows, begin + per_task);
  work.dtype == FLOAT32 ? norm_rows<float>(work, begin, end) : norm_rows<Bf16>(work, begin, end);
}

int64_t rope_tasks(const fissile::Rope& work) { return tasks(work.rows, work.heads * work.dim); }

void rope(const fissile::Rope& work, int64_t task) {
  each_row(work, task, work.rows, work.heads * work.dim, work.dtype == FLOAT32 ? rope_row<float> : rope_row<Bf16>);
}

int64_t silu_and_mul_tasks(const fissile::SiluAndMul& work) { return tasks(work.rows, 2 * work.width); }

void silu_and_mul(const fissile::SiluAndMul& work, int64_t task) {
  each_row(work, task, work.rows, 2 * work.width,
           work.dtype == FLOAT32 ? activation_row<float>(work) : activation_row<Bf16>(work));
}

int64_t softcap_tasks(const fissile::Softcap& work) { return tasks(work.rows, work.width); }

void softcap(const fissile::Softcap& work, int64_t task) { each_row(work, task, work.rows, work.width, softcap_row); }

int64_t combine_tasks(const fissile::Combine& work) { return tasks(work.rows, work.slots * work.width); }

void combine(const fissile::Combine& work, int64_t task) {
  each_row(work, task, work.rows, work.slots * work.width,
           work.dtype == FLOAT32 ? combine_row<float> : combine_row<Bf16>);
}

int64_t write_kv_tasks(const fissile::WriteKV& work) { return tasks(work.rows, 2 * work.heads * work.dim); }

void write_kv(const fissile::WriteKV& work, int64_t task) {
  each_row(work, task, work.rows, 2 * work.heads * work.dim,
           work.dtype == FLOAT32 ? write_row_for<float>(work.kv_dtype) : write_row_for<Bf16>(work.kv_dtype));
}

}  // namespace FISSILE_ISA
