/* A PyTorch allocator that holds device memory in one piece, the arena, and puts each tensor at its planned place.
 *
 * Before each operation the engine says which places its allocations have. A place is a hint: it is used only if it is
 * free. So two tensors never share memory, even if allocations differ from the plan. If all allocations are as planned,
 * each gets its place.
 *
 * A tensor without a place goes to the loose part of the arena; or to a segment beside the arena, if the limit allows
 * more memory from the driver; or to any gap. This memory belongs to the default stream: freed memory may be reused at
 * once, by work that is issued to that stream later. A tensor of another stream gets a segment of its own.
 */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "segments.h"

#define GRAIN 512
#define PAGE ((int64_t)2 << 20)

typedef struct {
    int64_t bytes, offset, most; /* offset: -1 means in the loose part.
                                    most: 0: for one tensor of exactly `bytes`; 1: for one smaller tensor, or for
                                    several; 2: for everything that a layer's own code allocates */
} Place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*driver_wait)(void);
static void (*raise_error)(const char *);

static int64_t placed, small, strays;

static const Place *places;
static int64_t place_count, least;
static uint8_t *taken;
static int64_t taken_room;
static int told; /* whether the engine has said which allocations come */
static int own;  /* whether allocations come from a layer's own code and go to its area */
static int64_t next = -1; /* the number of the place for the next allocation; -1: not said */

static int64_t *written, written_room, written_count; /* pairs: an address, and the bytes allocated there (0: freed) */

static void write_down(void *pointer, int64_t bytes) {
    if (written_count < written_room) {
        written[2 * written_count] = (int64_t)pointer;
        written[2 * written_count + 1] = bytes;
        written_count++;
    }
}

static int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

/* ---- gaps */

/* The end of the first place that overlaps `bytes` from `start` and that this operation has not used yet; 0: none. */
static int64_t wanted(int64_t start, int64_t bytes) {
    for (int64_t i = 0; i < place_count; i++) {
        const Place *p = &places[i];
        if (!taken[i] && p->offset < start + bytes && start < p->offset + p->bytes)
            return p->offset + p->bytes;
    }
    return 0;
}

/* The start of `bytes` free bytes in `s` between `from` and `to`, in the smallest gap that is large enough; -1: none.
 * With `polite`: the lowest start that overlaps no place that is still to be used. */
static int64_t gap(const Segment *s, int64_t from, int64_t to, int64_t bytes, int polite) {
    int64_t best = -1, best_size = INT64_MAX, floor = from;
    for (int32_t i = above(s, from); i <= s->count; i++) {
        int64_t end = i < s->count && s->used[i].start < to ? s->used[i].start : to, start = floor;
        for (int64_t after; polite && start + bytes <= end && (after = wanted(start, bytes)); start = after)
            ;
        if (start + bytes <= end && end - floor < best_size) {
            best = start, best_size = end - floor;
            if (polite)
                break;
        }
        if (end == to)
            break;
        floor = s->used[i].start + s->used[i].bytes;
    }
    return best;
}

static void *in_arena(int64_t from, int64_t to, int64_t bytes, int polite) {
    int64_t start = arena ? gap(arena, from, to, bytes, polite) : -1;
    return start < 0 ? NULL : put(arena, start, bytes);
}

static void *in_loose(int64_t bytes) { return arena ? in_arena(placed, arena->bytes, bytes, 0) : NULL; }

/* Use the smallest large enough gap in the other segments. */
static void *beside(int64_t bytes) {
    Segment *best = NULL;
    int64_t at = -1, least = INT64_MAX;
    for (Segment *s = segments; s; s = s->next) {
        int64_t start = s == arena || s->own ? -1 : gap(s, 0, s->bytes, bytes, 0);
        if (start >= 0 && s->bytes < least)
            best = s, at = start, least = s->bytes;
    }
    return best ? put(best, at, bytes) : NULL;
}

/* Use a new segment. As PyTorch's allocator, it is larger than a small tensor, so that others fit in, too. */
static void *newly(int64_t bytes) {
    int64_t shared = bytes <= ((int64_t)1 << 20) ? PAGE : bytes < 5 * PAGE ? 10 * PAGE : up(bytes, PAGE);
    Segment *made = new_segment(shared);
    made = made ? made : new_segment(up(bytes, PAGE));
    made = made ? made : new_segment(bytes);
    return made ? put(made, 0, bytes) : NULL;
}

/* ---- places */

/* The number of the place for the tensor that is being allocated, or -1. It is the first unused place of exactly this
 * size, searched from the place that the engine named. Order alone will not do: kernels allocate what no plan knows. */
static int64_t place_for(int64_t bytes) {
    int64_t said = next;
    next = -1;
    for (int64_t i = said < 0 ? 0 : said; bytes > least && i < place_count; i++)
        if (!taken[i] && !places[i].most && places[i].bytes == bytes)
            return i;
    return -1;
}

static void *within(int64_t i, int64_t bytes) {
    return in_arena(places[i].offset, places[i].offset + places[i].bytes, bytes, 0);
}

/* Use the tensor's place, if that is free. `fit` becomes 1 if the tensor has a place in the arena's placed part. */
static void *in_place(int64_t bytes, int *fit) {
    int64_t i = arena ? place_for(bytes) : -1;
    if (i < 0)
        return NULL;
    taken[i] = 1;
    *fit = places[i].offset >= 0;
    return *fit ? within(i, bytes) : in_loose(bytes);
}

/* Use a place that may hold several tensors. */
static void *in_common(int64_t bytes) {
    void *found = NULL;
    for (int64_t way = own ? 2 : 1; arena && way <= 2; way++)
        for (int64_t i = 0; i < place_count && !found; i++)
            if (places[i].most == way)
                found = within(i, bytes);
    return found;
}

/* Memory for a tensor: try its place first, then other memory, in the order that disturbs the plan least. */
static void *find(int64_t bytes) {
    int fit = 0;
    void *found = own ? in_common(bytes) : in_place(bytes, &fit);
    if (found || (bytes <= small && (found = in_loose(bytes))))
        return found;
    if (!fit && (found = in_common(bytes)))
        return found;
    if (!told && bytes > small && (found = in_arena(0, placed, bytes, 1)))
        return found;
    if (!fit && (found = in_loose(bytes))) /* a kernel's own memory, such as cuBLAS's workspaces */
        return found;
    strays += told && (fit || bytes > small);
    if ((found = beside(bytes)) || (found = newly(bytes))) /* takes no planned place */
        return found;
    if (arena && ((found = in_arena(0, arena->bytes, bytes, 1)) || (found = in_arena(0, arena->bytes, bytes, 0))))
        return found;
    return drop_empty() ? newly(bytes) : NULL;
}

/* ---- what the host calls */

void arena_driver(void *malloc_, void *free_, void *wait, void *last_error, void *raise_) {
    driver_malloc = (int (*)(void **, size_t))malloc_;
    driver_free = (int (*)(void *))free_;
    driver_wait = (int (*)(void))wait;
    driver_last_error = (int (*)(void))last_error;
    raise_error = (void (*)(const char *))raise_;
}

/* Take the arena from the driver. Returns 0 if the driver has too little memory, or if the old arena is in use. */
int arena_open(int64_t placed_bytes, int64_t loose_bytes, int64_t small_bytes) {
    pthread_mutex_lock(&lock);
    int open = 0;
    if (!arena || !arena->count) {
        arena = NULL; /* the old arena is empty: give it back */
        drop_empty();
        arena = new_segment(placed_bytes + loose_bytes);
        open = arena != NULL;
        placed = placed_bytes, small = small_bytes, strays = 0;
    }
    places = NULL, place_count = 0, told = 0;
    pthread_mutex_unlock(&lock);
    return open;
}

/* Close the arena. It goes back to the driver as soon as it is empty. */
void arena_close(void) {
    pthread_mutex_lock(&lock);
    if (arena)
        arena->own = 1;
    arena = NULL, places = NULL, place_count = 0, told = 0;
    drop_empty();
    pthread_mutex_unlock(&lock);
}

/* The next allocations have these places, in this order. The caller keeps `its` alive until the next call. Allocations
 * of at most `least_` bytes have no place in it. NULL: the next allocations are in no plan. */
void arena_expect(const Place *its, int64_t count, int64_t least_) {
    pthread_mutex_lock(&lock);
    if (count > taken_room) {
        free(taken);
        taken = malloc((size_t)count);
        taken_room = taken ? count : 0;
    }
    own = 0, next = -1;
    told = its != NULL, places = its, place_count = its && taken_room >= count ? count : 0;
    least = least_;
    if (place_count)
        memset(taken, 0, (size_t)count);
    pthread_mutex_unlock(&lock);
}

/* Say whether the next allocations come from a layer's own code. */
void arena_own(int on) { own = on; }

/* The next allocation has the place of this number, if the sizes agree. */
void arena_next(int64_t number) { next = number; }

/* Take at most this many bytes from the driver. */
void arena_limit(int64_t bytes) { limit = bytes; }

void arena_empty(void) {
    pthread_mutex_lock(&lock);
    drop_empty();
    pthread_mutex_unlock(&lock);
}

/* Record allocations and frees from now on, up to `room` pairs. Returns how many pairs were recorded before. */
int64_t arena_write_down(int64_t *pairs, int64_t room) {
    pthread_mutex_lock(&lock);
    int64_t count = written_count;
    written = pairs, written_room = room, written_count = 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void arena_reset_peaks(void) {
    pthread_mutex_lock(&lock);
    most_allocated = allocated, most_reserved = reserved;
    pthread_mutex_unlock(&lock);
}

/* Counter `which`: allocated bytes, their peak, reserved bytes, their peak, driver mallocs, driver frees, strays. */
int64_t arena_count(int which) {
    int64_t counts[] = {allocated, most_allocated, reserved, most_reserved, mallocs, frees, strays};
    return counts[which];
}

/* ---- what PyTorch calls */

void *arena_allocate(int64_t size, int device, void *stream) {
    (void)device;
    if (size <= 0)
        return NULL;
    int64_t bytes = up(size, GRAIN);
    void *found;
    pthread_mutex_lock(&lock);
    if (stream) {
        Segment *made = new_segment(up(bytes, PAGE));
        if (!made && drop_empty())
            made = new_segment(up(bytes, PAGE));
        found = made ? put(made, 0, bytes) : NULL;
        if (made)
            made->own = 1;
    } else {
        found = find(bytes);
    }
    if (found)
        write_down(found, size);
    char text[200];
    snprintf(text, sizeof text,
             "CUDA out of memory. Tried to allocate %.2f MiB: %.1f MiB allocated, %.1f MiB reserved, at most %.1f MiB",
             (double)size / (1 << 20), (double)allocated / (1 << 20), (double)reserved / (1 << 20),
             (double)limit / (1 << 20));
    pthread_mutex_unlock(&lock);
    if (!found)
        raise_error(text);
    return found;
}

static Used *find_used(void *pointer, Segment **in) {
    for (Segment *s = segments; s; s = s->next)
        if ((char *)pointer >= s->base && (char *)pointer < s->base + s->bytes) {
            int32_t at = above(s, (char *)pointer - s->base);
            *in = s;
            return at < s->count && s->used[at].start == (char *)pointer - s->base ? &s->used[at] : NULL;
        }
    return NULL;
}

void arena_free(void *pointer, int64_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    Segment *s = NULL;
    pthread_mutex_lock(&lock);
    Used *gone = pointer ? find_used(pointer, &s) : NULL;
    if (gone) {
        write_down(pointer, 0);
        if (gone->waits)
            failed(driver_wait());
        allocated -= gone->bytes;
        memmove(gone, gone + 1, (size_t)(s->used + s->count - gone - 1) * sizeof(Used));
        s->count--;
        if (s->own && !s->count)
            drop(s);
    }
    pthread_mutex_unlock(&lock);
}

/* Another stream uses this memory, so freeing it will wait for the device first. */
void arena_record(void *pointer, void *stream) {
    Segment *s = NULL;
    pthread_mutex_lock(&lock);
    Used *its = find_used(pointer, &s);
    if (its && (stream || s->own)) /* no wait if only the default stream uses it */
        its->waits = 1;
    pthread_mutex_unlock(&lock);
}
