// An allocator of a program's own, for a torch.cuda.MemPool on a machine without a GPU: its memory is addresses alone.
//
// tests/test_torch_mem_pool.py tells it what to do and asks what it was told.

#include <cstdint>
#include <map>
#include <stdexcept>
#include <sys/types.h>

extern "C" int cudaGetDevice(int *device); // Of fake_cudart.c, which is preloaded.

namespace {

struct Memory {
  ssize_t size;
  int device;
  void *stream;
};

std::map<void *, Memory> held;
uintptr_t next = uintptr_t(1) << 45;

} // namespace

extern "C" {

int own_mode = 0; // 1: gives null; 2: raises when it is asked; 3: raises when it is given back; 4: gives what it gave
int own_asked = 0;
int own_given_back = 0;
int own_mistakes = 0; // What it was given back and is not its own, and calls with another device than the current one
void *own_last_stream = nullptr;
int own_last_device = -1;

int own_held() {
  return static_cast<int>(held.size());
}

void *own_alloc(ssize_t size, int device, void *stream) {
  ++own_asked;
  own_last_stream = stream;
  int current = -1;
  cudaGetDevice(&current);
  own_last_device = device;
  own_mistakes += current != device;
  if (own_mode == 1) return nullptr;
  if (own_mode == 2) throw std::out_of_range("the other library is full of eels");
  if (own_mode == 4 && !held.empty()) return held.begin()->first;
  void *address = reinterpret_cast<void *>(next);
  next += size;
  held[address] = {size, device, stream};
  return address;
}

void own_free(void *address, ssize_t size, int device, void *stream) {
  if (own_mode == 3) throw std::out_of_range("the other library keeps its eels");
  if (own_mode == 4) return;
  const auto found = held.find(address);
  const bool is_own = found != held.end() && found->second.size == size && found->second.device == device &&
                      found->second.stream == stream;
  own_mistakes += !is_own;
  if (is_own) held.erase(found);
  ++own_given_back;
}

} // extern "C"
