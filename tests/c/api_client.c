/* A program in C that uses the table of functions, as another framework would.
 *
 * Built as a library by tests/test_c_abi.py, which calls these functions in a process with an allocator on a simulated
 * GPU. Each returns null if all is as the header says, else the expression that did not hold. */

#include <stdlib.h>
#include <string.h>

#include "rallocator.h"

#define TEXT_OF(expression) #expression
#define EXPECT(expression)                                                                                             \
  do {                                                                                                                 \
    if (!(expression)) return TEXT_OF(expression);                                                                     \
  } while (0)

static const size_t MIB = 1 << 20;
static int filter_calls = 0;
static int filter_releases = 0;

static bool accepts_side_stream(void *context, void *stream) {
  ++filter_calls;
  return stream == context;
}

static void count_release(void *context) {
  (void)context;
  ++filter_releases;
}

static void keep_allocated_bytes(void *context, const char *key, int64_t value) {
  if (strcmp(key, "allocated_bytes.all.current") == 0) *(int64_t *)context = value;
}

static int64_t allocated_bytes(const rallocator_api *api) {
  int64_t bytes = -1;
  api->visit_stats(0, keep_allocated_bytes, &bytes);
  return bytes;
}

const char *table_is_as_long_as_the_header_says(void) {
  const rallocator_api *api = rallocator_api_v1();
  EXPECT(api != NULL);
  EXPECT(api->version == 1);
  EXPECT(api->size == sizeof(rallocator_api));
  EXPECT(api == rallocator_api_v1());
  return NULL;
}

const char *memory_is_given_and_taken_back(void) {
  const rallocator_api *api = rallocator_api_v1();
  void *address = NULL;
  size_t size = 0;
  EXPECT(api->allocate(3 * MIB, 0, NULL, &address) == RALLOCATOR_OK);
  EXPECT(address != NULL);
  EXPECT(allocated_bytes(api) == (int64_t)(3 * MIB));
  EXPECT(api->base_allocation(address, &size) <= address);
  EXPECT(size >= 3 * MIB);
  EXPECT(api->pin(address) && api->unpin(address));
  api->record_stream(address, NULL);
  api->free(address, 0);
  EXPECT(allocated_bytes(api) == 0);
  EXPECT(api->empty_cache() == RALLOCATOR_OK);
  return NULL;
}

const char *failures_are_statuses_with_a_text(void) {
  const rallocator_api *api = rallocator_api_v1();
  void *address = &address;
  EXPECT(api->allocate((size_t)1 << 40, 0, NULL, &address) == RALLOCATOR_OUT_OF_MEMORY);
  EXPECT(address == NULL);
  EXPECT(strncmp(api->last_error(), "CUDA out of memory. Tried to allocate 1024.00 GiB.", 50) == 0);
  EXPECT(api->allocate(MIB, -1, NULL, &address) == RALLOCATOR_FAILED);
  EXPECT(strstr(api->last_error(), "-1") != NULL);
  EXPECT(api->set_memory_fraction(0, 1.5) == RALLOCATOR_FAILED);
  EXPECT(api->allocate(MIB, 0, NULL, &address) == RALLOCATOR_OK);
  api->free(address, 0);
  return NULL;
}

const char *size_zero_and_pointers_that_are_not_ours_do_nothing(void) {
  const rallocator_api *api = rallocator_api_v1();
  int elsewhere = 0;
  size_t size = 7;
  void *address = &elsewhere;
  EXPECT(api->allocate(0, 0, NULL, &address) == RALLOCATOR_OK);
  EXPECT(address == NULL);
  api->free(NULL, 0);
  api->free(&elsewhere, 0);
  api->record_stream(NULL, NULL);
  api->record_stream(&elsewhere, NULL);
  api->retire_stream(NULL);
  EXPECT(api->base_allocation(&elsewhere, &size) == &elsewhere);
  EXPECT(size == 0);
  EXPECT(api->base_allocation(&elsewhere, NULL) == &elsewhere);
  EXPECT(!api->pin(&elsewhere) && !api->unpin(&elsewhere));
  api->reset_peak_stats(-1);
  api->reset_accumulated_stats(-1);
  EXPECT(allocated_bytes(api) == 0);
  return NULL;
}

const char *memory_fraction_is_kept(void) {
  const rallocator_api *api = rallocator_api_v1();
  EXPECT(api->memory_fraction(0) == 1.0);
  EXPECT(api->set_memory_fraction(0, 0.5) == RALLOCATOR_OK);
  EXPECT(api->memory_fraction(0) == 0.5);
  EXPECT(api->set_memory_fraction(0, 1.0) == RALLOCATOR_OK);
  return NULL;
}

const char *pool_asks_the_filter_and_releases_it_once(void) {
  const rallocator_api *api = rallocator_api_v1();
  void *address = NULL;
  EXPECT(api->begin_pool(0, 0, 5, accepts_side_stream, NULL, count_release) == RALLOCATOR_OK);
  EXPECT(api->allocate(MIB, 0, NULL, &address) == RALLOCATOR_OK);
  EXPECT(filter_calls > 0);
  api->end_pool(0, 0, 5);
  api->free(address, 0);
  api->release_pool(0, 0, 5);
  EXPECT(filter_releases == 1);
  return NULL;
}

static void *late_address = NULL;

static void free_late(void) {
  rallocator_record_stream(late_address, NULL);
  rallocator_free(late_address, MIB, 0, NULL);
  rallocator_reset();
}

/* Frees `address` when the process ends, after all handlers that are registered from now on have run. */
void free_at_exit(void *address) {
  late_address = address;
  atexit(free_late);
}

struct seen {
  const rallocator_api *api;
  size_t segments, blocks, events, bytes;
  uint32_t last_action;
  char label[16];
  void *freed[4], *allocated[4];
  size_t freed_count, allocated_count;
  bool counts_freed;
};

static void see_segment(void *context, const rallocator_segment *segment) {
  struct seen *seen = context;
  seen->segments += 1;
  seen->blocks += segment->block_count;
  for (size_t i = 0; i < segment->block_count; i++) {
    if (segment->blocks[i].state == RALLOCATOR_ALLOCATED) seen->bytes += segment->blocks[i].size;
  }
}

static void see_event(void *context, const rallocator_event *event) {
  struct seen *seen = context;
  seen->events += 1;
  if (event->action == RALLOCATOR_ALLOC) strncpy(seen->label, event->label, sizeof(seen->label) - 1);
  seen->last_action = event->action;
}

const char *statistics_and_pictures_agree(void) {
  const rallocator_api *api = rallocator_api_v1();
  const rallocator_recording recording = {.limit = 100, .events_have_stacks = true};
  struct seen seen = {0};
  const rallocator_memory_visitor visitor = {&seen, see_segment, see_event};
  rallocator_device_stats stats;
  rallocator_block block;
  uint64_t allocated = 0, reserved = 0;
  void *address = NULL;
  EXPECT(!api->is_recording() && api->record_history(&recording, true) == RALLOCATOR_OK && api->is_recording());
  api->set_label("a label");
  EXPECT(api->allocate(3 * MIB, 0, NULL, &address) == RALLOCATOR_OK);
  EXPECT(strcmp(api->label(), "a label") == 0);
  api->set_label("");
  api->device_stats(0, &stats);
  api->memory_in_use(0, &allocated, &reserved);
  api->visit_memory(0, 0, &visitor);
  EXPECT(seen.segments == 1 && seen.bytes == 3 * MIB);
  EXPECT(stats.allocated_bytes.all.current == (int64_t)seen.bytes && allocated == seen.bytes);
  EXPECT(stats.reserved_bytes.large_pool.current == (int64_t)reserved && reserved >= allocated);
  EXPECT(stats.max_split_size == -1 && stats.num_ooms == 0);
  EXPECT(seen.events > 1 && seen.last_action == RALLOCATOR_ALLOC && strcmp(seen.label, "a label") == 0);
  EXPECT(api->find_block(address, &block) && block.requested == 3 * MIB && block.stack == 0);
  EXPECT(api->device_of(address) == 0);
  EXPECT(api->take_back(address, 0) && !api->take_back(address, 0) && !api->find_block(address, &block));
  EXPECT(api->device_of(address) == -1 && api->device_of(NULL) == -1);
  EXPECT(api->record_history(NULL, true) == RALLOCATOR_OK && !api->is_recording());
  return NULL;
}

static void note(void *context, void *address) {
  struct seen *seen = context;
  if (seen->counts_freed && seen->freed_count < 2) seen->freed[seen->freed_count++] = address;
  else seen->allocated[seen->allocated_count++] = address;
}

const char *pool_goes_back_to_a_checkpoint(void) {
  const rallocator_api *api = rallocator_api_v1();
  struct seen seen = {0};
  void *first = NULL, *second = NULL;
  EXPECT(api->checkpoint_pool(0, 0, 5) == NULL && api->pool_users(0, 0, 5) == 0);
  EXPECT(api->create_pool(0, 0, 5) == RALLOCATOR_OK);
  EXPECT(api->begin_pool(0, 0, 5, NULL, NULL, NULL) == RALLOCATOR_OK && api->pool_users(0, 0, 5) == 2);
  EXPECT(api->allocate(MIB, 0, NULL, &first) == RALLOCATOR_OK);
  rallocator_checkpoint *checkpoint = api->checkpoint_pool(0, 0, 5);
  EXPECT(checkpoint != NULL);
  EXPECT(api->allocate(MIB, 0, NULL, &second) == RALLOCATOR_OK);
  seen.counts_freed = true;
  EXPECT(api->restore_pool(0, checkpoint, note, note, &seen) == RALLOCATOR_OK);
  EXPECT(seen.freed_count == 2 && seen.allocated_count == 1 && seen.allocated[0] == first);
  seen.counts_freed = false;
  seen.allocated_count = 0;
  EXPECT(api->visit_pool(0, 0, 5, note, &seen) && seen.allocated_count == 1);
  api->free(first, 0);
  api->end_pool(0, 0, 5);
  api->release_pool(0, 0, 5);
  api->release_pool(0, 0, 5);
  EXPECT(api->restore_pool(0, checkpoint, note, note, &seen) == RALLOCATOR_FAILED);
  EXPECT(strstr(api->last_error(), "not in use") != NULL);
  EXPECT(api->restrict_moves(0, 0, 5, RALLOCATOR_MOVE_OFF) == RALLOCATOR_FAILED);
  EXPECT(strstr(api->last_error(), "has no private pool (0, 5)") != NULL);
  EXPECT(api->create_pool(0, 0, 6) == RALLOCATOR_OK);
  EXPECT(api->restrict_moves(0, 0, 6, RALLOCATOR_MOVE_CONTIGUOUS) == RALLOCATOR_OK);
  EXPECT(api->restrict_moves(0, 0, 6, (rallocator_moving)3) == RALLOCATOR_FAILED);
  api->release_pool(0, 0, 6);
  EXPECT(api->empty_pool(0, 5) == RALLOCATOR_OK);
  api->drop_checkpoint(checkpoint);
  api->drop_checkpoint(NULL);
  return NULL;
}

const char *failure_for_want_of_memory_has_details(void) {
  const rallocator_api *api = rallocator_api_v1();
  rallocator_out_of_memory details = {0};
  void *address = NULL;
  EXPECT(!api->last_out_of_memory(&details));
  EXPECT(api->allocate((size_t)20 << 30, 0, NULL, &address) == RALLOCATOR_OUT_OF_MEMORY && address == NULL);
  EXPECT(api->last_out_of_memory(&details));
  EXPECT(details.requested == (uint64_t)20 << 30 && details.total == (uint64_t)1 << 30 && details.free <= details.total);
  EXPECT(api->largest_available(0) == details.free);
  return NULL;
}

struct library {
  uintptr_t next;
  rallocator_status answer;
  int asked, given_back, released;
  size_t held;
  void *inner; /* what it has from rallocator itself */
};

static rallocator_status obtain(void *context, size_t size, int32_t device, void *stream, void **address) {
  struct library *library = context;
  library->asked += 1;
  if (library->answer != RALLOCATOR_OK) return library->answer;
  if (library->inner == NULL) {
    rallocator_status inner = rallocator_api_v1()->allocate(MIB, device, stream, &library->inner);
    if (inner != RALLOCATOR_OK) return inner;
  }
  *address = (void *)library->next;
  library->next += size;
  library->held += size;
  return RALLOCATOR_OK;
}

static rallocator_status give_back(void *context, void *address, size_t size, int32_t device, void *stream) {
  struct library *library = context;
  (void)address, (void)device, (void)stream;
  if (library->answer != RALLOCATOR_OK) return library->answer;
  library->given_back += 1;
  library->held -= size;
  return RALLOCATOR_OK;
}

static void release_library(void *context) {
  ((struct library *)context)->released += 1;
}

const char *pool_has_its_segments_from_a_source(void) {
  const rallocator_api *api = rallocator_api_v1();
  static struct library library = {.next = (uintptr_t)1 << 45};
  const rallocator_source source = {&library, obtain, give_back, release_library};
  void *first = NULL, *second = NULL;
  EXPECT(api->create_pool_from(0, 0, 5, &source) == RALLOCATOR_OK && api->pool_users(0, 0, 5) == 1);
  EXPECT(api->create_pool_from(0, 0, 5, &source) == RALLOCATOR_FAILED && library.released == 1);
  EXPECT(strstr(api->last_error(), "exists already") != NULL);
  EXPECT(api->begin_pool(0, 0, 5, NULL, NULL, NULL) == RALLOCATOR_OK);
  EXPECT(api->allocate(3 * MIB, 0, NULL, &first) == RALLOCATOR_OK && first == (void *)((uintptr_t)1 << 45));
  EXPECT(library.asked == 1 && library.held == 20 * MIB && library.inner != NULL);
  library.answer = RALLOCATOR_OUT_OF_MEMORY;
  EXPECT(api->allocate(30 * MIB, 0, NULL, &second) == RALLOCATOR_OUT_OF_MEMORY && second == NULL);
  library.answer = RALLOCATOR_SOURCE_FAILED;
  EXPECT(api->allocate(30 * MIB, 0, NULL, &second) == RALLOCATOR_SOURCE_FAILED && second == NULL);
  EXPECT(strstr(api->last_error(), "(0, 5) failed when it was asked for 31457280 bytes") != NULL);
  api->free(first, 0);
  api->end_pool(0, 0, 5);
  api->release_pool(0, 0, 5);
  api->release_pool(0, 0, 5);
  EXPECT(api->empty_pool(0, 5) == RALLOCATOR_SOURCE_FAILED && library.given_back == 0 && library.released == 1);
  library.answer = RALLOCATOR_OK;
  EXPECT(api->empty_pool(0, 5) == RALLOCATOR_OK && library.given_back == 1 && library.held == 0);
  EXPECT(library.released == 2);
  api->free(library.inner, 0);
  EXPECT(allocated_bytes(api) == 0 && api->empty_cache() == RALLOCATOR_OK);
  return NULL;
}

static void add_up(void *context, const rallocator_event *event) {
  size_t *bytes = context;
  bool came = event->action == RALLOCATOR_SEGMENT_ALLOC || event->action == RALLOCATOR_SEGMENT_MAP;
  *bytes += came ? event->size : -event->size;
}

const char *tracker_is_told_of_what_comes_and_goes(void) {
  const rallocator_api *api = rallocator_api_v1();
  uint64_t allocated = 0, reserved = 0;
  static size_t bytes = 0;
  void *address = NULL;
  EXPECT(api->add_tracker(add_up, &bytes) == RALLOCATOR_OK);
  EXPECT(api->allocate(30 * MIB, 0, NULL, &address) == RALLOCATOR_OK);
  api->memory_in_use(0, &allocated, &reserved);
  EXPECT(bytes == reserved && reserved >= 30 * MIB);
  api->free(address, 0);
  EXPECT(api->empty_cache() == RALLOCATOR_OK);
  EXPECT(bytes == 0);
  return NULL;
}
