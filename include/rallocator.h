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
  RALLOCATOR_SOURCE_FAILED = 3, /* a rallocator_source failed: it knows why */
} rallocator_status;

/* Whether physical memory, which is what other libraries register, may change its address. */
typedef enum rallocator_moving {
  RALLOCATOR_MOVE_ON = 0,
  RALLOCATOR_MOVE_OFF = 1,
  RALLOCATOR_MOVE_CONTIGUOUS = 2, /* nor is a block put together from several pieces of it */
} rallocator_moving;

/* Whether requests on `stream` go to the pool that the filter was given for. Called from any thread, also from several
 * at once, while no lock is held. An exception of C++ passes through `allocate`. */
typedef bool (*rallocator_stream_filter)(void *context, void *stream);

/* An allocator of the caller's own that a private pool has its segments from. Its functions are called from any thread,
 * also from several at once, while no lock is held, and may call rallocator: what they allocate there comes from the
 * default pool, or, when memory has run out, from a pool that serves then. A segment may be given back, on the same
 * thread, while they do: let them hold no lock of their own. They must not raise, nor obtain what rallocator itself
 * holds. `size` and `stream` say the same when a segment is given back as when it was obtained. */
typedef struct rallocator_source {
  void *context;
  /* `size` bytes on `device` at `*address`, a multiple of 512, for work on `stream`. RALLOCATOR_OUT_OF_MEMORY, or a null
   * address, if there is too little memory; any other status is a failure. */
  rallocator_status (*obtain)(void *context, size_t size, int32_t device, void *stream, void **address);
  /* Takes a segment back, which no work uses any more. After anything but RALLOCATOR_OK the memory has to be as it was. */
  rallocator_status (*give_back)(void *context, void *address, size_t size, int32_t device, void *stream);
  /* Unless null, called once when neither pool nor segment needs the context any more. */
  void (*release_context)(void *context);
} rallocator_source;

/* Receives one statistic. `key` is valid during the call. It must not raise. */
typedef void (*rallocator_stat_visitor)(void *context, const char *key, int64_t value);

/* A quantity over time. What was ever added is `allocated`, what was ever taken away `freed`. */
typedef struct rallocator_counter {
  int64_t current;
  int64_t peak;
  int64_t allocated;
  int64_t freed;
} rallocator_counter;

/* A quantity of both size classes together, and of each. */
typedef struct rallocator_family {
  rallocator_counter all;
  rallocator_counter small_pool;
  rallocator_counter large_pool;
} rallocator_family;

/* All statistics of a device, by torch's names. */
typedef struct rallocator_device_stats {
  rallocator_family allocation;
  rallocator_family segment;
  rallocator_family active;
  rallocator_family inactive_split;
  rallocator_family allocated_bytes;
  rallocator_family reserved_bytes;
  rallocator_family active_bytes;
  rallocator_family inactive_split_bytes;
  rallocator_family requested_bytes;
  rallocator_counter oversize_allocations;
  rallocator_counter oversize_segments;
  int64_t num_alloc_retries;
  int64_t num_ooms;
  int64_t num_sync_all_streams;
  int64_t num_device_alloc;
  int64_t num_device_free;
  int64_t num_oom_rejections;
  int64_t max_split_size; /* a setting; -1 for none */
} rallocator_device_stats;

/* Receives what a private pool has reserved. It must not raise. */
typedef void (*rallocator_pool_visitor)(void *context, uint64_t first, uint64_t second,
                                        const rallocator_family *reserved_bytes);

/* Why a request failed with RALLOCATOR_OUT_OF_MEMORY; sizes in bytes. */
typedef struct rallocator_out_of_memory {
  uint64_t requested;
  uint64_t total; /* the device's memory, or what this process may reserve of it */
  uint64_t free;  /* what the driver has free */
} rallocator_out_of_memory;

/* The settings that torch's snapshots name. */
typedef struct rallocator_settings {
  double garbage_collection_threshold;
  int64_t max_split_size; /* bytes; -1 for none */
  bool expandable_segments;
  uint64_t roundup_power2_divisions[16]; /* for sizes from 1 MiB on, by power of two */
  const char *text; /* the policy, and all settings that differ from the defaults; lives as long as the process */
} rallocator_settings;

/* What a private pool held at one moment. */
typedef struct rallocator_checkpoint rallocator_checkpoint;

/* Receives an address. It must not raise. */
typedef void (*rallocator_address_visitor)(void *context, void *address);

/* What a block is used for. */
typedef enum rallocator_block_state {
  RALLOCATOR_ALLOCATED = 0,
  RALLOCATOR_PENDING = 1, /* freed, but not yet reusable */
  RALLOCATOR_INACTIVE = 2,
} rallocator_block_state;

typedef struct rallocator_block {
  void *address;
  uint64_t size;
  uint64_t requested; /* 0 for an inactive block */
  uint32_t state;     /* rallocator_block_state */
  uint32_t stack;     /* 0 for none: see rallocator_recording */
} rallocator_block;

/* Contiguous memory that was obtained from the driver, or from a rallocator_source. */
typedef struct rallocator_segment {
  int32_t device;
  uint32_t stack;
  void *address;
  uint64_t size;
  void *stream;
  uint64_t pool_first; /* 0 and 0 for the default pool */
  uint64_t pool_second;
  bool is_large;
  bool is_expandable;
  size_t block_count;
  const rallocator_block *blocks; /* in address order; they cover the segment */
} rallocator_segment;

/* What happened, by torch's name for it. */
typedef enum rallocator_action {
  RALLOCATOR_ALLOC = 0,
  RALLOCATOR_FREE_REQUESTED = 1,
  RALLOCATOR_FREE_COMPLETED = 2,
  RALLOCATOR_SEGMENT_ALLOC = 3,
  RALLOCATOR_SEGMENT_FREE = 4,
  RALLOCATOR_SEGMENT_MAP = 5,
  RALLOCATOR_SEGMENT_UNMAP = 6,
  RALLOCATOR_OOM = 7, /* `address` holds what the driver had free, in bytes */
  RALLOCATOR_SNAPSHOT = 8,
  RALLOCATOR_ANNOTATE = 9,
} rallocator_action;

typedef struct rallocator_event {
  int32_t device;
  uint32_t action; /* rallocator_action */
  uint64_t address;
  uint64_t size;
  void *stream;
  uint64_t pool_first;
  uint64_t pool_second;
  int64_t time_us; /* since 1970 */
  uint32_t stack;
  const char *label;           /* see set_label; empty for none */
  const char *compile_context; /* see set_compile_context; empty for none */
} rallocator_event;

/* Receives a picture of memory: each segment in address order, device by device, then each event, oldest first. What is
 * pointed to is valid during the call. They must not raise. Either may be null. */
typedef struct rallocator_memory_visitor {
  void *context;
  void (*segment)(void *context, const rallocator_segment *segment);
  void (*event)(void *context, const rallocator_event *event);
} rallocator_memory_visitor;

/* Receives the number of a stack. It must not raise. */
typedef void (*rallocator_stack_visitor)(void *context, uint32_t stack);

/* What is recorded, and where call stacks come from. */
typedef struct rallocator_recording {
  uint64_t limit;           /* how many of the latest events are kept, on each device */
  uint32_t skipped_actions; /* a bit for each rallocator_action that is not kept: 1 << action */
  bool events_have_stacks;  /* else only blocks and segments have */
  bool takes_on_free;       /* whether a free takes a stack too */
  /* Called before each allocation, under no lock: the number, from 1 to 2^31 - 1, that the caller keeps the present call
   * stack under; 0 for none. Null: no stacks are taken. It must not raise. */
  uint32_t (*take_stack)(void);
  /* Called once the allocator has noted such a number, or will not: from now on visit_stacks names it if it is needed. */
  void (*stack_noted)(uint32_t stack);
} rallocator_recording;

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
  /* Gives cached memory back to where it came from. */
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

  /* From here on: what the bridge to torch needs besides. */

  /* See rallocator_init. */
  void (*init)(int32_t device_count);
  /* What init was told; 0 before. */
  int32_t (*device_count)(void);
  /* As free; false, and nothing is done, for an address that is not allocated here. */
  bool (*take_back)(void *address, int32_t device);
  /* The block at an allocated address; false for any other address. */
  bool (*find_block)(void *address, rallocator_block *block);
  /* The bytes that are allocated and reserved on `device`. */
  void (*memory_in_use)(int32_t device, uint64_t *allocated, uint64_t *reserved);
  /* The bytes of the largest request that could be met at once: from the cache, or new from the driver. */
  uint64_t (*largest_available)(int32_t device);
  /* Details of this thread's last RALLOCATOR_OUT_OF_MEMORY; false if there was none. */
  bool (*last_out_of_memory)(rallocator_out_of_memory *details);
  /* All statistics at once. */
  void (*device_stats)(int32_t device, rallocator_device_stats *stats);
  void (*visit_private_pools)(int32_t device, rallocator_pool_visitor visit, void *context);
  void (*settings)(rallocator_settings *settings);

  /* Makes a private pool, or gives it one more user, without sending requests there. Answered by one release_pool. */
  rallocator_status (*create_pool)(int32_t device, uint64_t first, uint64_t second);
  /* How many begins and creations of the pool wait for their release; 0 for no such pool. */
  uint32_t (*pool_users)(int32_t device, uint64_t first, uint64_t second);
  /* Whether the pool's idle memory serves requests of its stream that would fail otherwise. False for no such pool. */
  bool (*serve_when_out_of_memory)(int32_t device, uint64_t first, uint64_t second, bool serves);
  /* From now on the pool's blocks are handed out whole. False for no such pool. */
  bool (*forbid_splits)(int32_t device, uint64_t first, uint64_t second);
  /* Gives what a released pool holds back to where it came from, on every device; does nothing for one that has users. */
  rallocator_status (*empty_pool)(uint64_t first, uint64_t second);

  /* What a pool holds now; null for no such pool. Answered by one drop_checkpoint. */
  rallocator_checkpoint *(*checkpoint_pool)(int32_t device, uint64_t first, uint64_t second);
  void (*drop_checkpoint)(rallocator_checkpoint *checkpoint);
  /* Frees all that the pool holds and allocates what it held at the checkpoint, at the same addresses. Visits what was
   * freed, then what is allocated. After a failure nothing has changed. */
  rallocator_status (*restore_pool)(int32_t device, const rallocator_checkpoint *checkpoint,
                                    rallocator_address_visitor freed, rallocator_address_visitor allocated,
                                    void *context);
  /* Visits what a pool holds. False for no such pool. */
  bool (*visit_pool)(int32_t device, uint64_t first, uint64_t second, rallocator_address_visitor visit, void *context);

  /* Work on `device` may use the memory of `peer` from now on, as far as the setting `peers` lets it. */
  rallocator_status (*reach_peer)(int32_t device, int32_t peer);

  /* A picture of the pool (first, second), or of all memory for (0, 0). Each device's is of one moment. */
  void (*visit_memory)(uint64_t first, uint64_t second, const rallocator_memory_visitor *visitor);
  /* Starts or changes the recording; null stops it. `forget` drops the events so far. */
  rallocator_status (*record_history)(const rallocator_recording *recording, bool forget);
  bool (*is_recording)(void);
  /* Visits the number of every stack that a picture of memory could name now. */
  void (*visit_stacks)(rallocator_stack_visitor visit, void *context);
  /* The stack by which the memory at an allocated address was obtained; 0 if none was recorded. */
  uint32_t (*stack_of)(void *address);
  /* Records an event that says something of the memory at an allocated address. */
  void (*annotate)(void *address, const char *text);
  /* Labels the events that this thread causes from now on; an empty text for none. */
  void (*set_label)(const char *text);
  /* This thread's label, valid until its next call of this. Never null. */
  const char *(*label)(void);
  /* As set_label, for what the thread's compiler says of the code that runs. */
  void (*set_compile_context)(const char *text);

  /* Has `told` called, under no lock, for all memory after it came and before it goes, from now on: events with the
   * actions RALLOCATOR_SEGMENT_ALLOC, _FREE, _MAP and _UNMAP, without stacks and labels. From the first call on, memory in
   * use by nobody no longer moves to other addresses. `told` must not raise. */
  rallocator_status (*add_tracker)(void (*told)(void *context, const rallocator_event *event), void *context);

  /* Names the allocation at `address` to other processes of this user: a text without a 0 inside, valid until this
   * thread's next call of this; null after a failure. The allocation begins `*offset` bytes into the named memory. It has
   * to be held for as long as another process uses it. */
  const char *(*share)(void *address, uint64_t *offset);
  /* Brings memory that another process has named to an address of this one, for `device` to use. */
  rallocator_status (*open_shared)(const char *text, int32_t device, void **base);
  /* Gives up what open_shared has returned; waits for the device's work. */
  void (*close_shared)(void *base);

  /* As create_pool, for a pool that is to be made: its segments come from `source`, which is copied, and go back to it.
   * Fails if there is such a pool, and then releases the context too. */
  rallocator_status (*create_pool_from)(int32_t device, uint64_t first, uint64_t second,
                                        const rallocator_source *source);

  /* From now on the memory of a pool changes its address no more than `moving` lets it, and no more than the settings do;
   * what was said once stays in force. Fails if `device` has no such pool, if the pool has memory of which that does not hold
   * already, or if it is to be contiguous under policy:expandable. */
  rallocator_status (*restrict_moves)(int32_t device, uint64_t first, uint64_t second, rallocator_moving moving);

  /* The device of an allocated address; -1 for any other address. */
  int32_t (*device_of)(void *address);
} rallocator_api;

/* The table. It lives as long as the process. */
const rallocator_api *rallocator_api_v1(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RALLOCATOR_H */
