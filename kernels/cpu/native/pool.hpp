// Threads that share the tasks of one kernel at a time.
#pragma once

#include <cstdint>

namespace fissile {

// How many threads work together, the caller included. Takes effect with the next `share`.
void set_threads(int64_t threads);
int64_t threads();

using Task = void (*)(const void* context, int64_t task);

// Runs `task(context, i)` for i in [0, count), each once, in any order on any thread, and returns when all are done.
// Where another thread is inside of `share`, the caller works alone. Whether all tasks had their scratch memory: one that
// has none writes nothing and returns.
bool share(int64_t count, Task task, const void* context);

// The same for a kernel and its argument.
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
