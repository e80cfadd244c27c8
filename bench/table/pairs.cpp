// Allocate + free pairs through the C table of functions, as the bridge makes them for torch.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include "../requests.h"
#include "rallocator.h"

namespace {

const rallocator_api* const api = rallocator_api_v1();
using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// The time that this thread has had on a processor: other programs take none of it.
double processor_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}

void* allocate(size_t size) {
  void* address = nullptr;
  api->allocate(size, 0, nullptr, &address);
  return address;
}

void pair(size_t size) {
  api->free(allocate(size), 0);
}

}  // namespace

extern "C" {

// Makes the pairs and nothing else, to be counted.
void make_pairs(uint64_t size, uint64_t pairs) {
  for (uint64_t i = 0; i < pairs; i++) {
    pair(size);
  }
}

// Nanoseconds of one pair, warm: the least of nine rounds.
double pair_ns(uint64_t size, uint64_t pairs) {
  make_pairs(size, 1000);
  double least = 1e30;
  for (int round = 0; round < 9; round++) {
    const double start = processor_ns();
    make_pairs(size, pairs);
    least = std::min(least, (processor_ns() - start) / pairs);
  }
  return least;
}

// Nanoseconds to replace a random one of `live` blocks by one of a random size, the least of nine rounds; sizes are drawn
// beforehand. A first round, as long, warms it up.
double replacement_ns(uint64_t live, uint64_t replacements, uint64_t largest_bytes) {
  Random random;
  std::vector<void*> blocks(live);
  for (auto& block : blocks) {
    block = allocate(random.size(largest_bytes));
  }
  std::vector<std::pair<uint32_t, size_t>> steps(replacements);
  double least = 1e30;
  for (int round = -1; round < 9; round++) {
    for (auto& [position, size] : steps) {
      position = static_cast<uint32_t>(random.next() % live);
      size = random.size(largest_bytes);
    }
    const double start = processor_ns();
    for (const auto& [position, size] : steps) {
      api->free(blocks[position], 0);
      blocks[position] = allocate(size);
    }
    const double cost = (processor_ns() - start) / replacements;
    least = round < 0 ? least : std::min(least, cost);
  }
  for (auto* block : blocks) {
    api->free(block, 0);
  }
  return least;
}

// Wall time of all threads' pairs, which begin at once, divided by their number: the least of five rounds.
double threads_ns(uint64_t thread_count, uint64_t size, uint64_t pairs) {
  double least = 1e30;
  for (int round = 0; round < 5; round++) {
    std::atomic<bool> begin{false};
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < thread_count; i++) {
      threads.emplace_back([=, &begin] {
        while (!begin.load(std::memory_order_acquire)) {
          std::this_thread::yield();
        }
        make_pairs(size, pairs);
      });
    }
    const auto start = Clock::now();
    begin.store(true, std::memory_order_release);
    for (auto& thread : threads) {
      thread.join();
    }
    least = std::min(least, nanoseconds_since(start) / (pairs * thread_count));
  }
  return least;
}

// Nanoseconds of a step of a loop in which eight sums wait for nothing but room in the processor, the least of nine rounds.
// Where another thread shares the core, this rises as everything else does: figures compare only at equal
// speeds.
double machine_ns() {
  constexpr int STEPS = 100000;
  double least = 1e30;
  for (int round = 0; round < 9; round++) {
    uint64_t sums[8] = {};
    const double start = processor_ns();
    for (uint64_t i = 0; i < STEPS; i++) {
      for (auto& sum : sums) {
        sum += i ^ (sum >> 1);
        asm volatile("" : "+r"(sum));
      }
    }
    least = std::min(least, (processor_ns() - start) / STEPS);
  }
  return least;
}
}
