// Allocate + free pairs through whatever allocator torch currently uses, timed without Python between them.

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "../requests.h"

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Nanoseconds of one pair of one size, warm: the median of nine rounds of `pairs`.
double pair_ns(int64_t size_bytes, int64_t pairs) {
  for (int i = 0; i < 1000; i++) {
    allocator::raw_delete(allocator::raw_alloc(size_bytes));
  }
  std::vector<double> rounds;
  for (int round = 0; round < 9; round++) {
    const auto start = Clock::now();
    for (int64_t i = 0; i < pairs; i++) {
      allocator::raw_delete(allocator::raw_alloc(size_bytes));
    }
    rounds.push_back(nanoseconds_since(start) / pairs);
  }
  std::sort(rounds.begin(), rounds.end());
  return rounds[rounds.size() / 2];
}

// Nanoseconds to replace a random one of `live` blocks by one of a random size. As many replacements again warm it up.
double churn_ns(int64_t live, int64_t replacements, int64_t largest_bytes) {
  Random random;
  std::vector<void*> blocks(live);
  for (auto& block : blocks) {
    block = allocator::raw_alloc(random.size(largest_bytes));
  }
  const auto replace = [&] {
    auto& block = blocks[random.next() % live];
    allocator::raw_delete(block);
    block = allocator::raw_alloc(random.size(largest_bytes));
  };
  for (int64_t i = 0; i < replacements; i++) {
    replace();
  }
  const auto start = Clock::now();
  for (int64_t i = 0; i < replacements; i++) {
    replace();
  }
  const double cost = nanoseconds_since(start) / replacements;
  for (auto* block : blocks) {
    allocator::raw_delete(block);
  }
  return cost;
}

// Wall time of all threads' pairs divided by the number of pairs: contention shows as a rise.
double threads_ns(int64_t thread_count, int64_t size_bytes, int64_t pairs) {
  std::vector<std::thread> threads;
  const auto start = Clock::now();
  for (int64_t i = 0; i < thread_count; i++) {
    threads.emplace_back([=] {
      for (int64_t pair = 0; pair < pairs; pair++) {
        allocator::raw_delete(allocator::raw_alloc(size_bytes));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  return nanoseconds_since(start) / (pairs * thread_count);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  module.def("pair_ns", &pair_ns, release_gil());
  module.def("churn_ns", &churn_ns, release_gil());
  module.def("threads_ns", &threads_ns, release_gil());
}
