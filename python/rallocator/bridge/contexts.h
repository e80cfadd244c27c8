// Call stacks, as torch gathers them.
#pragma once

#include "common.h"

namespace rallocator {
namespace {

// The stacks that torch gathers, by the numbers that rallocator keeps in their place. Of those that nothing names any
// more, all are dropped whenever the number of stacks has doubled, and when recording ends.
class Contexts {
 public:
  void set_recorder(CreateContextFn recorder) {
    recorder_.store(recorder);
  }

  uint32_t take() noexcept {
    const auto recorder = recorder_.load();
    Context context;
    try {
      context = recorder ? recorder() : nullptr;
    } catch (...) {
      // An allocation without its stack is better than none.
    }
    if (!context) {
      return 0;
    }
    std::vector<Context> dropped;  // Destroyed after the lock is.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() >= sweep_at_) {
      dropped = sweep();
    }
    do {
      last_ = last_ % LARGEST + 1;
    } while (entries_.count(last_));
    entries_.emplace(last_, Entry{std::move(context), true});
    return last_;
  }

  void noted(uint32_t stack) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(stack);
    if (found != entries_.end()) {
      found->second.in_flight = false;
    }
  }

  void drop_unnamed() {
    std::vector<Context> dropped;  // Destroyed after the lock is.
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped = sweep();
  }

  Context find(uint32_t stack) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(stack);
    return found == entries_.end() ? nullptr : found->second.context;
  }

 private:
  static constexpr uint32_t LARGEST = (1u << 31) - 1;

  struct Entry {
    Context context;
    bool in_flight;  // Taken, but perhaps not noted yet.
  };

  std::vector<Context> sweep() {
    std::unordered_set<uint32_t> named;
    api->visit_stacks(
        [](void* named, uint32_t stack) { static_cast<std::unordered_set<uint32_t>*>(named)->insert(stack); }, &named);
    std::vector<Context> dropped;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (entry->second.in_flight || named.count(entry->first)) {
        ++entry;
      } else {
        dropped.push_back(std::move(entry->second.context));
        entry = entries_.erase(entry);
      }
    }
    sweep_at_ = std::max<size_t>(1024, 2 * entries_.size());
    return dropped;
  }

  std::atomic<CreateContextFn> recorder_{nullptr};
  std::mutex mutex_;
  std::unordered_map<uint32_t, Entry> entries_;
  uint32_t last_ = 0;
  size_t sweep_at_ = 1024;
};

Contexts& contexts() {
  static auto& contexts = *new Contexts;
  return contexts;
}

}  // namespace
}  // namespace rallocator
