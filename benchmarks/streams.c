/* What this machine's memory gives to one thread, four ways; see cpu_adamw.py. */
#include <string.h>

void triad(long n, float *restrict a, const float *restrict b, const float *restrict c) {
  for (long i = 0; i < n; i++) a[i] = b[i] + 3.f * c[i];
}

void copy(long n, float *restrict a, const float *restrict b, const float *restrict c) {
  (void)c;
  for (long i = 0; i < n; i++) a[i] = b[i];
}

void library_copy(long n, float *restrict a, const float *restrict b, const float *restrict c) {
  (void)c;
  memcpy(a, b, n * sizeof *a);
}

void in_place(long n, float *restrict a, const float *restrict b, const float *restrict c) {
  (void)b, (void)c;
  for (long i = 0; i < n; i++) a[i] *= 1.0000001f;
}
