// The layers of a decoder and the inputs of a step; see layers.cpp.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace fissile {

// kernels/cpu/fused.py declares these four structs and Weight with the same fields.
struct KVCache {
  int64_t dtype;
  int64_t heads;
  int64_t dim;
  int64_t block_size;
  // Keys and values of the first layer, as in WriteKV, and the elements from layer to layer.
  void* keys;
  void* values;
  int64_t layer_stride;
};

struct DecoderLayer {
  const void* input_norm;
  Weight qkv;
  // Norm weights of each head's queries and keys, or null.
  const void* q_norm;
  const void* k_norm;
  // As in Attention.
  const float* sinks;
  int64_t window;
  Weight out;
  const void* post_norm;
  Weight gate_up;
  Weight down;
};

struct Decoder {
  int64_t dtype;
  int64_t hidden;
  int64_t heads;
  // Inner units of the widest layer.
  int64_t inner;
  double eps;
  double scale;
  const void* norm;
  const DecoderLayer* layers;
  int64_t num_layers;
  // Layers whose incoming residual stream is also returned. `num_layers` stands for the stream after the last layer.
  const int64_t* aux_layers;
  int64_t num_aux;
  // For a draft layer, otherwise null: weight of the norm of x, which attention reads beside the normed embeddings.
  // `norms_first` is true if the residual stream starts with the normed x.
  const void* stream_norm;
  int64_t norms_first;
};

// x [rows, hidden], of which the first `tokens` rows are tokens. embedded [rows, hidden], for a draft layer only. cos
// and sin [rows, half]. out [rows, (1 + num_aux) * hidden]: hidden states after the last norm and, beside them, the
// residual streams before the `aux_layers`.
struct DecoderStep {
  int64_t rows;
  int64_t tokens;
  const void* x;
  const void* embedded;
  const float* cos;
  const float* sin;
  int64_t half;
  KVCache cache;
  const int64_t* slots;
  const int64_t* block_tables;
  int64_t table_stride;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const int64_t* seq_lens;
  // Rows whose states after the last norm the caller needs, ascending; of each sequence none or its last ones. Null for
  // all rows.
  const int64_t* wanted;
  int64_t num_wanted;
  // Replaces this rank's summand [rows, hidden] by the sum over all ranks. Returns 0 on success. Null for a single
  // rank.
  int (*join)(void* summand);
  void* out;
};

// Writes the hidden states after the last norm to `step.out`. Returns false if an allocation or `join` failed.
bool run_layers(const Decoder& model, const DecoderStep& step);

}  // namespace fissile
