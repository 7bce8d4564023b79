// The output head of greedy rows: the largest number of each row of a product. Only a few columns of the product are in
// memory at a time. The numbers are those of fissile_linear, rounded to the model's dtype.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "api.hpp"
#include "dispatch.hpp"
#include "kernels.hpp"
#include "pool.hpp"
#include "scratch.hpp"

using namespace fissile;

namespace {

// Columns of a task, a multiple of PANEL.
constexpr int64_t TASK_COLUMNS = 512;
static_assert(TASK_COLUMNS % PANEL == 0);

struct Call {
  const Linear& whole;
  // [tasks][rows]: the largest number of each task's columns, and its column within the task.
  std::vector<float> values;
  std::vector<int64_t> places;

  explicit Call(const Linear& whole) : whole(whole), values(tasks() * whole.rows), places(values.size()) {}

  int64_t tasks() const { return (whole.weight.columns + TASK_COLUMNS - 1) / TASK_COLUMNS; }
};

Linear columns_of(const Linear& whole, int64_t task, void* y) {
  const int64_t first = task * TASK_COLUMNS;
  Linear part = whole;
  part.weight.columns = std::min(TASK_COLUMNS, whole.weight.columns - first);
  part.weight.panels =
      static_cast<const char*>(whole.weight.panels) + packed_bytes(whole.weight.dtype, first, whole.weight.inner);
  if (whole.weight.bias) part.weight.bias = whole.weight.bias + first;
  part.y = y;
  part.y_stride = part.weight.columns;
  return part;
}

void run(Call* const& call, int64_t task) {
  const int64_t rows = call->whole.rows;
  float* y = scratch(OF_HEAD, rows * TASK_COLUMNS);
  if (!y) return;
  const Linear part = columns_of(call->whole, task, y);
  for (int64_t i = 0, count = kernels().linear_tasks(part); i < count; i++) kernels().linear(part, i);
  const Largest work{part.dtype, y, part.y_stride, part.weight.columns, &call->values[task * rows],
                     &call->places[task * rows]};
  for (int64_t row = 0; row < rows; row++) kernels().largest_of_row(work, row);
}

int64_t best_of_row(const Call& call, int64_t row) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t place = 0;
  for (int64_t task = 0; task < call.tasks(); task++) {
    const int64_t one = task * call.whole.rows + row;
    if (call.values[one] > best) best = call.values[one], place = task * TASK_COLUMNS + call.places[one];
  }
  return std::isfinite(best) ? place : NO_TOKEN;
}

}  // namespace

// places[row] = the first column of the row's largest number, or NO_TOKEN if that is not finite. NaN counts as
// -infinity. Returns 0, or 1 if memory ran out.
FISSILE_API int fissile_linear_argmax(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, int64_t weight_dtype,
    const void* panels, const float* bias, const int64_t* order, int64_t* places) {
  if (rows == 0) return 0;
  return failed([&] {
    Linear whole{dtype, x, x_stride, rows, rows, {weight_dtype, panels, bias, columns, inner, order}, nullptr, 0, false, nullptr};
    whole.packed_x = scratch(OF_CALL, kernels().linear_scratch(whole));
    if (!whole.packed_x || !share(kernels().linear_pack_tasks(whole), kernels().linear_pack, whole)) return false;
    Call call(whole);
    if (!share<Call*>(call.tasks(), run, &call)) return false;
    for (int64_t row = 0; row < rows; row++) places[row] = best_of_row(call, row);
    return true;
  });
}
