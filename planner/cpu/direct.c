/* Reads files at the disk's depth: several blocks under way, by threads that each wait for one. Whether the page cache is
   passed by is a matter of the descriptor (O_DIRECT); of the kernel nothing but pread is asked, which containers and WSL
   have, too.
*/
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define MOST_THREADS 64

struct work { int fd; char *memory; long offset, bytes, needed, block; atomic_long next; atomic_int error; };

static int part(const struct work *w, long lo, long hi) { /* a read may stop short; at the file's end it has to */
  while (lo < hi) {
    ssize_t done = pread(w->fd, w->memory + lo, hi - lo, w->offset + lo);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return lo < w->needed ? ENODATA : 0;
    lo += done;
    if (lo >= w->needed) return 0; /* what is beyond is there only to end with a block */
  }
  return 0;
}

static void *run(void *given) {
  struct work *w = given;
  for (long lo; !atomic_load(&w->error) && (lo = atomic_fetch_add(&w->next, w->block)) < w->bytes;) {
    int none = 0, error = part(w, lo, lo + w->block < w->bytes ? lo + w->block : w->bytes);
    if (error) atomic_compare_exchange_strong(&w->error, &none, error);
  }
  return 0;
}

/* `bytes` from `offset`, of which the file must have the first `needed`; offset, bytes, block and memory are multiples of
   the disk's blocks. Returns 0, or an error's number. */
int offmate_read(int fd, void *memory, long offset, long bytes, long needed, long block, long depth) {
  struct work w = {fd, memory, offset, bytes, needed, block, 0, 0};
  pthread_t others[MOST_THREADS];
  long wanted = (bytes + block - 1) / block < depth ? (bytes + block - 1) / block : depth, started = 0;
  while (started + 1 < wanted && started < MOST_THREADS && !pthread_create(others + started, 0, run, &w)) started++;
  run(&w);
  while (started) pthread_join(others[--started], 0);
  return atomic_load(&w.error);
}
