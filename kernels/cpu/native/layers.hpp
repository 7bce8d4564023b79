// Layers of a decoder, and a step of them; see layers.cpp.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace fissile {

// kernels/cpu/fused.py has these four too, and Weight.
struct KVCache {
  int64_t dtype;
  int64_t heads;
  int64_t dim;
  int64_t block_size;
  // Of the first layer, as in WriteKV, and how far it is from layer to layer.
  void* keys;
  void* values;
  int64_t layer_stride;
};

struct DecoderLayer {
  const void* input_norm;
  Weight qkv;
  // Norms of each head's queries and keys, or null.
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
  // The widest of the layers.
  int64_t inner;
  double eps;
  double scale;
  const void* norm;
  const DecoderLayer* layers;
  int64_t num_layers;
  // Layers before which the residual stream is given too; their number stands for behind the last one.
  const int64_t* aux_layers;
  int64_t num_aux;
  // Of a layer that drafts, else null: the norm of x, which its attention takes beside the normed embeddings; and whether
  // the residual stream begins with the normed x.
  const void* stream_norm;
  int64_t norms_first;
};

// x: [rows, hidden], of which the first `tokens` rows are tokens; embedded: likewise, of a layer that drafts; cos, sin:
// [rows, half]; out: [rows, (1 + aux) * hidden], hidden states after the last norm and beside them the residual streams
// before the `aux_layers`.
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
  // Rows whose states after the last norm are asked for, ascending, of each sequence none or its last ones; null for all.
  const int64_t* wanted;
  int64_t num_wanted;
  // Brings the sum over all ranks in place of this rank's summand, [rows, hidden]; not 0 when that failed. Null for one.
  int (*join)(void* summand);
  void* out;
};

// Hidden states after the last norm into `step.out`. Whether there was memory, and ranks met.
bool run_layers(const Decoder& model, const DecoderStep& step);

}  // namespace fissile
