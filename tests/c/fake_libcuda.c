/* A driver that has no GPU and says on stderr when somebody initialises it. */

#include <stdio.h>

int cuInit(unsigned flags) {
  (void)flags;
  fputs("cuInit was called\n", stderr);
  return 100; /* CUDA_ERROR_NO_DEVICE */
}
