// A thread pool whose threads share the tasks of one kernel at a time.
#pragma once

#include <cstdint>

namespace fissile {

// Number of threads that work together, the caller included. Takes effect with the next `share`.
void set_threads(int64_t threads);
int64_t threads();

using Task = void (*)(const void* context, int64_t task);

// Runs `task(context, i)` once for each i in [0, count), in any order on any thread, and returns when all have
// finished. If another thread is inside `share`, the caller runs all tasks itself. Returns false if a task had no
// scratch memory; such a task returns without writing anything.
bool share(int64_t count, Task task, const void* context);

// Runs `kernel(work, i)` for each i in [0, count).
template <class Work>
bool share(int64_t count, void (*kernel)(const Work&, int64_t), const Work& work) {
  struct Call {
    void (*kernel)(const Work&, int64_t);
    const Work& work;
  } call{kernel, work};
  return share(count, [](const void* context, int64_t task) {
    const Call& made = *static_cast<const Call*>(context);
    made.kernel(made.work, task);
  }, &call);
}

}  // namespace fissile
