/* Three functions of CUDA's runtime, for a machine that has torch but no GPU. Preloaded, it shows torch two devices,
 * and one of them as the current one: all that torch asks of CUDA before it calls an allocator's hooks. */

static _Thread_local int current_device = 0;

/* For a program to set before it asks, and to read. */
int fake_device_count = 2;
int fake_device_questions = 0;

int cudaGetDeviceCount(int *count) {
  *count = fake_device_count;
  return 0; /* cudaSuccess */
}

int cudaGetDevice(int *device) {
  fake_device_questions++;
  *device = current_device;
  return 0; /* cudaSuccess */
}

int cudaSetDevice(int device) {
  current_device = device;
  return 0; /* cudaSuccess */
}
