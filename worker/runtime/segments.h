/* Segments: pieces of device memory, each from one call of the driver, with their tensors. One of them is the arena.
 *
 * Callers must hold the lock of `arena.c`.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t start, bytes;
    int waits; /* another stream uses it: freeing it waits for the device */
} Used;

typedef struct Segment {
    struct Segment *next;
    char *base;
    int64_t bytes;
    Used *used; /* sorted by address */
    int32_t count, room;
    int own; /* takes no more tensors: holds one tensor of another stream, or is a closed arena */
} Segment;

static int (*driver_malloc)(void **, size_t);
static int (*driver_free)(void *);
static int (*driver_last_error)(void);

static Segment *segments, *arena;
static int64_t limit = INT64_MAX, reserved, allocated, most_allocated, most_reserved, mallocs, frees;

/* Whether a call of the driver has failed. The caller handles the failure, so this clears CUDA's last error of the
 * thread. Otherwise PyTorch would raise it after the thread's next kernel, although that kernel did not fail. */
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

/* Give empty segments back to the driver. Returns whether there were any. */
static int drop_empty(void) {
    int found = 0;
    for (Segment *s = segments, *next; s; s = next) {
        next = s->next;
        if (s != arena && !s->count)
            drop(s), found = 1;
    }
    return found;
}

/* The index of the first tensor that ends above `start`. */
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
