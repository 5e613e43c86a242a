/* AdamW in one pass over memory, and norms: bit for bit what PyTorch's own CPU kernels compute.

   Compile with -ffp-contract=off: a contracted multiply-add rounds once where PyTorch rounds twice. Where PyTorch
   rounds once, fmaf is written out. PyTorch computes a tensor in groups of LANES elements. For the remainder at its
   end it uses other instructions, which round at other points. So each tensor has its own remainder, and no two tensors
   may be joined. Gradient and working copy may be the same memory.
*/
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#ifdef __clang__ /* vectorize: elements are independent, even if two pointers are equal */
#define SIDE_BY_SIDE _Pragma("clang loop vectorize(assume_safety)")
#else
#define SIDE_BY_SIDE _Pragma("GCC ivdep")
#endif
#define INLINE static inline __attribute__((always_inline))
#define LANES(layout) ((layout) == BF16 ? 16 : 8)
#define BLOCK (1L << 15)         /* elements a thread takes at a time: nearly 1 MB with states, whole cache lines */
#define MOST_THREADS 64

/* How a tensor is stored.
   FP32: everything in fp32.
   MIXED: gradient and working copy in bf16, master and moments in fp32.
   BF16: everything in bf16.
   PACKED: as MIXED, but `master` holds only the lower 16 bits of the fp32 master. The upper 16 bits are the working
   copy, which is rounded; the sign bit of the second moment is set where the working copy was rounded up. */
enum { FP32, MIXED, BF16, PACKED };
#define ROUNDED 4                /* flag beside FP32 or MIXED: moments in 8 bits (rounded.py) */

/* `n` elements. `from` has the memory to read the state from: master, exp_avg, exp_avg_sq, work, in this order. The
   pointers after it are the memory to write to, which may be the same. The working copy is read only when PACKED. */
struct tensor {
  long n; const void *gradient, *from[4]; void *master, *exp_avg, *exp_avg_sq, *work; float decay; int layout;
};

/* Each number is computed in double and rounded once. rise: 1 - beta1; growth: 1 - beta2; root: sqrt(1 - beta2^t);
   size: lr / (1 - beta1^t); factor: gradients are multiplied by it. `decay` of a tensor: 1 - lr * weight decay. */
struct step { float rise, beta2, growth, root, size, eps, factor; };

INLINE float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

INLINE uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE float widen(uint16_t half) { return float_of((uint32_t)half << 16); }

INLINE uint16_t upper(uint32_t bits) { return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; } /* to nearest, ties to even */

INLINE uint16_t narrow(float x) { /* NaN is found by comparing integers, so that loops stay vectorized */
  uint32_t bits = bits_of(x);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0xffff : upper(bits);
}

INLINE float get(const void *memory, long i, int half) {
  return half ? widen(((const uint16_t *)memory)[i]) : ((const float *)memory)[i];
}

INLINE void put(void *memory, long i, float x, int half) {
  if (half) ((uint16_t *)memory)[i] = narrow(x); else ((float *)memory)[i] = x;
}

/* Update elements lo to hi, which are all in whole groups (`whole`) or all in the remainder. `slow`: 1 - beta1 is below
   0.5. The last three arguments are compile-time constants at each call, so each combination is compiled to its own
   loop. */
INLINE void range(const struct tensor *t, const struct step *s, long lo, long hi, int layout, int slow, int whole) {
  const float decay = t->decay, rise = s->rise, fall = s->rise - 1.f, beta2 = s->beta2, growth = s->growth;
  const float root = s->root, size = s->size, eps = s->eps, factor = s->factor;
  const void *gradient = t->gradient, *from_master = t->from[0], *from_avg = t->from[1], *from_sq = t->from[2];
  void *master = t->master, *exp_avg = t->exp_avg, *exp_avg_sq = t->exp_avg_sq, *work = t->work;
  const uint16_t *from_work = t->from[3];
  const int half = layout == BF16;
  SIDE_BY_SIDE
  for (long i = lo; i < hi; i++) {
    float g = get(gradient, i, layout != FP32) * factor;
    if (half) g = widen(narrow(g));                                     /* PyTorch rounds the product to bf16 */
    float m = get(from_avg, i, half), v, p;
    if (layout == PACKED) {
      uint32_t kept = bits_of(get(from_sq, i, 0));
      v = float_of(kept & 0x7fffffff);
      p = float_of((uint32_t)(uint16_t)(from_work[i] - (kept >> 31)) << 16 | ((const uint16_t *)from_master)[i]);
    } else {
      v = get(from_sq, i, half);
      p = get(from_master, i, half);
    }
    p *= decay;
    m = slow ? fmaf(rise, g - m, m) : fmaf(fall, g - m, g);             /* PyTorch's lerp starts from the nearer end */
    v = whole ? fmaf(growth * g, g, v * beta2) : fmaf(v, beta2, growth * g * g);
    put(exp_avg, i, m, half);
    if (layout != PACKED) put(exp_avg_sq, i, v, half);
    float denominator = sqrtf(v) / root;
    denominator += eps;
    float change = size * m;
    change /= denominator;
    p -= change;
    if (layout == PACKED) {
      uint32_t bits = bits_of(p);
      uint16_t up = upper(bits);
      ((uint16_t *)master)[i] = bits;
      ((uint16_t *)work)[i] = up;
      put(exp_avg_sq, i, float_of((bits_of(v) & 0x7fffffff) | (uint32_t)(uint16_t)(up - (bits >> 16)) << 31), 0);
    } else put(master, i, p, half);
    if (layout == MIXED) put(work, i, p, 1);
  }
}

#define SPEED(layout) \
  if (s->rise < .5f) { if (whole) range(t, s, lo, hi, layout, 1, 1); else range(t, s, lo, hi, layout, 1, 0); } \
  else { if (whole) range(t, s, lo, hi, layout, 0, 1); else range(t, s, lo, hi, layout, 0, 0); }

static void part(const struct tensor *t, const struct step *s, long lo, long hi, int whole) {
  switch (t->layout) {
    case FP32: SPEED(FP32) break;
    case MIXED: SPEED(MIXED) break;
    case BF16: SPEED(BF16) break;
    default: SPEED(PACKED)
  }
}

enum { SHARING = 256, CELLS = 25 << 7, FIRST_CELL = 103 << 7 }; /* as in rounded.py, which makes the tables */

struct numbers { float values[256], halfway[256]; uint8_t cells[2][CELLS]; };

/* A moment in 8 bits is stored as one fp32 scale for each SHARING elements, then a byte for each element. `expand`
   writes `count` elements from element `at` on to `wide`; `round_off` is the reverse. */
INLINE void expand(const void *moment, long n, long at, long count, const struct numbers *known, float *wide) {
  float scale = ((const float *)moment)[at / SHARING];
  const uint8_t *places = (const uint8_t *)moment + (n + SHARING - 1) / SHARING * 4 + at;
  for (long i = 0; i < count; i++) wide[i] = known->values[places[i]] * scale;
}

INLINE void round_off(void *moment, long n, long at, long count, const struct numbers *known, const float *wide) {
  uint8_t *places = (uint8_t *)moment + (n + SHARING - 1) / SHARING * 4 + at;
  uint32_t most = 0; /* the bits of floats without their sign, as integers, have the floats' order; NaN is greatest */
  for (long i = 0; i < count; i++) { uint32_t size = bits_of(wide[i]) & 0x7fffffff; most = size > most ? size : most; }
  float scale = float_of(most), inverse = 1.f / (scale > 1e-38f ? scale : 1e-38f), scaled[SHARING];
  int32_t cells[SHARING];
  ((float *)moment)[at / SHARING] = scale;
  for (long i = 0; i < count; i++) {
    scaled[i] = wide[i] * inverse;
    int32_t bits = bits_of(scaled[i]), cell = (bits >> 16 & 0x7fff) - FIRST_CELL;
    cell = cell < 0 ? 0 : cell < CELLS ? cell : CELLS - 1;
    cells[i] = cell + (bits < 0 ? CELLS : 0);
  }
  for (long i = 0; i < count; i++) {
    uint8_t place = known->cells[0][cells[i]];
    places[i] = place + (known->halfway[place] < scaled[i]);
  }
}

/* Update elements lo to hi of a tensor whose moments are in 8 bits. `lo` is a multiple of SHARING. */
static void rounded(const struct tensor *t, const struct step *s, const struct numbers *const known[2], long lo, long hi) {
  const int layout = t->layout & ~ROUNDED, width = layout == FP32 ? 4 : 2;
  float m[SHARING], v[SHARING];
  for (long at = lo; at < hi; at += SHARING) {
    long count = hi - at < SHARING ? hi - at : SHARING, groups = count / LANES(layout) * LANES(layout);
    expand(t->from[1], t->n, at, count, known[0], m);
    expand(t->from[2], t->n, at, count, known[1], v);
    struct tensor block = {
      count, (const char *)t->gradient + at * width, {(const char *)t->from[0] + at * 4, m, v, 0},
      (char *)t->master + at * 4, m, v, (char *)t->work + at * width, t->decay, layout
    };
    part(&block, s, 0, groups, 1);
    if (count > groups) part(&block, s, groups, count, 0);
    round_off(t->exp_avg, t->n, at, count, known[0], m);
    round_off(t->exp_avg_sq, t->n, at, count, known[1], v);
  }
}

struct work {
  const struct tensor *tensors; long blocks; const struct step *step; const struct numbers *known[2]; atomic_long next;
};

static long blocks_of(const struct tensor *t) { return (t->n + BLOCK - 1) / BLOCK; }

static void *run(void *given) { /* takes block after block until none is left, so that a slow thread delays nobody */
  struct work *work = given;
  const struct tensor *t = work->tensors;
  long first = 0; /* the number of t's first block */
  for (long at; (at = atomic_fetch_add(&work->next, 1)) < work->blocks;) {
    while (at >= first + blocks_of(t)) first += blocks_of(t++);
    long lo = (at - first) * BLOCK, hi = lo + BLOCK < t->n ? lo + BLOCK : t->n, groups = t->n / LANES(t->layout) * LANES(t->layout);
    if (t->layout & ROUNDED) { rounded(t, work->step, work->known, lo, hi); continue; }
    part(t, work->step, lo, hi < groups ? hi : groups, 1);
    if (hi > groups) part(t, work->step, groups, hi, 0);
  }
  return 0;
}

/* Do one step of AdamW on `count` tensors, in at most `threads` threads. `known`: the tables of the first and of the
   second moment's 8-bit numbers; read only for ROUNDED tensors. */
void offmate_adamw(
    const struct tensor *tensors, long count, const struct step *step, long threads, const struct numbers *const known[2]) {
  struct work work = {tensors, 0, step, {known[0], known[1]}, 0};
  for (long i = 0; i < count; i++) work.blocks += blocks_of(tensors + i);
  pthread_t others[MOST_THREADS];
  /* one thread for every four blocks: fewer would not be worth starting a thread */
  long wanted = work.blocks / 4 < threads ? work.blocks / 4 : threads, started = 0;
  while (started + 1 < wanted && started < MOST_THREADS && !pthread_create(others + started, 0, run, &work)) started++;
  run(&work);
  while (started) pthread_join(others[--started], 0);
}

typedef float floats __attribute__((vector_size(32), aligned(4)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2)));

/* The 2-norm of bf16 numbers, bit for bit what PyTorch computes for the same numbers in fp32. Eight sums run side by
   side and are added from first to last; then the remainder is added. If it has four elements or more, the squares of
   the first four are rounded before they are added. One thread, because the order of additions decides the bits. */
float offmate_norm(const uint16_t *x, long n) {
  floats sums = {0};
  long i = 0;
  if (n == 1) return fabsf(widen(x[0]));
  for (; i + 8 <= n; i += 8) {
    floats wide = (floats)(__builtin_convertvector(*(const halves *)(x + i), words) << 16);
    sums += wide * wide;
  }
  float total = sums[0];
  for (int k = 1; k < 8; k++) total += sums[k];
  if (n - i >= 4) for (long end = i + 4; i < end; i++) { float y = widen(x[i]), square = y * y; total += square; }
  for (; i < n; i++) { float y = widen(x[i]); total = fmaf(y, y, total); }
  return sqrtf(total);
}
