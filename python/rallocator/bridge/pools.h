// Private pools: of graphs and of torch.cuda.MemPool.
#pragma once

#include "memory.h"

#include <c10/core/DeviceGuard.h>

#include <optional>

namespace rallocator {
namespace {

struct Checkpoint : AllocatorState {
  explicit Checkpoint(rallocator_checkpoint* checkpoint) : checkpoint(checkpoint) {}
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint() override {
    api->drop_checkpoint(checkpoint);
  }

  rallocator_checkpoint* const checkpoint;
};

// Makes a device current for a while, and asks CUDA for nothing if it is.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    if (current_device() != device) {
      guard_.emplace(c10::Device(DEVICE_TYPE, static_cast<DeviceIndex>(device)));
    }
  }

 private:
  std::optional<c10::DeviceGuard> guard_;
};

// An allocator that the program gave a torch.cuda.MemPool, kept for as long as any memory that came from it is there.
struct Source {
  SharedAllocator allocator;

  static rallocator_status obtain(void* source, size_t size, int32_t device, void* stream, void** address) noexcept {
    raised_by_source = Raised();
    try {
      const OnDevice guard(device);
      // torch's own allocator calls raw_alloc, which asks for the current stream: here it is said.
      auto& allocator = static_cast<Source*>(source)->allocator;
      *address = allocator->raw_alloc_with_stream(size, static_cast<cudaStream_t>(stream));
      return RALLOCATOR_OK;
    } catch (const c10::OutOfMemoryError&) {
      return RALLOCATOR_OUT_OF_MEMORY;
    } catch (...) {
      raised_by_source = current_exception();
      return RALLOCATOR_SOURCE_FAILED;
    }
  }

  static rallocator_status give_back(void* source, void* address, size_t, int32_t device, void*) noexcept {
    raised_by_source = Raised();
    try {
      const OnDevice guard(device);
      static_cast<Source*>(source)->allocator->raw_delete(address);
      return RALLOCATOR_OK;
    } catch (...) {
      raised_by_source = current_exception();
      return RALLOCATOR_SOURCE_FAILED;
    }
  }

  static void release(void* source) noexcept {
    delete static_cast<Source*>(source);
  }
};

class Pools : public Memory {
 public:
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    using Filter = std::function<bool(cudaStream_t)>;
    const auto takes = [](void* filter, void* stream) {
      return (*static_cast<Filter*>(filter))(static_cast<cudaStream_t>(stream));
    };
    const auto forget = [](void* filter) { delete static_cast<Filter*>(filter); };
    check(api->begin_pool(device, pool.first, pool.second, takes, new Filter(std::move(filter)), forget));
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    api->end_pool(device, pool.first, pool.second);
  }

  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    api->release_pool(device, pool.first, pool.second);
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return static_cast<int>(api->pool_users(device, pool.first, pool.second));
  }

  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, SharedAllocator allocator) override {
    if (!allocator) {
      check(api->create_pool(device, pool.first, pool.second));
      return;
    }
    auto* context = new Source{std::move(allocator)};
    const rallocator_source source{context, &Source::obtain, &Source::give_back, &Source::release};
    check(api->create_pool_from(device, pool.first, pool.second, &source));
  }

#if TORCH_RELEASE >= 211
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override {
    api->serve_when_out_of_memory(device, pool.first, pool.second, use_on_oom);
  }
#else
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override {
    api->serve_when_out_of_memory(device, pool.first, pool.second, true);
  }
#endif

#if TORCH_RELEASE >= 210
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    api->forbid_splits(device, pool.first, pool.second);
  }
#endif

  bool checkPoolLiveAllocations(
      DeviceIndex device,
      MempoolId_t pool,
      const std::unordered_set<void*>& expected) override {
    std::vector<void*> held;
    const auto add = [](void* held, void* address) { static_cast<std::vector<void*>*>(held)->push_back(address); };
    TORCH_CHECK(api->visit_pool(device, pool.first, pool.second, add, &held), "Could not find pool of id");
    return held.size() == expected.size() &&
        std::all_of(held.begin(), held.end(), [&](void* address) { return expected.count(address) > 0; });
  }

  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    auto* checkpoint = api->checkpoint_pool(device, pool.first, pool.second);
    TORCH_CHECK(checkpoint, "Could not find pool of id");
    return std::make_shared<Checkpoint>(checkpoint);
  }

  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    const auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    TORCH_CHECK(checkpoint, "the checkpoint is another allocator's");
    std::pair<std::vector<void*>, std::vector<void*>> changed;
    using Changed = decltype(changed);
    const auto freed = [](void* changed, void* address) { static_cast<Changed*>(changed)->first.push_back(address); };
    const auto allocated = [](void* changed, void* address) {
      static_cast<Changed*>(changed)->second.push_back(address);
    };
    check(api->restore_pool(device, checkpoint->checkpoint, freed, allocated, &changed));
    CheckpointDelta delta;
    delta.ptrs_freed = std::move(changed.first);
    for (void* address : changed.second) {
      delta.dataptrs_allocd.emplace_back(address, address, raw_deleter(), c10::Device(DEVICE_TYPE, device));
    }
    return delta;
  }
};

}  // namespace
}  // namespace rallocator
