/* Reads and writes parts of files with several blocks in flight (queue depth). Each thread waits for one block. The
   descriptor decides whether the page cache is bypassed (O_DIRECT). Only pread and pwrite are used, because containers
   and WSL have them, too.
*/
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#define MOST_THREADS 64
#define SUMMED (1L << 20) /* bytes with a checksum of their own; a block is a multiple of this */

struct work {
  int fd, write, sums; char *memory; long offset, bytes, needed, block, floats;
  atomic_long next; atomic_int error, not_finite; atomic_ullong sum;
};

typedef uint32_t words __attribute__((vector_size(32)));

/* A checksum that finds torn, stale and corrupted pages, but not deliberate changes: 32 lanes of h = h * odd + x, mixed
   at the end. `not_finite` becomes 1 if the first `floats` bytes hold a float that is not finite. */
static uint64_t sum_of(const char *memory, long bytes, long floats, uint64_t seed, int *not_finite) {
  const words *x = (const words *)memory;
  words h[4] = {{0}}, odd[4] = {{0}};
  long wide = floats / 128 * 4, all = bytes / 32, i = 0;
  for (; i < wide; i += 4)
    for (int k = 0; k < 4; k++) {
      h[k] = h[k] * 0x9E3779B1u + x[i + k];
      odd[k] |= (words)((x[i + k] & 0x7f800000u) == 0x7f800000u);
    }
  for (; i < all; i += 4)
    for (int k = 0; k < 4; k++) h[k] = h[k] * 0x9E3779B1u + x[i + k];
  for (long rest = wide * 8; rest < floats / 4; rest++)
    *not_finite |= (((const uint32_t *)memory)[rest] & 0x7f800000u) == 0x7f800000u;
  uint64_t sum = seed * 0x9E3779B97F4A7C15u + bytes;
  for (int k = 0; k < 4; k++)
    for (int lane = 0; lane < 8; lane++) {
      *not_finite |= odd[k][lane] != 0;
      sum = (sum ^ h[k][lane]) * 0x9E3779B97F4A7C15u;
      sum ^= sum >> 29;
    }
  return sum;
}

static void add_sums(struct work *w, long lo, long hi) {
  for (; lo < hi; lo += SUMMED) {
    long bytes = lo + SUMMED < hi ? SUMMED : hi - lo, floats = w->floats - lo;
    int not_finite = 0;
    floats = floats < 0 ? 0 : floats < bytes ? floats : bytes;
    atomic_fetch_add(&w->sum, sum_of(w->memory + lo, bytes, floats, lo / SUMMED + 1, &not_finite));
    if (not_finite) atomic_store(&w->not_finite, 1);
  }
}

/* Move bytes lo to hi. A read may return less than asked, and does so at the file's end. */
static int part(const struct work *w, long lo, long hi) {
  while (lo < hi) {
    ssize_t done = w->write ? pwrite(w->fd, w->memory + lo, hi - lo, w->offset + lo)
                            : pread(w->fd, w->memory + lo, hi - lo, w->offset + lo);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return w->write ? ENOSPC : lo < w->needed ? ENODATA : 0;
    lo += done;
    if (lo >= w->needed) return 0; /* bytes beyond `needed` only complete the disk's last block */
  }
  return 0;
}

static void *run(void *given) {
  struct work *w = given;
  for (long lo; !atomic_load(&w->error) && (lo = atomic_fetch_add(&w->next, w->block)) < w->bytes;) {
    long hi = lo + w->block < w->bytes ? lo + w->block : w->bytes;
    if (w->sums && w->write) add_sums(w, lo, hi);
    int none = 0, error = part(w, lo, hi);
    if (error) atomic_compare_exchange_strong(&w->error, &none, error);
    else if (w->sums && !w->write) add_sums(w, lo, hi);
  }
  return 0;
}

static int all(struct work *w, long depth) {
  pthread_t others[MOST_THREADS];
  long blocks = (w->bytes + w->block - 1) / w->block, wanted = blocks < depth ? blocks : depth, started = 0;
  while (started + 1 < wanted && started < MOST_THREADS && !pthread_create(others + started, 0, run, w)) started++;
  run(w);
  while (started) pthread_join(others[--started], 0);
  return atomic_load(&w->error);
}

/* Read `bytes` bytes from `offset`; the file must have at least the first `needed` of them. `offset`, `bytes`, `block`
   and the address `memory` are multiples of the disk's block size. Returns 0 or an errno. */
int offmate_read(int fd, void *memory, long offset, long bytes, long needed, long block, long depth) {
  struct work w = {.fd = fd, .memory = memory, .offset = offset, .bytes = bytes, .needed = needed, .block = block};
  return all(&w, depth);
}

/* Write all `bytes` bytes to a file, or read them. If `sum` is not NULL, it receives their checksum, and `not_finite`
   becomes 1 if a float in the first `floats` bytes is not finite, else 0. Returns 0 or an errno. */
int offmate_move(int fd, int write, void *memory, long offset, long bytes, long block, long depth, long floats,
                 uint64_t *sum, int *not_finite) {
  struct work w = {.fd = fd, .write = write, .memory = memory, .offset = offset, .bytes = bytes, .needed = bytes,
                   .block = block, .floats = floats, .sums = sum != 0};
  int error = all(&w, depth);
  if (sum) {
    *sum = atomic_load(&w.sum);
    *not_finite = atomic_load(&w.not_finite);
  }
  return error;
}
