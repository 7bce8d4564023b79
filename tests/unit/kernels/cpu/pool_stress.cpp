#include "pool.hpp"
#include "scratch.hpp"
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>
using namespace fissile;

struct Job { int64_t n; std::vector<int>* out; };
static void task(const void* c, int64_t i) {
  const Job& j = *static_cast<const Job*>(c);
  // Long enough for helpers to come in.
  for (volatile int k = 0; k < 5000; k = k + 1) {
  }
  (*j.out)[i] += int(i) + 1;
}
// Two threads share work at the same time, with helpers that sleep in between; every task is done once.
int main() {
  set_threads(4);
  auto caller = [] {
    for (int r = 0; r < 1000; r++) {
      std::vector<int> out(1 + r % 37);
      Job j{int64_t(out.size()), &out};
      if (!share(j.n, task, &j)) std::abort();
      for (size_t i = 0; i < out.size(); i++) if (out[i] != int(i) + 1) std::abort();
      if (r % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  };
  std::thread a(caller), b(caller);
  a.join(); b.join();
}
