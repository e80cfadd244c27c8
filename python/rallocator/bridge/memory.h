// Memory, limits and figures: what torch asks of any allocator.
#pragma once

#include "pictures.h"

namespace rallocator {
namespace {

// What a thread's last calls were about, which is nearly always what the next are about.
struct Recent {
  // Of the latest allocation, where there are several devices: where the next free is looked for first.
  DeviceIndex device = 0;
  // A stream other than the default one, by its device and id, which always stand for the same.
  DeviceIndex stream_device = -1;
  c10::StreamId stream_id = 0;
  cudaStream_t stream = nullptr;
};

// One variable, since finding any of them costs a call.
thread_local Recent recent;

// Whether this process sees one device and no other.
std::atomic<bool> has_one_device{false};

// The current device. Asking costs a quarter of a pair, and more on a thread's first call, for which CUDA prepares the
// thread: so not where there is only one answer.
DeviceIndex current_device() {
  DeviceIndex device = 0;
  if (C10_UNLIKELY(!has_one_device.load(std::memory_order_relaxed))) {
    // The check, which is a call however well it goes, only where something went wrong.
    if (const auto error = c10::cuda::GetDevice(&device); C10_UNLIKELY(error != cudaSuccess)) {
      C10_CUDA_CHECK(error);
    }
  }
  return device;
}

// Where a free is looked for first.
DeviceIndex likely_device() {
  return C10_LIKELY(has_one_device.load(std::memory_order_relaxed)) ? 0 : recent.device;
}

// Whether the profiler is to be told of memory. Whether there is one at all is asked first, which takes half the time.
bool is_profiled() {
  return C10_UNLIKELY(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) &&
      c10::memoryProfilingEnabled();
}

// The current stream of the device.
cudaStream_t current_stream(DeviceIndex device) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device);
  if (stream.id() == 0) {
    return nullptr;
  }
  auto& last = recent;
  if (C10_UNLIKELY(last.stream_id != stream.id() || last.stream_device != device)) {
    last.stream = stream.stream();
    last.stream_id = stream.id();
    last.stream_device = device;
  }
  return last.stream;
}

class Memory : public CUDAAllocator {
 public:
  using CUDAAllocator::recordStream;

  // Memory.

  DataPtr allocate(size_t size) override {
    const auto device = current_device();
    void* address = size == 0 ? nullptr : obtain(size, device, current_stream(device));
    return {address, address, &give_back, c10::Device(DEVICE_TYPE, device)};
  }

  void* raw_alloc(size_t size) override {
    if (size == 0) {
      return nullptr;
    }
    const auto device = current_device();
    return obtain(size, device, current_stream(device));
  }

  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return size == 0 ? nullptr : obtain(size, current_device(), stream);
  }

  void raw_delete(void* address) override {
    tell_of_free(address);
    if (address && !api->take_back(address, likely_device())) {
      C10_THROW_ERROR(Error, "invalid device pointer: " + std::to_string(reinterpret_cast<uintptr_t>(address)));
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    C10_CUDA_CHECK(cudaMemcpy(destination, source, count, cudaMemcpyDeviceToDevice));
  }

  void recordStream(const DataPtr& data, c10::cuda::CUDAStream stream) override {
    // Memory that came from elsewhere, for instance from another process, has another deleter.
    if (data.get() && data.get_deleter() == &give_back) {
      api->record_stream(data.get(), stream.stream());
    }
  }

  void* getBaseAllocation(void* address, size_t* size) override {
    return api->base_allocation(address, size);
  }

  cudaError_t memcpyAsync(
      void* destination,
      int destination_device,
      const void* source,
      int source_device,
      size_t count,
      cudaStream_t stream,
      bool has_peer_access) override {
    if (has_peer_access || destination_device == source_device) {
      return cudaMemcpyAsync(destination, source, count, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(destination, destination_device, source, source_device, count, stream);
  }

  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    const c10::DeviceGuard guard(c10::Device(DEVICE_TYPE, device));
    const auto error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(error);
    }
    check(api->reach_peer(device, peer));
  }

#if TORCH_RELEASE >= 213
  DataPtr allocateWithAddress(size_t, void*) override {
    refuse("rallocator cannot allocate at an address that the program chooses");
  }
#endif

  // Other processes.

  ShareableHandle shareIpcHandle(void* address) override {
    uint64_t offset = 0;
    const char* text = api->share(address, &offset);
    if (!text) {
      fail();
    }
    return {static_cast<ptrdiff_t>(offset), text};
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    // Of tensors that share memory the second finds what the first has opened.
    const std::lock_guard<std::mutex> lock(opened_mutex_);
    auto& known = opened_[handle];
    if (auto opened = known.lock()) {
      return opened;
    }
    void* base = nullptr;
    const auto status = api->open_shared(handle.c_str(), current_device(), &base);
    if (status != RALLOCATOR_OK) {
      opened_.erase(handle);
      fail();
    }
    std::shared_ptr<void> opened(base, [this, handle](void* base) {
      {
        const std::lock_guard<std::mutex> lock(opened_mutex_);
        const auto known = opened_.find(handle);
        if (known != opened_.end() && known->second.expired()) {
          opened_.erase(known);
        }
      }
      api->close_shared(base);
    });
    known = opened;
    return opened;
  }

  // Life.

  void init(int device_count) override {
    has_one_device.store(device_count == 1, std::memory_order_relaxed);
    api->init(device_count);
  }

  bool initialized() override {
    return api->device_count() > 0;
  }

  void enable(bool value) override {
    if (!value) {
      TORCH_WARN_ONCE("rallocator always caches memory: to go without, leave rallocator.enable() out.");
    }
  }

  bool isEnabled() const override {
    return true;
  }

  void emptyCache(MempoolId_t pool) override {
    if (pool == MempoolId_t{0, 0}) {
      check(api->empty_cache());
    } else if (const auto status = api->empty_pool(pool.first, pool.second); status != RALLOCATOR_OK) {
      // torch asks for this in a destructor, where an exception would end the process.
      TORCH_WARN("memory of a private pool could not be given back: ", reason(status));
    }
  }

  // Limits and figures.

  double getMemoryFraction(DeviceIndex device) override {
    return api->memory_fraction(device);
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    check(api->set_memory_fraction(device, fraction));
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    *largest = api->largest_available(device);
  }

  DeviceStats getDeviceStats(DeviceIndex device) override {
    rallocator_device_stats stats;
    api->device_stats(device, &stats);
    DeviceStats result;
    copy_family(result.allocation, stats.allocation);
    copy_family(result.segment, stats.segment);
    copy_family(result.active, stats.active);
    copy_family(result.inactive_split, stats.inactive_split);
    copy_family(result.allocated_bytes, stats.allocated_bytes);
    copy_family(result.reserved_bytes, stats.reserved_bytes);
    copy_family(result.active_bytes, stats.active_bytes);
    copy_family(result.inactive_split_bytes, stats.inactive_split_bytes);
    copy_family(result.requested_bytes, stats.requested_bytes);
    copy(result.oversize_allocations, stats.oversize_allocations);
    copy(result.oversize_segments, stats.oversize_segments);
    result.num_alloc_retries = stats.num_alloc_retries;
    result.num_ooms = stats.num_ooms;
    result.num_sync_all_streams = stats.num_sync_all_streams;
    result.num_device_alloc = stats.num_device_alloc;
    result.num_device_free = stats.num_device_free;
    result.max_split_size = stats.max_split_size;
#if TORCH_RELEASE >= 212
    result.num_oom_rejections = stats.num_oom_rejections;
#endif
#if TORCH_RELEASE >= 213
    api->visit_private_pools(
        device,
        [](void* result, uint64_t first, uint64_t second, const rallocator_family* reserved) {
          auto& pools = static_cast<DeviceStats*>(result)->reserved_bytes_by_private_pools;
          copy_family(pools[MempoolId_t{first, second}], *reserved);
        },
        &result);
#endif
    return result;
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    api->reset_accumulated_stats(device);
  }

  void resetPeakStats(DeviceIndex device) override {
    api->reset_peak_stats(device);
  }

#if TORCH_RELEASE >= 210
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    struct Found {
      DeviceIndex device;
      std::vector<StreamSegmentSize> sizes;
    } found{device, {}};
    const auto add = [](void* context, const rallocator_segment* segment) {
      auto& found = *static_cast<Found*>(context);
      if (segment->device != found.device || !segment->is_expandable) {
        return;
      }
      const auto stream = static_cast<cudaStream_t>(segment->stream);
      for (auto& size : found.sizes) {
        if (size.stream == stream && size.is_small_pool != segment->is_large) {
          size.total_size += segment->size;
          return;
        }
      }
      found.sizes.emplace_back(stream, !segment->is_large, segment->size);
    };
    const rallocator_memory_visitor visitor{&found, add, nullptr};
    api->visit_memory(0, 0, &visitor);
    return found.sizes;
  }
#endif

  // Failures.

  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    const std::lock_guard<std::mutex> lock(observers_mutex_);
    observers_.push_back(std::move(observer));
  }

#if TORCH_RELEASE >= 212
  // Nothing here rejects a request before it is tried, so there is nothing to observe.
  void attachOomRejectionObserver(OomRejectionObserver) override {}
#endif

 private:
  // Memory for work on the stream, with all that torch does around an allocation.
  void* obtain(size_t size, DeviceIndex device, cudaStream_t stream) {
    void* address = nullptr;
    const auto status = api->allocate(size, device, stream, &address);
    if (C10_UNLIKELY(status != RALLOCATOR_OK)) {
      report_failure(status, size, device);
    }
    if (C10_UNLIKELY(!has_one_device.load(std::memory_order_relaxed))) {
      recent.device = device;
    }
    if (is_profiled()) {
      tell_profiler(address, 1);
    }
    if (const auto* interpreter = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(interpreter != nullptr)) {
      (*interpreter)->trace_gpu_memory_allocation(DEVICE_TYPE, reinterpret_cast<uintptr_t>(address));
    }
    return address;
  }

  // The deleter of every tensor's memory. Never raises: it runs in destructors.
  static void give_back(void* address) {
    tell_of_free(address);
    api->free(address, likely_device());
  }

  static void tell_of_free(void* address) {
    if (is_profiled()) {
      tell_profiler(address, -1);
    }
    if (const auto* interpreter = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(interpreter != nullptr)) {
      (*interpreter)->trace_gpu_memory_deallocation(DEVICE_TYPE, reinterpret_cast<uintptr_t>(address));
    }
  }

  static void tell_profiler(void* address, int sign) {
    rallocator_block block;
    if (!api->find_block(address, &block)) {
      return;
    }
    // Of a free nobody else says which device it concerns.
    const auto device = static_cast<DeviceIndex>(api->device_of(address));
    uint64_t allocated = 0;
    uint64_t reserved = 0;
    api->memory_in_use(device, &allocated, &reserved);
    const auto size = static_cast<int64_t>(block.size);
    c10::reportMemoryUsageToProfiler(
        address, sign * size, sign < 0 ? allocated - block.size : allocated, reserved, c10::Device(DEVICE_TYPE, device));
  }

  [[noreturn]] void report_failure(rallocator_status status, size_t size, DeviceIndex device) {
    if (status != RALLOCATOR_OUT_OF_MEMORY) {
      fail(status);
    }
    const std::string text = api->last_error();
    rallocator_out_of_memory details{size, 0, 0};
    api->last_out_of_memory(&details);
    uint64_t allocated = 0;
    uint64_t reserved = 0;
    api->memory_in_use(device, &allocated, &reserved);
    c10::reportOutOfMemoryToProfiler(size, allocated, reserved, c10::Device(DEVICE_TYPE, device));
    std::vector<OutOfMemoryObserver> observers;
    {
      const std::lock_guard<std::mutex> lock(observers_mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) {
      observer(device, details.requested, details.total, details.free);
    }
    C10_THROW_ERROR(OutOfMemoryError, text);
  }

  std::mutex opened_mutex_;
  std::unordered_map<std::string, std::weak_ptr<void>> opened_;
  std::mutex observers_mutex_;
  std::vector<OutOfMemoryObserver> observers_;
};

}  // namespace
}  // namespace rallocator
