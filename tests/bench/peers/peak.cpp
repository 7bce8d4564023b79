// What this machine's memory and arithmetic reach with so many threads: `peak THREADS`, compiled by peak.py.
//
// Prints two numbers: the best of several readings of 1 GiB in bytes per second, and multiply-adds on registers alone
// in operations per second, of float32, or of bfloat16 where AVX512-BF16 or AMX are compiled in.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{1} << 30;
constexpr size_t kLine = 64;
constexpr int kReadings = 5;
constexpr int kComputations = 3;
constexpr long kRounds = 100'000'000;

volatile float sink;

double seconds_of(int threads, const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> team;
  for (int i = 0; i < threads; ++i) team.emplace_back([&, i] { work(i); });
  for (auto& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Several streams side by side and prefetches keep more lines in flight than one stream does.
void read_streams(const char* from, size_t bytes, size_t streams, size_t ahead) {
  const size_t length = bytes / streams;
  __m256i sum = _mm256_setzero_si256();
  for (size_t at = 0; at < length; at += kLine) {
    for (size_t stream = 0; stream < streams; ++stream) {
      const char* line = from + stream * length + at;
      _mm_prefetch(line + ahead, _MM_HINT_T0);
      sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(line)));
      sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32)));
    }
  }
  sink = static_cast<float>(_mm256_extract_epi32(sum, 0));
}

double read_rate(int threads) {
  auto* memory = static_cast<char*>(std::aligned_alloc(size_t{1} << 21, kBytes));
  madvise(memory, kBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kBytes);
  const size_t part = kBytes / threads / 4096 * 4096;
  double best = 1e9;
  for (const size_t streams : {1, 2, 4}) {
    for (const size_t ahead : {512, 1024, 4096}) {
      for (int i = 0; i < kReadings; ++i) {
        best = std::min(best, seconds_of(threads, [&](int thread) {
                          read_streams(memory + thread * part, part, streams, ahead);
                        }));
      }
    }
  }
  std::free(memory);
  return static_cast<double>(part * threads) / best;
}

#if defined(__AMX_BF16__)
// Four independent tiles of sums, as a blocked product has.
constexpr double kOperations = 4 * 2.0 * 16 * 16 * 32;
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};
  uint8_t rows[16] = {};
};
void compute(long rounds) {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) std::abort();
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.columns[i] = 64, config.rows[i] = 16;
  // GCC's intrinsic says that it reads a pointer's size of it alone, so that the rest would be left out.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#elif defined(__AVX512BF16__)
constexpr int kSums = 12;
constexpr double kOperations = kSums * 2.0 * 32;
void compute(long rounds) {
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, ones, ones);
      asm volatile("" : "+v"(sum));
    }
  }
#pragma GCC unroll 16
  for (const auto& sum : sums) sink = _mm512_cvtss_f32(sum);
}
#elif defined(__AVX512F__)
constexpr int kSums = 12;
constexpr double kOperations = kSums * 2.0 * 16;
void compute(long rounds) {
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0F);
  const __m512 scale = _mm512_set1_ps(0.9999F), offset = _mm512_set1_ps(1e-4F);
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) {
      sum = _mm512_fmadd_ps(sum, scale, offset);
      asm volatile("" : "+v"(sum));
    }
  }
#pragma GCC unroll 16
  for (const auto& sum : sums) sink = _mm512_cvtss_f32(sum);
}
#else
constexpr int kSums = 12;
constexpr double kOperations = kSums * 2.0 * 8;
void compute(long rounds) {
  __m256 sums[kSums];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm256_set1_ps(1.0F);
  const __m256 scale = _mm256_set1_ps(0.9999F), offset = _mm256_set1_ps(1e-4F);
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) {
      sum = _mm256_fmadd_ps(sum, scale, offset);
      asm volatile("" : "+x"(sum));
    }
  }
#pragma GCC unroll 16
  for (const auto& sum : sums) sink = _mm256_cvtss_f32(sum);
}
#endif

double compute_rate(int threads) {
  double best = 1e9;
  for (int i = 0; i < kComputations; ++i) best = std::min(best, seconds_of(threads, [](int) { compute(kRounds); }));
  return kOperations * kRounds * threads / best;
}

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 0;
  if (threads < 1) {
    std::fprintf(stderr, "usage: peak THREADS\n");
    return 2;
  }
  std::printf("%.6g %.6g\n", read_rate(threads), compute_rate(threads));
  return 0;
}
