// The C interface that kernels/cpu/library.py calls. Sizes and strides are counted in numbers, not bytes.
#include <cstddef>
#include <cstdlib>
#include <memory>

#include "kernels.hpp"
#include "pool.hpp"
#include "select.hpp"

#define FISSILE_API extern "C" __attribute__((visibility("default")))

// The digest of the sources, which the build puts into the library so that a stale one is found.
FISSILE_API const char* fissile_sources() { return "fissile-sources:" FISSILE_SOURCES; }

using namespace fissile;

namespace {

const Kernels* chosen = nullptr;

const Kernels& kernels() { return *chosen; }

// Memory that a thread keeps from call to call.
float* scratch(size_t count) {
  thread_local std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
  thread_local size_t size = 0;
  if (size < count) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
    size = memory ? count : 0;
  }
  return memory.get();
}

struct PackCall {
  int64_t dtype;
  const void* weight;
  int64_t columns;
  int64_t inner;
  void* panels;
};

}  // namespace

// Takes the named instruction set, or the best one for null. Its name, or null where this machine can not run it.
FISSILE_API const char* fissile_select(const char* name) {
  const Kernels* found = select_kernels(name);
  if (!found) return nullptr;
  chosen = found;
  return found->name;
}

FISSILE_API void fissile_set_threads(int64_t threads) { set_threads(threads); }

FISSILE_API int64_t fissile_threads() { return threads(); }

// Runs f(i) for i in [0, tasks): tests look at the pool itself.
FISSILE_API void fissile_share(int64_t tasks, void (*f)(const void*, int64_t), const void* context) {
  share(tasks, f, context);
}

// A weight [columns, inner], contiguous, into panels: `panels` has room for columns rounded up to 16.
FISSILE_API void fissile_pack_linear(
    int64_t dtype, const void* weight, int64_t columns, int64_t inner, void* panels) {
  const PackCall call{dtype, weight, columns, inner, panels};
  share((columns + PANEL - 1) / PANEL, [](const void* context, int64_t task) {
    const PackCall& c = *static_cast<const PackCall*>(context);
    kernels().pack_panel(c.dtype, c.weight, c.columns, c.inner, c.panels, task);
  }, &call);
}

// 0, or 1 when memory ran out.
FISSILE_API int fissile_linear(
    int64_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t columns, const void* panels,
    const float* bias, void* y, int64_t y_stride) {
  Linear work{dtype, x, x_stride, rows, inner, columns, panels, bias, y, y_stride, nullptr};
  work.packed_x = scratch(static_cast<size_t>(rows) * inner);
  if (!work.packed_x) return 1;
  share(kernels().linear_pack_tasks(work), kernels().linear_pack, work);
  share(kernels().linear_tasks(work), kernels().linear, work);
  return 0;
}
