// The bridge: torch's own interface for CUDA allocators, c10::cuda::CUDACachingAllocator::CUDAAllocator, over rallocator's
// table of functions (rallocator.h). It translates, and decides nothing about memory.
//
// The interface changes from release to release, so a bridge serves the very torch that it was built for: see
// rallocator_bridge_git_version at the end. Differences are guarded by TORCH_RELEASE. Every method says `override`, so
// that a release that changes one fails to compile.
//
// Rules: rallocator calls nothing here while it holds a lock; what it is handed never raises; C++ exceptions leave only
// methods that torch calls. Nothing is ever destroyed, since torch frees tensors until the very end of a process.

#include "history.h"

namespace rallocator {
namespace {

class Bridge final : public History {
 public:
  std::string name() override {
    return "rallocator";
  }
};

}  // namespace
}  // namespace rallocator

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Which torch this is built for: torch.__version__ and torch.version.git_version. Loaded into any other, it would be
// called through a wrong table of functions, without any error before.
EXPORTED extern const char rallocator_bridge_torch_version[];
EXPORTED extern const char rallocator_bridge_git_version[];
const char rallocator_bridge_torch_version[] = TORCH_VERSION;
const char rallocator_bridge_git_version[] = RALLOCATOR_TORCH_GIT_VERSION;

// Makes rallocator torch's allocator. Returns null, or why it cannot be.
EXPORTED const char* rallocator_bridge_install(const rallocator_api* table) {
  using namespace rallocator;
  if (table->version != 1 || table->size < sizeof(rallocator_api)) {
    return "the bridge was built for another version of rallocator";
  }
  auto* present = c10::cuda::CUDACachingAllocator::get();
  if (present && present->initialized()) {
    return "torch's own allocator is already in use";
  }
  api = table;
  static auto* bridge = new Bridge;
  c10::cuda::CUDACachingAllocator::allocator.store(bridge);
  c10::SetAllocator(DEVICE_TYPE, bridge, std::numeric_limits<uint8_t>::max());
  return nullptr;
}

}  // extern "C"
