// One thread pool for the process. A second pool, such as OpenMP's beside PyTorch's, would spin on the cores that this
// one uses. Helpers first spin briefly for work, because kernels follow each other within microseconds, and then sleep.
//
// Each thread has a contiguous share of the tasks, the same share for every kernel. So the rows it wrote are in its
// core's cache when the next kernel reads them. A thread takes its own tasks one by one, and then tasks of other
// shares. So a delayed thread delays the others by at most one task.
#include "pool.hpp"

#include "scratch.hpp"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace fissile {
namespace {

// Polls for work before a helper sleeps: about 20 us.
constexpr int SPINS = 2000;
constexpr int64_t MOST_THREADS = 256;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The tasks of a share that no thread has taken yet.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

class Pool {
 public:
  void set_threads(int64_t threads) { wanted_ = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads; }

  int64_t threads() const { return wanted_; }

  bool share(int64_t count, Task task, const void* context) {
    take_scratch_failure();
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    const int64_t helpers = count - 1 < wanted_ - 1 ? count - 1 : wanted_ - 1;
    if (!turn.owns_lock() || helpers < 1) {
      for (int64_t i = 0; i < count; i++) task(context, i);
      return !take_scratch_failure();
    }
    start_missing(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // No helper is inside. A late helper may enter as soon as `places_` is positive, so it is set after everything
      // else.
      task_ = task;
      context_ = context;
      share_out(count, helpers + 1);
      failed_.store(false, std::memory_order_relaxed);
      places_.store(helpers, std::memory_order_seq_cst);
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load() > 0) wake_.notify_all();
    take_tasks(0);
    // Late helpers find no place any more; helpers inside finish their current task.
    places_.store(0, std::memory_order_seq_cst);
    for (int64_t spin = 0; inside_.load(std::memory_order_seq_cst) > 0; spin++) {
      if (spin < SPINS) pause_briefly();
      else std::this_thread::yield();
    }
    return !failed_.load(std::memory_order_relaxed);
  }

 private:
  // Starts helpers up to `helpers`. If the system refuses a thread, the pool works without it and tries again next
  // time.
  void start_missing(int64_t helpers) try {
    for (; started_ < helpers; started_++) std::thread([this, who = started_ + 1] { help(who); }).detach();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): fewer helpers are enough.
  }

  void share_out(int64_t count, int64_t shares) {
    num_shares_ = shares;
    for (int64_t i = 0; i < shares; i++) {
      shares_[i].next.store(count * i / shares, std::memory_order_relaxed);
      shares_[i].end = count * (i + 1) / shares;
    }
  }

  // Takes this thread's own tasks first, then those of other shares.
  void take_tasks(int64_t who) {
    for (int64_t i = 0; i < num_shares_; i++) {
      Share& one = shares_[(who + i) % num_shares_];
      for (int64_t task; (task = one.next.fetch_add(1, std::memory_order_relaxed)) < one.end;) task_(context_, task);
    }
    if (take_scratch_failure()) failed_.store(true, std::memory_order_relaxed);
  }

  // True if this helper may take tasks. It counts as inside before it checks, so that `share` cannot return in between.
  bool enter() {
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (places_.fetch_sub(1, std::memory_order_seq_cst) > 0) return true;
    inside_.fetch_sub(1, std::memory_order_seq_cst);
    return false;
  }

  [[noreturn]] void help(int64_t who) {
    for (uint64_t seen = 0;;) {
      seen = next_generation(seen);
      if (enter()) {
        take_tasks(who);
        inside_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
  }

  uint64_t next_generation(uint64_t seen) {
    for (int spin = 0; spin < SPINS; spin++) {
      uint64_t now = generation_.load(std::memory_order_acquire);
      if (now != seen) return now;
      pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    asleep_.fetch_sub(1);
    return generation_.load(std::memory_order_acquire);
  }

  std::atomic<int64_t> wanted_{1};
  std::mutex turn_;
  int64_t started_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int64_t> asleep_{0};
  std::atomic<uint64_t> generation_{0};

  Task task_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> failed_{false};
  int64_t num_shares_ = 0;
  Share shares_[MOST_THREADS];
  alignas(64) std::atomic<int64_t> places_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
};

// Never destroyed, since helpers outlive main().
alignas(Pool) unsigned char memory[sizeof(Pool)];

// A forked child has no helper threads, so it starts with a new pool of the same size.
void begin_anew() {
  const int64_t kept = reinterpret_cast<Pool*>(memory)->threads();
  (new (memory) Pool)->set_threads(kept);
}

Pool& pool() {
  static Pool* const only = [] {
    Pool* made = new (memory) Pool;
    pthread_atfork(nullptr, nullptr, begin_anew);
    return made;
  }();
  return *only;
}

}  // namespace

void set_threads(int64_t threads) { pool().set_threads(threads); }

int64_t threads() { return pool().threads(); }

bool share(int64_t count, Task task, const void* context) { return pool().share(count, task, context); }

}  // namespace fissile
