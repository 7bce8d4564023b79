// All dense decoder layers of a model in one call: the operations of worker/model/models/llama.py in their order. The
// kernels and numbers are those of single calls, so the bits are the same. Sizes and strides are in elements.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api.hpp"
#include "dispatch.hpp"
#include "kernels.hpp"
#include "layers.hpp"
#include "pool.hpp"
#include "scratch.hpp"

using namespace fissile;

namespace {

// Rows whose heads one task norms, rotates and stores, while the rows are in its core's cache.
constexpr int64_t HEAD_ROWS = 4;
// Rows that pass the feed-forward network at a time. Its inner activations are the widest array, and prompts may be
// long.
constexpr int64_t MLP_ROWS = 576;

// The rows of a product's input are readable up to a multiple of TILE_ROWS, because AMX tiles have as many rows. They
// are an odd number of cache lines apart, so that a tile's rows do not share few cache sets (linear_amx.cpp).
constexpr int64_t TILE_ROWS = 16;

int64_t padded_rows(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

int64_t spread(int64_t dtype, int64_t width) {
  const int64_t line = 64 / size_of(dtype);
  return ((width + line - 1) / line | 1) * line;
}

// Runs all tasks of a kernel on this thread.
template <class Work>
void run_all(int64_t (*tasks)(const Work&), void (*kernel)(const Work&, int64_t), const Work& work) {
  for (int64_t task = 0, count = tasks(work); task < count; task++) kernel(work, task);
}

// Arrays of the model's dtype, one after another. Each starts at a multiple of 64 bytes.
class Arrays {
 public:
  explicit Arrays(int64_t dtype) : dtype_(dtype) {}

  int64_t add(int64_t numbers) {
    const int64_t place = bytes_;
    bytes_ += (numbers * size_of(dtype_) + 63) / 64 * 64;
    return place;
  }

  bool allocate() {
    memory_ = reinterpret_cast<char*>(scratch(OF_LAYERS, bytes_ / static_cast<int64_t>(sizeof(float))));
    return memory_ != nullptr;
  }

  void* operator[](int64_t place) const { return memory_ + place; }

 private:
  int64_t dtype_;
  int64_t bytes_ = 0;
  char* memory_ = nullptr;
};

class Run {
 public:
  Run(const Decoder& model, const DecoderStep& step)
      : model_(model),
        step_(step),
        cache_(step.cache),
        dtype_(model.dtype),
        q_width_(model.heads * step.cache.dim),
        k_width_(step.cache.heads * step.cache.dim),
        qkv_width_(q_width_ + 2 * k_width_),
        hidden_stride_(spread(dtype_, model.hidden)),
        pair_stride_(spread(dtype_, 2 * model.hidden)),
        attended_stride_(spread(dtype_, q_width_)),
        inner_stride_(spread(dtype_, model.inner)),
        out_stride_((1 + model.num_aux) * model.hidden),
        chunk_(std::min(step.rows, MLP_ROWS)),
        rows_(step.rows) {}

  // Returns false if an allocation or `join` failed.
  bool all() {
    if (!allocate()) return false;
    const void* x = step_.x;
    const void* residual = nullptr;
    for (int64_t layer = 0; layer < model_.num_layers; layer++) {
      const DecoderLayer& weights = model_.layers[layer];
      const bool drafts = model_.stream_norm && layer == 0;
      if (drafts)
        pair(weights);
      else
        norm(x, residual, weights.input_norm, normed_, hidden_stride_);
      if (!remember(weights, layer, drafts ? pair_stride_ : hidden_stride_)) return false;
      if (!residual) residual = drafts && model_.norms_first ? residual_ : step_.x;
      give_aux(layer, residual);
      // The last layer needs most rows of prompts only for their keys and values.
      if (leaves_out() && layer + 1 == model_.num_layers) residual = keep_wanted(residual);
      if (!rows_) return true;
      if (!attend(weights, layer) || !join()) return false;
      norm(output_, residual, weights.post_norm, normed_, hidden_stride_);
      residual = residual_;
      if (!feed_forward(weights) || !join()) return false;
      x = output_;
    }
    norm(x, residual, model_.norm, step_.out, out_stride_);
    give_aux(model_.num_layers, residual_);
    if (leaves_out()) spread_wanted(step_.out);
    return true;
  }

 private:
  bool allocate() {
    const int64_t rows = step_.rows;
    Arrays arrays(dtype_);
    const int64_t normed_stride = model_.stream_norm ? pair_stride_ : hidden_stride_;
    const int64_t residual = arrays.add(rows * model_.hidden), normed = arrays.add(padded_rows(rows) * normed_stride);
    const int64_t output = arrays.add(rows * model_.hidden), qkv = arrays.add(rows * qkv_width_);
    const int64_t q = arrays.add(rows * q_width_), k = arrays.add(rows * k_width_);
    const int64_t attended = arrays.add(padded_rows(rows) * attended_stride_);
    const int64_t gate_up = arrays.add(chunk_ * 2 * model_.inner);
    const int64_t activated = arrays.add(padded_rows(chunk_) * inner_stride_);
    if (!arrays.allocate()) return false;
    residual_ = arrays[residual], normed_ = arrays[normed], output_ = arrays[output], qkv_ = arrays[qkv];
    q_ = arrays[q], k_ = arrays[k], attended_ = arrays[attended];
    gate_up_ = arrays[gate_up], activated_ = arrays[activated];
    cu_seqlens_.assign(step_.cu_seqlens, step_.cu_seqlens + step_.sequences + 1);
    // Padding rows have no attention output.
    std::fill_n(static_cast<char*>(offset(attended_, dtype_, step_.tokens * attended_stride_)),
                (rows - step_.tokens) * attended_stride_ * size_of(dtype_), char{0});
    return true;
  }

  // Norms x, or the sum of x and `residual`, which becomes the new residual.
  void norm(const void* x, const void* residual, const void* weight, void* out, int64_t out_stride) const {
    const Norm work{dtype_, x, rows_, 1, model_.hidden, 0, model_.hidden, residual, weight, nullptr,
                    static_cast<float>(model_.eps), out, out_stride, residual_};
    share(kernels().norm_tasks(work), kernels().norm, work);
  }

  // Input of a draft layer: normed embeddings and, beside them, normed states.
  void pair(const DecoderLayer& weights) const {
    norm(step_.embedded, nullptr, weights.input_norm, normed_, pair_stride_);
    void* states = offset(normed_, dtype_, model_.hidden);
    norm(step_.x, nullptr, model_.stream_norm, states, pair_stride_);
    for (int64_t row = 0; model_.norms_first && row < rows_; row++)
      std::memcpy(offset(residual_, dtype_, row * model_.hidden), offset(states, dtype_, row * pair_stride_),
                  model_.hidden * size_of(dtype_));
  }

  // A product with rows of `x` that are padded to whole tiles. Rows of y are contiguous.
  Linear product(const Weight& weight, const void* x, int64_t x_stride, int64_t rows, void* y) const {
    return {dtype_, x, x_stride, rows, padded_rows(rows), weight, y, weight.columns, false, nullptr};
  }

  // Norms (if there are norms) and rotates the queries or keys of some rows.
  void turn(const void* norm_weight, int64_t first, int64_t rows, int64_t heads, int64_t column, void* to) const {
    const int64_t width = heads * cache_.dim;
    const void* from = offset(qkv_, dtype_, first * qkv_width_ + column);
    void* out = offset(to, dtype_, first * width);
    int64_t stride = qkv_width_;
    if (norm_weight) {
      run_all(kernels().norm_tasks, kernels().norm,
              Norm{dtype_, from, rows * heads, heads, stride, cache_.dim, cache_.dim, nullptr, norm_weight, nullptr,
                   static_cast<float>(model_.eps), out, cache_.dim, nullptr});
      from = out, stride = width;
    }
    // In place after a norm: the kernel reads each pair before it writes it.
    run_all(kernels().rope_tasks, kernels().rope,
            Rope{dtype_, from, rows, stride, heads, cache_.dim, cache_.dim, step_.cos + first * step_.half,
                 step_.sin + first * step_.half, step_.half, out});
  }

  struct HeadCall {
    const Run& run;
    const DecoderLayer& weights;
    void* keys;
    void* values;
  };

  static void turn_and_store(const HeadCall& call, int64_t task) {
    const Run& run = call.run;
    const int64_t first = task * HEAD_ROWS, rows = std::min(HEAD_ROWS, run.step_.rows - first);
    run.turn(call.weights.q_norm, first, rows, run.model_.heads, 0, run.q_);
    run.turn(call.weights.k_norm, first, rows, run.cache_.heads, run.q_width_, run.k_);
    const int64_t tokens = std::min(rows, run.step_.tokens - first);
    if (tokens > 0) run.store(first, tokens, call.keys, call.values);
  }

  void store(int64_t first, int64_t tokens, void* keys, void* values) const {
    run_all(kernels().write_kv_tasks, kernels().write_kv,
            WriteKV{dtype_, cache_.dtype, offset(k_, dtype_, first * k_width_), k_width_, cache_.dim,
                    offset(qkv_, dtype_, first * qkv_width_ + q_width_ + k_width_), qkv_width_, cache_.dim, tokens,
                    cache_.heads, cache_.dim, cache_.block_size, step_.slots + first, keys, values});
  }

  void* keys_of(int64_t layer) const { return offset(cache_.keys, cache_.dtype, layer * cache_.layer_stride); }
  void* values_of(int64_t layer) const { return offset(cache_.values, cache_.dtype, layer * cache_.layer_stride); }

  // Computes queries, keys and values, and writes keys and values to the cache.
  bool remember(const DecoderLayer& weights, int64_t layer, int64_t stride) const {
    if (!multiply(product(weights.qkv, normed_, stride, rows_, qkv_))) return false;
    const HeadCall call{*this, weights, keys_of(layer), values_of(layer)};
    share((rows_ + HEAD_ROWS - 1) / HEAD_ROWS, turn_and_store, call);
    return true;
  }

  bool attend(const DecoderLayer& weights, int64_t layer) const {
    const int failed = fissile_attention(
        dtype_, cache_.dtype, q_, q_width_, cache_.dim, keys_of(layer), values_of(layer), model_.heads, cache_.heads,
        cache_.dim, cache_.block_size, step_.block_tables, step_.table_stride, step_.sequences, cu_seqlens_.data(),
        step_.seq_lens, static_cast<float>(model_.scale), 0.0f, weights.window, weights.sinks,
        attended_stride_, attended_);
    return !failed && multiply(product(weights.out, attended_, attended_stride_, rows_, output_));
  }

  // False for a step of decodes: all its rows are wanted and keep their places.
  bool leaves_out() const { return step_.wanted && step_.num_wanted < step_.rows; }

  // Keeps only the wanted rows for the rest of the layer. Returns their residual.
  const void* keep_wanted(const void* residual) {
    gather_wanted(q_, q_, q_width_);
    gather_wanted(residual, residual_, model_.hidden);
    int64_t kept = 0;
    for (int64_t s = 0; s < step_.sequences; s++) {
      while (kept < step_.num_wanted && step_.wanted[kept] < step_.cu_seqlens[s + 1]) kept++;
      cu_seqlens_[s + 1] = kept;
    }
    rows_ = kept;
    return residual_;
  }

  // Copies row `wanted[i]` to row i, in ascending order, since wanted[i] >= i.
  void gather_wanted(const void* from, void* to, int64_t width) const {
    for (int64_t i = 0; i < step_.num_wanted; i++)
      std::memmove(offset(to, dtype_, i * width), offset(from, dtype_, step_.wanted[i] * width), width * size_of(dtype_));
  }

  // Copies row i to row `wanted[i]`, with the auxiliary stream that was written for the same rows.
  void spread_wanted(void* rows) const {
    spread_part(rows, 0);
    for (int64_t aux = 0; aux < model_.num_aux; aux++)
      if (model_.aux_layers[aux] == model_.num_layers) spread_part(rows, 1 + aux);
  }

  void spread_part(void* rows, int64_t part) const {
    char* first = static_cast<char*>(offset(rows, dtype_, part * model_.hidden));
    for (int64_t i = step_.num_wanted - 1; i >= 0; i--)
      std::memmove(offset(first, dtype_, step_.wanted[i] * out_stride_), offset(first, dtype_, i * out_stride_),
                   model_.hidden * size_of(dtype_));
  }

  // Copies the residual stream before `layer` beside the hidden states, for all remaining rows, if `aux_layers` has it.
  void give_aux(int64_t layer, const void* stream) const {
    for (int64_t aux = 0; aux < model_.num_aux; aux++) {
      if (model_.aux_layers[aux] != layer) continue;
      for (int64_t row = 0; row < rows_; row++)
        std::memcpy(offset(step_.out, dtype_, row * out_stride_ + (1 + aux) * model_.hidden),
                    offset(stream, dtype_, row * model_.hidden), model_.hidden * size_of(dtype_));
    }
  }

  bool join() const { return !step_.join || step_.join(output_) == 0; }

  bool feed_forward(const DecoderLayer& weights) const {
    for (int64_t first = 0; first < rows_; first += chunk_) {
      const int64_t rows = std::min(chunk_, rows_ - first);
      const void* x = offset(normed_, dtype_, first * hidden_stride_);
      Linear gate_up = product(weights.gate_up, x, hidden_stride_, rows, activated_);
      gate_up.y_stride = inner_stride_;
      void* y = offset(output_, dtype_, first * model_.hidden);
      const Linear down = product(weights.down, activated_, inner_stride_, rows, y);
      if (!multiply_gated(gate_up, gate_up_) || !multiply(down)) return false;
    }
    return true;
  }

  const Decoder& model_;
  const DecoderStep& step_;
  const KVCache& cache_;
  const int64_t dtype_;
  const int64_t q_width_;
  const int64_t k_width_;
  const int64_t qkv_width_;
  // Row stride of arrays that are multiplied next.
  const int64_t hidden_stride_;
  // The same for rows of two hidden states side by side.
  const int64_t pair_stride_;
  const int64_t attended_stride_;
  const int64_t inner_stride_;
  // Row stride of the result.
  const int64_t out_stride_;
  const int64_t chunk_;
  // All rows; from the last layer's attention on, only the wanted ones.
  int64_t rows_;
  std::vector<int64_t> cu_seqlens_;
  void* residual_ = nullptr;
  void* normed_ = nullptr;
  void* output_ = nullptr;
  void* qkv_ = nullptr;
  void* q_ = nullptr;
  void* k_ = nullptr;
  void* attended_ = nullptr;
  void* gate_up_ = nullptr;
  void* activated_ = nullptr;
};

}  // namespace

bool fissile::run_layers(const Decoder& model, const DecoderStep& step) { return Run(model, step).all(); }

// Writes the hidden states after the last norm to `step.out`. Returns 0, or 1 if memory ran out or `join` failed.
FISSILE_API int fissile_decoder(const Decoder* model, const DecoderStep* step) {
  return failed([&] { return run_layers(*model, *step); });
}
