// What all parts of the bridge share: torch's names for things, the table of functions, and how failures are raised.
#pragma once

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/api/include/torch/version.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "raised.h"
#include "rallocator.h"

// 211 for torch 2.11.
#define TORCH_RELEASE (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

namespace rallocator {
namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::GatheredContext;
using c10::MempoolId_t;
using c10::CachingDeviceAllocator::DeviceStats;
#if TORCH_RELEASE >= 211
using c10::CachingDeviceAllocator::AnnotationEntry;
using SharedAllocator = std::shared_ptr<CUDAAllocator>;
#else
using SharedAllocator = CUDAAllocator*;
#endif
using Context = std::shared_ptr<GatheredContext>;

constexpr auto DEVICE_TYPE = c10::DeviceType::CUDA;

const rallocator_api* api = nullptr;

// What the allocator of a pool has raised last on this thread. It may not pass through rallocator, so it waits here until
// the call that it made fail has returned.
thread_local Raised raised_by_source;

// Raises the failure of a call.
[[noreturn]] void fail(rallocator_status status = RALLOCATOR_FAILED) {
  if (status == RALLOCATOR_SOURCE_FAILED && raised_by_source) {
    rethrow_exception(std::move(raised_by_source));
  }
  C10_THROW_ERROR(Error, api->last_error());
}

// What a call failed for, as text, where nothing may be raised.
std::string reason(rallocator_status status) {
  try {
    fail(status);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return api->last_error();
  }
}

void check(rallocator_status status) {
  if (C10_UNLIKELY(status != RALLOCATOR_OK)) {
    fail(status);
  }
}

[[noreturn]] void refuse(const char* what) {
  C10_THROW_ERROR(
      NotImplementedError,
      std::string(what) + ". Run this part with rallocator.enable() left out, and please report what you need it for.");
}

}  // namespace
}  // namespace rallocator
