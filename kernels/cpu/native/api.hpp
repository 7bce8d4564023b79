// Functions of the C interface that the library also calls itself (layers.cpp, drafts.cpp).
#pragma once

#include <cstdint>
#include <new>

#include "kernels.hpp"

#define FISSILE_API extern "C" __attribute__((visibility("default")))

namespace fissile {

// Runs `call`, which returns false if an allocation failed. Returns 0 on success, 1 if memory ran out. No exception
// leaves the library.
template <class Call>
int failed(const Call& call) noexcept {
  try {
    return call() ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Computes a matrix product; ignores `packed_x`, which it allocates. Returns false if an allocation failed.
bool multiply(const Linear& work);

// Computes silu(gate) * up of a product whose columns are gates and then ups. Uses one kernel if the instruction set
// has one, otherwise two, with the product in `products` [rows, columns], contiguous. The bits are the same. Returns
// false if an allocation failed.
bool multiply_gated(Linear work, void* products);

}  // namespace fissile

FISSILE_API int fissile_attention(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const void* keys,
    const void* values, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, float scale,
    float softcap, int64_t window, const float* sinks, int64_t out_row_stride, void* out);

FISSILE_API int fissile_linear_argmax(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, int64_t weight_dtype,
    const void* panels, const float* bias, const int64_t* order, int64_t* places);
