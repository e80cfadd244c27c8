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
