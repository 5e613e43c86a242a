/* The device's memory in one piece: an allocator for PyTorch that puts each tensor where the plan has a place for it.
 *
 * The engine says before each operation which places its allocations have. A place is advice: it is taken where it is
 * free. So no two tensors ever share memory, whatever comes; where all comes as planned, none needs another place.
 *
 * What has no place lies in the loose part of the arena; or beside it, in segments of its own, as far as the limit lets
 * more be taken from the driver; or wherever a gap is. Memory belongs to the default stream: what is freed may be used
 * again by what that stream is given from then on. Other streams get memory that is nobody else's.
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
    int64_t bytes, offset, most; /* offset: -1 in the loose part; most: 1: of one tensor with fewer
                                     bytes, or of several; 2: of all that own code makes */
} Place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*driver_wait)(void);
static void (*raise_error)(const char *);

static int64_t placed, small, strays;

static const Place *places;
static int64_t place_count, least;
static uint8_t *taken;
static int64_t taken_room;
static int told; /* an operation has said what comes */
static int own;  /* what comes is a layer's own code's, and goes to its area */
static int64_t next = -1; /* the number of the place that is for what comes next */

static int64_t *written, written_room, written_count; /* pairs of an address and the bytes that come there, or 0 */

static void write_down(void *pointer, int64_t bytes) {
    if (written_count < written_room) {
        written[2 * written_count] = (int64_t)pointer;
        written[2 * written_count + 1] = bytes;
        written_count++;
    }
}

static int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

/* ---- gaps */

/* Where from `start` on the first place ends that this operation still wants; 0: nobody wants what is there. */
static int64_t wanted(int64_t start, int64_t bytes) {
    for (int64_t i = 0; i < place_count; i++) {
        const Place *p = &places[i];
        if (!taken[i] && p->offset < start + bytes && start < p->offset + p->bytes)
            return p->offset + p->bytes;
    }
    return 0;
}

/* The smallest gap of `s` between `from` and `to` that has room, or -1; `polite`: the lowest that nobody wants. */
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

/* In the smallest gap beside the arena. */
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

static void *newly(int64_t bytes) {
    int64_t shared = bytes <= ((int64_t)1 << 20) ? PAGE : bytes < 5 * PAGE ? 10 * PAGE : up(bytes, PAGE);
    Segment *made = new_segment(shared);
    made = made ? made : new_segment(up(bytes, PAGE));
    made = made ? made : new_segment(bytes);
    return made ? put(made, 0, bytes) : NULL;
}

/* ---- places */

/* The place for a tensor of this size that comes now, or -1: the one that was said, or the first of its size that is
 * left, for kernels allocate what no plan knows. */
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

/* At its place, if there is room; `fit` becomes whether it has one. */
static void *in_place(int64_t bytes, int *fit) {
    int64_t i = arena ? place_for(bytes) : -1;
    if (i < 0)
        return NULL;
    taken[i] = 1;
    *fit = places[i].offset >= 0;
    return *fit ? within(i, bytes) : in_loose(bytes);
}

/* Where there may be several. */
static void *in_common(int64_t bytes) {
    void *found = NULL;
    for (int64_t way = own ? 2 : 1; arena && way <= 2; way++)
        for (int64_t i = 0; i < place_count && !found; i++)
            if (places[i].most == way)
                found = within(i, bytes);
    return found;
}

static void *find(int64_t bytes) {
    int fit = 0;
    void *found = own ? in_common(bytes) : in_place(bytes, &fit);
    if (found || (bytes <= small && (found = in_loose(bytes))))
        return found;
    if (!fit && (found = in_common(bytes)))
        return found;
    if (!told && bytes > small && (found = in_arena(0, placed, bytes, 1)))
        return found;
    if (!fit && (found = in_loose(bytes))) /* a kernel's own, as cuBLAS's workspaces */
        return found;
    strays += told && (fit || bytes > small);
    if ((found = beside(bytes)) || (found = newly(bytes))) /* there it is in nobody's way */
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

/* Take the arena from the driver; 0 where that has not so much, or where there is one in which something lies. */
int arena_open(int64_t placed_bytes, int64_t loose_bytes, int64_t small_bytes) {
    pthread_mutex_lock(&lock);
    int open = 0;
    if (!arena || !arena->count) {
        arena = NULL; /* one that nobody uses is not needed */
        drop_empty();
        arena = new_segment(placed_bytes + loose_bytes);
        open = arena != NULL;
        placed = placed_bytes, small = small_bytes, strays = 0;
    }
    places = NULL, place_count = 0, told = 0;
    pthread_mutex_unlock(&lock);
    return open;
}

/* It goes back to the driver when nothing is in it. */
void arena_close(void) {
    pthread_mutex_lock(&lock);
    if (arena)
        arena->own = 1;
    arena = NULL, places = NULL, place_count = 0, told = 0;
    drop_empty();
    pthread_mutex_unlock(&lock);
}

/* What comes next has these places, in this order; they stay where they are until others are given. What has up to
 * `least_` bytes has none among them. NULL: what comes is in no plan. */
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

/* What comes is of a layer's own code, or no more. */
void arena_own(int on) { own = on; }

/* What comes next has this one of the places, if it is of its size. */
void arena_next(int64_t number) { next = number; }

/* Let no more be taken from the driver than that. */
void arena_limit(int64_t bytes) { limit = bytes; }

void arena_empty(void) {
    pthread_mutex_lock(&lock);
    drop_empty();
    pthread_mutex_unlock(&lock);
}

/* From now on write down what comes and goes, up to `room` pairs; how many there are so far. */
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

/* allocated, the most of it; reserved, the most of it; calls of the driver; what has not found its place */
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

/* Another stream uses it: whoever frees it waits for the device first. */
void arena_record(void *pointer, void *stream) {
    Segment *s = NULL;
    pthread_mutex_lock(&lock);
    Used *its = find_used(pointer, &s);
    if (its && (stream || s->own)) /* the default stream alone uses its own memory */
        its->waits = 1;
    pthread_mutex_unlock(&lock);
}
