// Sizes of requests, drawn so that every run and every allocator sees the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

// Marsaglia's xorshift64 with his published seed.
class Random {
 public:
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }

  // A size whose logarithm is uniform, at least 512 bytes.
  size_t size(uint64_t largest_bytes) {
    const double uniform = (next() >> 11) * 0x1.0p-53;
    return static_cast<size_t>(std::max(512.0, std::exp(uniform * std::log(static_cast<double>(largest_bytes)))));
  }

 private:
  uint64_t state_ = 88172645463325252ull;
};
