/* The C interface of rallocator, a caching allocator for GPU memory.
 *
 * These functions are exported by the Python extension itself, rallocator/_core.abi3.so, so that a program that loads
 * that file by its path (`rallocator._core.__file__`) and the Python process that imported it share one allocator.
 * Python installs it with `rallocator.enable()`; before that, requests fail and everything else does nothing.
 *
 * Two groups:
 *
 *  1. The hooks that torch's CUDAPluggableAllocator takes. The signatures are torch's, and the ones that can fail raise
 *     C++ exceptions. The declarations they have to match are the members `alloc_fn_` to `release_pool_` in
 *     https://github.com/pytorch/pytorch/blob/v2.9.0/torch/csrc/cuda/CUDAPluggableAllocator.h
 *     and are the same in every release from 2.9 to 2.15.
 *  2. rallocator_api_v1(), a table of functions for everybody else. None of them raises.
 *
 * Rules for all of them:
 *
 *  - They may be called from any thread, and never need Python's lock.
 *  - Sizes are in bytes. A device is its index, as CUDA counts it in this process. A stream is a `cudaStream_t` or
 *    `CUstream`; null is the device's default stream. Addresses are device memory: never to be read by the host.
 *  - What gives something back never fails: a null, foreign or repeated pointer is ignored.
 *  - In a forked child of a process that had used the GPU, and while the process ends, requests fail and everything
 *    else does nothing.
 */
#ifndef RALLOCATOR_H
#define RALLOCATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --------------------------------------------------------------------------------------------------------------------
 * 1. The hooks of torch's CUDAPluggableAllocator
 * ------------------------------------------------------------------------------------------------------------------ */

/* `size` bytes on `device` for work on `stream`; null only for size 0.
 *
 * Raises c10::OutOfMemoryError, which Python sees as torch.OutOfMemoryError, or std::runtime_error, which it sees as
 * RuntimeError. Where torch is not loaded, out of memory is a std::runtime_error too.
 *
 * torch: constructor argument `alloc_fn`, std::function<void*(size_t, int, cudaStream_t)> */
void *rallocator_malloc(size_t size, int device, void *stream);

/* Takes back memory from rallocator_malloc. `size`, `device` and `stream` are hints that may be stale.
 *
 * torch: constructor argument `free_fn`, std::function<void(void*, size_t, int, cudaStream_t)> */
void rallocator_free(void *address, size_t size, int device, void *stream);

/* Work on `stream` uses the memory at `address`: its free takes effect when the work queued there by then has ended.
 *
 * torch: set_record_stream_fn, std::function<void(void*, cudaStream_t)> */
void rallocator_record_stream(void *address, void *stream);

/* CUDA has been initialised with so many devices.
 *
 * torch: set_init_fn, std::function<void(int)> */
void rallocator_init(int device_count);

/* Gives cached memory back to the driver: torch.cuda.empty_cache(). Raises std::runtime_error.
 *
 * torch: set_reset_fn, std::function<void()> */
void rallocator_reset(void);

/* Limits `device` to `fraction`, from 0 to 1, of its memory. Raises std::runtime_error.
 *
 * torch: set_memory_fraction_fn, std::function<void(double, int)> */
void rallocator_set_memory_fraction(double fraction, int device);

/* The base of the driver's allocation that holds the memory from rallocator_malloc at `address`; its bytes at `size`,
 * unless that is null. Any other address is returned as it came, with size 0.
 *
 * torch: set_base_alloc_fn, std::function<void*(void*, size_t*)> */
void *rallocator_base_allocation(void *address, size_t *size);

/* From now on requests on streams that `filter` accepts are met from the private pool (first, second) of `device`.
 * Each begin is answered by one end and one release. Raises std::runtime_error; an exception out of the filter passes
 * through rallocator_malloc.
 *
 * torch: set_begin_allocate_to_pool, std::function<void(int, c10::MempoolId_t, std::function<bool(cudaStream_t)>)>.
 * By the Itanium C++ ABI the pair arrives as two integers and the std::function by its address; only that of libstdc++
 * (32 bytes) is understood. */
void rallocator_begin_pool(int device, uint64_t first, uint64_t second, const uint64_t (*filter)[4]);

/* Requests go to the default pool again.
 *
 * torch: set_end_allocate_to_pool_fn, std::function<void(int, c10::MempoolId_t)> */
void rallocator_end_pool(int device, uint64_t first, uint64_t second);

/* One user of the pool is gone. With the last one its memory becomes available for other things.
 *
 * torch: set_release_pool, std::function<void(int, c10::MempoolId_t)> */
void rallocator_release_pool(int device, uint64_t first, uint64_t second);

/* --------------------------------------------------------------------------------------------------------------------
 * 2. The table of functions
 * ------------------------------------------------------------------------------------------------------------------ */

/* How a call ended. */
typedef enum rallocator_status {
  RALLOCATOR_OK = 0,
  RALLOCATOR_OUT_OF_MEMORY = 1, /* free something, or ask for less */
  RALLOCATOR_FAILED = 2,        /* anything else: last_error() says what */
} rallocator_status;

/* Whether requests on `stream` go to the pool that the filter was given for. Called from any thread, also from several
 * at once, while no lock is held. An exception of C++ passes through `allocate`. */
typedef bool (*rallocator_stream_filter)(void *context, void *stream);

/* Receives one statistic. `key` is valid during the call. It must not raise. */
typedef void (*rallocator_stat_visitor)(void *context, const char *key, int64_t value);

/* Version 1. Fields are only ever added at the end: a field is there if it lies within the first `size` bytes. */
typedef struct rallocator_api {
  uint32_t version; /* 1 */
  uint32_t size;    /* bytes of this struct, in the library that was loaded */

  /* The text of this thread's last failure, valid until its next one. Never null. */
  const char *(*last_error)(void);

  /* `size` bytes on `device` for work on `stream`, at `*address`; null for size 0 and after a failure. */
  rallocator_status (*allocate)(size_t size, int32_t device, void *stream, void **address);
  /* Takes memory back. `device` is a hint. */
  void (*free)(void *address, int32_t device);
  /* See rallocator_record_stream. */
  void (*record_stream)(void *address, void *stream);
  /* Gives cached memory back to the driver. */
  rallocator_status (*empty_cache)(void);
  /* See rallocator_base_allocation. */
  void *(*base_allocation)(void *address, size_t *size);

  /* See rallocator_begin_pool. A null `filter` accepts every stream. `release_context`, unless null, is called once
   * when the filter is no longer needed, also if this call fails; it may not call rallocator. */
  rallocator_status (*begin_pool)(int32_t device, uint64_t first, uint64_t second, rallocator_stream_filter filter,
                                  void *context, void (*release_context)(void *context));
  void (*end_pool)(int32_t device, uint64_t first, uint64_t second);
  void (*release_pool)(int32_t device, uint64_t first, uint64_t second);

  /* Call this before a stream is destroyed: rallocator may not ask about it afterwards. */
  void (*retire_stream)(void *stream);
  /* Keeps the pages of the allocation at `address` where they are, for as long as somebody has registered or exported
   * them. Each pin needs its own unpin. False for an address that is not rallocator's. */
  bool (*pin)(void *address);
  bool (*unpin)(void *address);

  /* Limits `device` to `fraction`, from 0 to 1, of its memory. */
  rallocator_status (*set_memory_fraction)(int32_t device, double fraction);
  /* The present limit; 1 where none was set. */
  double (*memory_fraction)(int32_t device);

  /* Calls `visit` for each statistic of `device`. The keys are those of torch.cuda.memory_stats(), flat with dots, for
   * instance "reserved_bytes.all.current". */
  void (*visit_stats)(int32_t device, rallocator_stat_visitor visit, void *context);
  void (*reset_peak_stats)(int32_t device);
  void (*reset_accumulated_stats)(int32_t device);
} rallocator_api;

/* The table. It lives as long as the process. */
const rallocator_api *rallocator_api_v1(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RALLOCATOR_H */
