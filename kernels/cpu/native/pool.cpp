// One pool for the process. A second one, such as OpenMP's beside PyTorch's, would have its threads spin on the cores that
// this one works on. Helpers wait for work spinning briefly, because kernels follow each other within microseconds, then
// asleep. Each thread has a share of the tasks that lie side by side, and the same one for every kernel: what it wrote
// for some rows is in its core's cache when the next kernel wants them. It takes them one by one, and then others' ones,
// so that a thread that is held up delays the others by one task at most.
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

// Rounds of looking for work before a helper sleeps: about 20 us.
constexpr int SPINS = 2000;
constexpr int64_t MOST_THREADS = 256;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Tasks of a share that nobody has taken yet.
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
      // Nobody is inside. A helper that is late may come in as soon as there are places, so these come last.
      task_ = task;
      context_ = context;
      share_out(count, helpers + 1);
      failed_.store(false, std::memory_order_relaxed);
      places_.store(helpers, std::memory_order_seq_cst);
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load() > 0) wake_.notify_all();
    take_tasks(0);
    // Late helpers find no place any more; those inside finish the task that they have.
    places_.store(0, std::memory_order_seq_cst);
    for (int64_t spin = 0; inside_.load(std::memory_order_seq_cst) > 0; spin++) {
      if (spin < SPINS) pause_briefly();
      else std::this_thread::yield();
    }
    return !failed_.load(std::memory_order_relaxed);
  }

 private:
  // Those that the system does not grant are done without, and asked for again next time.
  void start_missing(int64_t helpers) try {
    for (; started_ < helpers; started_++) std::thread([this, who = started_ + 1] { help(who); }).detach();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): what to do is nothing.
  }

  void share_out(int64_t count, int64_t shares) {
    num_shares_ = shares;
    for (int64_t i = 0; i < shares; i++) {
      shares_[i].next.store(count * i / shares, std::memory_order_relaxed);
      shares_[i].end = count * (i + 1) / shares;
    }
  }

  // First this thread's own.
  void take_tasks(int64_t who) {
    for (int64_t i = 0; i < num_shares_; i++) {
      Share& one = shares_[(who + i) % num_shares_];
      for (int64_t task; (task = one.next.fetch_add(1, std::memory_order_relaxed)) < one.end;) task_(context_, task);
    }
    if (take_scratch_failure()) failed_.store(true, std::memory_order_relaxed);
  }

  // Whether this helper may take part: it is inside before it looks, so that `share` cannot end in between.
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

// Never destroyed: helpers outlive main().
alignas(Pool) unsigned char memory[sizeof(Pool)];

// The child of a fork has none of the helpers: it begins with a pool of its own.
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
