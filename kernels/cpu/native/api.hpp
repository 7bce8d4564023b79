// Functions of the C interface that are also called from within the library (layers.cpp).
#pragma once

#include <cstdint>
#include <new>

#define FISSILE_API extern "C" __attribute__((visibility("default")))

namespace fissile {

// 0, or 1 when memory ran out, of a call that says whether it had all: no exception leaves the library.
template <class Call>
int failed(const Call& call) noexcept {
  try {
    return call() ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace fissile

FISSILE_API int fissile_linear(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, int64_t weight_dtype,
    const void* panels, const float* bias, void* y, int64_t y_stride);

FISSILE_API int fissile_attention(
    int64_t dtype, int64_t kv_dtype, const void* q, int64_t q_row_stride, int64_t q_head_stride, const void* keys,
    const void* values, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, const int64_t* block_tables,
    int64_t table_stride, int64_t sequences, const int64_t* cu_seqlens, const int64_t* seq_lens, float scale,
    int64_t window, const float* sinks, void* out);
