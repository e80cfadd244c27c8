// A program in C++ that catches what the hooks raise where torch is not loaded.
// Built as a library by tests/test_c_abi.py.

#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>

#include "rallocator.h"

// Asks for `size` bytes and returns the text of the exception, or "" if there was none.
extern "C" const char *malloc_failure(size_t size, int device) {
  static char text[4096];
  text[0] = '\0';
  try {
    rallocator_free(rallocator_malloc(size, device, nullptr), size, device, nullptr);
  } catch (const std::runtime_error &error) {
    std::strncpy(text, error.what(), sizeof text - 1);
  }
  return text;
}

namespace {

using Filter = std::function<bool(void *)>;

// Begins a pool as torch does: the function is passed by value, hence by its address, and destroyed after the call.
void begin_pool(uint64_t id, Filter filter) {
  rallocator_begin_pool(0, 0, id, reinterpret_cast<const uint64_t(*)[4]>(&filter));
}

void end_pool(uint64_t id) {
  rallocator_end_pool(0, 0, id);
  rallocator_release_pool(0, 0, id);
}

void allocate_and_free(void *stream) {
  rallocator_free(rallocator_malloc(1 << 20, 0, stream), 1 << 20, 0, stream);
}

// An object that is too large to lie inside a std::function.
struct Large {
  std::shared_ptr<int> calls;
  void *expected;
  char rest[64];
  bool operator()(void *stream) const {
    ++*calls;
    return stream == expected;
  }
};

} // namespace

// The calls that a filter got after its caller had destroyed it, or -1 if its copy was not destroyed in the end.
extern "C" int filter_is_copied_and_destroyed() {
  auto calls = std::make_shared<int>(0);
  begin_pool(1, Large{calls, nullptr, {}});
  begin_pool(2, [calls](void *) { return ++*calls < 0; });
  allocate_and_free(nullptr);
  allocate_and_free(&calls);
  end_pool(1);
  end_pool(2);
  return calls.use_count() == 1 ? *calls : -1;
}

// Whether an exception of a filter arrives here, and the allocator works afterwards.
extern "C" bool exception_of_a_filter_passes_through() {
  begin_pool(3, [](void *) -> bool { throw std::logic_error("from the filter"); });
  bool caught = false;
  try {
    rallocator_malloc(1 << 20, 0, nullptr);
  } catch (const std::logic_error &error) {
    caught = std::strcmp(error.what(), "from the filter") == 0;
  }
  end_pool(3);
  allocate_and_free(nullptr);
  return caught;
}

// Whether an empty filter is taken for one that accepts every stream.
extern "C" bool empty_filter_accepts_every_stream() {
  begin_pool(4, Filter());
  allocate_and_free(nullptr);
  end_pool(4);
  return true;
}
