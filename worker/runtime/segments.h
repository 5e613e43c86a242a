/* Segments: pieces of the device's memory as the driver gave them, and the tensors in each. One of them is the arena.
 *
 * Whoever calls holds the lock of `arena.c`.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t start, bytes;
    int waits; /* another stream uses it */
} Used;

typedef struct Segment {
    struct Segment *next;
    char *base;
    int64_t bytes;
    Used *used; /* the lowest first */
    int32_t count, room;
    int own; /* nothing else is put there: one tensor of another stream, or an arena that was closed */
} Segment;

static int (*driver_malloc)(void **, size_t);
static int (*driver_free)(void *);
static int (*driver_last_error)(void);

static Segment *segments, *arena;
static int64_t limit = INT64_MAX, reserved, allocated, most_allocated, most_reserved, mallocs, frees;

/* Whether a call of the driver has failed. The caller deals with it, so the error is taken back: CUDA keeps it for the
 * thread, and PyTorch would raise it from the thread's next kernel, which has none. */
static int failed(int code) {
    if (code)
        driver_last_error();
    return code;
}

static Segment *new_segment(int64_t bytes) {
    void *base = NULL;
    Segment *made;
    if (bytes > limit - reserved || !(made = calloc(1, sizeof(Segment))))
        return NULL;
    mallocs++;
    if (failed(driver_malloc(&base, (size_t)bytes))) {
        free(made);
        return NULL;
    }
    made->base = base, made->bytes = bytes, made->next = segments, segments = made;
    reserved += bytes;
    most_reserved = reserved > most_reserved ? reserved : most_reserved;
    return made;
}

static void drop(Segment *gone) {
    for (Segment **at = &segments; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            break;
        }
    frees++;
    failed(driver_free(gone->base));
    reserved -= gone->bytes;
    free(gone->used);
    free(gone);
}

/* Give back the segments in which nothing is; whether there were any. */
static int drop_empty(void) {
    int found = 0;
    for (Segment *s = segments, *next; s; s = next) {
        next = s->next;
        if (s != arena && !s->count)
            drop(s), found = 1;
    }
    return found;
}

/* The number of the first tensor that ends above `start`. */
static int32_t above(const Segment *s, int64_t start) {
    int32_t low = 0, high = s->count;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (s->used[middle].start + s->used[middle].bytes <= start)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void *put(Segment *s, int64_t start, int64_t bytes) {
    int32_t at = above(s, start);
    if (s->count == s->room) {
        int32_t room = s->room ? 2 * s->room : 64;
        Used *more = realloc(s->used, (size_t)room * sizeof(Used));
        if (!more)
            return NULL;
        s->used = more, s->room = room;
    }
    memmove(s->used + at + 1, s->used + at, (size_t)(s->count - at) * sizeof(Used));
    s->used[at] = (Used){start, bytes, 0};
    s->count++;
    allocated += bytes;
    most_allocated = allocated > most_allocated ? allocated : most_allocated;
    return s->base + start;
}
