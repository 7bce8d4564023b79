// The micro-kernels of one instruction set, and the arguments that they share.
//
// A kernel is cut into tasks of a fixed size, which any thread may do in any order: a task writes what no other writes.
// How many threads there are can therefore not show in the bits. An instruction set fills one `Kernels`; paths that need
// instructions of their own (AVX512-BF16, AMX) are to become further tables here.
#pragma once

#include <cstdint>

namespace fissile {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

inline constexpr int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// Columns of a panel of packed weights.
constexpr int64_t PANEL = 16;

// y [rows, columns] = x [rows, inner] * weight^T + bias, in `dtype`; see linear.cpp.
struct Linear {
  int64_t dtype;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  int64_t inner;
  int64_t columns;
  const void* panels;
  const float* bias;
  void* y;
  int64_t y_stride;
  // x as float32 in tiles of rows, made by the packing tasks.
  float* packed_x;
};

struct Kernels {
  const char* name;
  // Packs panel `task` of a weight [columns, inner] of `dtype`.
  void (*pack_panel)(int64_t dtype, const void* weight, int64_t columns, int64_t inner, void* panels, int64_t task);
  int64_t (*linear_pack_tasks)(const Linear&);
  void (*linear_pack)(const Linear&, int64_t task);
  int64_t (*linear_tasks)(const Linear&);
  void (*linear)(const Linear&, int64_t task);
};

}  // namespace fissile
