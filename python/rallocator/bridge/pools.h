// Private pools: of graphs and of torch.cuda.MemPool.
#pragma once

#include "memory.h"

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
    if (allocator) {
      refuse("rallocator has no torch.cuda.MemPool with an allocator of its own: leave the allocator out");
    }
    check(api->create_pool(device, pool.first, pool.second));
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
