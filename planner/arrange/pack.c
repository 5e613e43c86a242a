/* Finds memory offsets for tensors with known lifetimes (spans): dynamic storage allocation.
 *
 * One attempt takes the spans in some order. Each gets the lowest offset that is free during its whole life, or the
 * highest one below a goal. The search tries orders and sides (low or high). It begins with the largest spans first.
 * Then it varies the best order: it gives the largest spans random ranks, and moves spans that end above the goal
 * forward. The random numbers come from a counter, and the effort is counted in comparisons, not in seconds. So the
 * same input always gives the same answer.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A tensor's life, as in planner/schedule/places.py: from `start` to before `end`, and also until before `before`.
 * Spans of one stage have the same `group` >= 0, and `low` to `high` is their life within the stage's turn. */
typedef struct {
    int64_t bytes, start, end, group, low, high, before;
} Span;

typedef struct {
    int64_t rank;
    int32_t number;
} Order;

/* Per span: its rank (the highest is placed first), whether it is placed from above (`down`), and its offset. */
typedef struct {
    int64_t *rank;
    uint8_t *down;
    int64_t *offset;
    int64_t height;
} Attempt;

static const Span *sorted_spans;

static int by_rank(const void *one, const void *other) {
    const Order *a = one, *b = other;
    if (a->rank != b->rank)
        return a->rank > b->rank ? -1 : 1;
    int64_t x = sorted_spans[a->number].start, y = sorted_spans[b->number].start;
    if (x != y)
        return x < y ? -1 : 1;
    return a->number - b->number;
}

/* Whether two spans live at the same time and must not overlap in memory. */
static int meet(const Span *a, const Span *b) {
    if (!((a->start < b->end && b->start < a->end) || a->before > b->start || b->before > a->start))
        return 0;
    return a->group < 0 || a->group != b->group || (a->low < b->high && b->low < a->high);
}

/* The step is cut into 64 parts; a bit is set for each part in which the span lives. Two spans without a common bit do
 * not meet, which is quick to check. */
static uint64_t time_bits(const Span *span, int64_t clock) {
    uint64_t bits = 0;
    for (int64_t part = 0; part < 64; part++) {
        int64_t from = clock * part / 64, to = clock * (part + 1) / 64;
        if ((span->start < to && from < span->end) || from < span->before)
            bits |= 1ULL << part;
    }
    return bits;
}

static uint64_t chance_state;

/* A random number from 0 to 1023. */
static int64_t chance(void) {
    chance_state += 0x9e3779b97f4a7c15ULL;
    uint64_t x = chance_state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return (int64_t)((x ^ (x >> 31)) >> 54);
}

/* Place all spans in the attempt's order. `attempt->height` becomes the end of the highest one; the attempt is given up
 * when it exceeds `most`. `order` and `placed` are scratch memory. `work` grows by the comparisons made. */
static void place(const Span *spans, const uint64_t *times, int32_t count, Attempt *attempt, int64_t goal, int64_t most,
                  Order *order, int32_t *placed, int64_t *work) {
    for (int32_t i = 0; i < count; i++)
        order[i] = (Order){attempt->rank[i], i};
    sorted_spans = spans;
    qsort(order, count, sizeof(Order), by_rank);
    attempt->height = 0;
    for (int32_t n = 0; n < count; n++) {
        int32_t i = order[n].number;
        const Span *span = &spans[i];
        int64_t at = -1, floor = 0;
        for (int32_t j = 0; j < n; j++) { /* `placed` is sorted by offset */
            int32_t other = placed[j];
            if (!(times[i] & times[other]))
                continue;
            int64_t bottom = attempt->offset[other], top = bottom + spans[other].bytes;
            if (top <= floor || !meet(span, &spans[other]))
                continue;
            if (bottom - floor >= span->bytes) {
                at = (attempt->down[i] && bottom <= goal ? bottom - span->bytes : at < 0 ? floor : at);
                if (!attempt->down[i])
                    break;
            }
            floor = top;
        }
        *work += n;
        if (attempt->down[i] && floor + span->bytes <= goal)
            at = goal - span->bytes;
        if (at < 0)
            at = floor;
        attempt->offset[i] = at;
        if (at + span->bytes > attempt->height)
            attempt->height = at + span->bytes;
        if (attempt->height > most)
            return;
        int32_t low = 0, high = n;
        while (low < high) {
            int32_t middle = (low + high) / 2;
            if (attempt->offset[placed[middle]] < at)
                low = middle + 1;
            else
                high = middle;
        }
        memmove(placed + low + 1, placed + low, (n - low) * sizeof(int32_t));
        placed[low] = i;
    }
}

/* The side of a span in the first four attempts (`way` 0 to 3): 1 from above, 0 from below. */
static int side(const Span *span, int way) {
    return way == 1 ? span->group >= 0 : way == 2 ? span->group < 0 : way == 3 ? span->before > 0 : 0;
}

/* Make the attempt `next` from `best` by one random change. `large`: bytes of the largest span. */
static void change(const Span *spans, int32_t count, Attempt *next, const Attempt *best, int64_t goal, int64_t large) {
    int64_t kind = chance(), some = chance(), by = chance();
    int32_t one = (int32_t)(((uint64_t)chance() << 10 | (uint64_t)chance()) % (uint64_t)count);
    memcpy(next->rank, best->rank, count * sizeof(int64_t));
    memcpy(next->down, best->down, count);
    for (int32_t i = 0; i < count; i++) {
        int big = spans[i].bytes > large / 8, over = best->offset[i] + spans[i].bytes > goal;
        if (kind < 384) { /* new ranks and sides for all large spans */
            next->rank[i] = big ? 16 * large + chance() * (large / 64) : spans[i].bytes;
            next->down[i] = big ? chance() < 512 : side(&spans[i], (int)(some % 4));
        } else if (kind < 640 && over && chance() < some) { /* spans that end above the goal are placed earlier */
            next->rank[i] += next->rank[i] / 512 * by + 1;
        }
    }
    if (kind < 640)
        return;
    while (kind < 896 && spans[one].bytes <= large / 8) /* choose a large span */
        one = (one + 1) % count;
    if (by < 512)
        next->down[one] = !next->down[one];
    else
        next->rank[one] = kind < 896 ? 4 * large + chance() * (large / 64) : next->rank[one] * 4;
}

/* Write an offset for each span to `offsets` and return the height, or -1 if the host has no memory for the search.
 * `goal`: the height without any gap. The search ends when the height is at most `enough`, or after `effort`
 * comparisons. */
int64_t pack(const Span *spans, int32_t count, int64_t goal, int64_t enough, int64_t effort, int64_t *offsets) {
    int64_t large = 0, work = 0, clock = 1;
    char *memory = calloc((size_t)count + 1, 4 * sizeof(int64_t) + sizeof(Order) + sizeof(int32_t) + 2);
    if (!memory)
        return -1;
    int64_t *numbers = (int64_t *)memory;
    Attempt best = {numbers, NULL, offsets, INT64_MAX}, next = {numbers + count, NULL, numbers + 2 * count, 0};
    uint64_t *times = (uint64_t *)(numbers + 3 * count);
    Order *order = (Order *)(times + count);
    int32_t *placed = (int32_t *)(order + count);
    best.down = (uint8_t *)(placed + count), next.down = best.down + count;
    for (int32_t i = 0; i < count; i++) {
        large = spans[i].bytes > large ? spans[i].bytes : large;
        clock = spans[i].end > clock ? spans[i].end : clock;
    }
    for (int32_t i = 0; i < count; i++)
        times[i] = time_bits(&spans[i], clock);
    chance_state = 0;
    for (int32_t tries = 0; tries < 4 || (best.height > enough && work < effort); tries++) {
        if (tries < 4) {
            for (int32_t i = 0; i < count; i++)
                next.rank[i] = spans[i].bytes, next.down[i] = (uint8_t)side(&spans[i], tries);
        } else {
            change(spans, count, &next, &best, goal, large);
        }
        place(spans, times, count, &next, goal, best.height, order, placed, &work);
        if (next.height > best.height)
            continue;
        best.height = next.height;
        memcpy(best.rank, next.rank, count * sizeof(int64_t));
        memcpy(best.down, next.down, count);
        memcpy(best.offset, next.offset, count * sizeof(int64_t));
    }
    free(memory);
    return count ? best.height : 0;
}
