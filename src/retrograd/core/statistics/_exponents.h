/* Counting binary exponents, as the eight bits that float32 stores. Included by _fold.c alone, which compiles it
   for several processors.

   An element becomes a word with one bit, whose place says its exponent. Words are added up as columns of bits: plane k
   holds bit k of all 32 counters of a lane, and three words become two, a sum and a carry, by five logical operations
   for all counters at once (Harley and Seal's way of counting bits). The planes are read out before they overflow.

   A word has room for a window of WIDTH exponents. The first elements decide where windows lie, so that most tensors
   need one; a block whose elements reach further is read once for each window that it touches, and one that touches
   many is counted element by element. */
#ifndef RETROGRAD_EXPONENTS_H
#define RETROGRAD_EXPONENTS_H

enum {
    NO_EXPONENT = 255, /* of NaN and the infinities */
    WIDTH = 30,        /* exponents of a window: the next bit stands for all above, and the last one is a sign */
    WINDOWS = 10,
    MANY = 3,   /* windows of a block that cost more than to count it one by one */
    COPIES = 4, /* of what counts one by one: a counter that is increased twice in a row has to wait for itself */
    LANES = 16, /* elements that are counted side by side */
    GROUP = 16 * LANES,
    PLANES = 9,
    SUMS = PLANES + 4, /* planes of what all lanes together have counted */
    MOST_GROUPS = ((1 << PLANES) - 1) / 16,
};

typedef struct {
    int groups; /* in the planes */
    _Alignas(64) uint32_t planes[PLANES][LANES]; /* each plane in one line of the cache */
} Window;

typedef struct {
    int origin;       /* where window 1 begins, or -1 before there are windows; window 0 holds what lies below */
    int32_t small;    /* elements of at least this magnitude need no look at a window below the first one in use */
    unsigned used;    /* windows, one bit each; the others are not cleared */
    bool has_singles; /* or they are not cleared */
    int64_t *bins;    /* those of windows in use are cleared */
    Window windows[WINDOWS];
    int64_t singles[COPIES][NO_EXPONENT + 1];
} Exponents;

/* How large the elements of a block are, as the bits of magnitudes. */
typedef struct {
    int zeros;
    int32_t smallest, largest; /* of those with an exponent; smallest > largest where there are none */
    bool finite;               /* all of them */
} Sizes;

/* Of elements that are finite, and the largest of which is known. */
INLINE Sizes look_below(const float *x, int n, int32_t largest)
{
    int zeros = 0;
    uint32_t smallest = UINT32_MAX;
#pragma omp simd reduction(+ : zeros) reduction(min : smallest)
    for (int i = 0; i < n; i++) {
        int32_t magnitude = bits32(x[i]) & INT32_MAX;
        uint32_t above = (uint32_t)magnitude - (1 << 23); /* wraps where there is no exponent */
        zeros += magnitude == 0;
        smallest = above < smallest ? above : smallest;
    }
    return (Sizes){zeros, smallest < FLOAT32_INF ? (int32_t)smallest + (1 << 23) : FLOAT32_INF, largest, true};
}

INLINE Sizes look_at(const float *x, int n)
{
    int32_t largest = 0, any = 0;
#pragma omp simd reduction(max : largest, any)
    for (int i = 0; i < n; i++) {
        int32_t magnitude = bits32(x[i]) & INT32_MAX, finite = magnitude < FLOAT32_INF ? magnitude : 0;
        largest = finite > largest ? finite : largest;
        any = magnitude > any ? magnitude : any;
    }
    Sizes sizes = look_below(x, n, largest); /* what is not finite is never the smallest, unless there is nothing else */
    sizes.finite = any < FLOAT32_INF;
    return sizes;
}

INLINE void begin_exponents(Exponents *e, int64_t *bins)
{
    e->origin = -1, e->small = FLOAT32_INF, e->used = 0, e->has_singles = false, e->bins = bins;
}

INLINE int window_of(const Exponents *e, int32_t magnitude) { return ((magnitude >> 23) + WIDTH - e->origin) / WIDTH; }
INLINE int end_of(const Exponents *e, int window) { return e->origin + window * WIDTH; }
INLINE int begin_of(const Exponents *e, int window) { return window ? end_of(e, window - 1) : 0; }

/* What one lane counts: four of its planes, and how a window turns elements into bits. */
typedef struct {
    float scale;
    int32_t above;
    uint32_t ones, twos, fours, eights;
} Lane;

/* The bit of an element, the one above for a larger element, or none for a smaller one. Where none is larger, `within`
   says so. */
INLINE uint32_t one_bit(const Lane *lane, float x, bool within)
{
    int32_t power = bits32(float32(bits32(x) & FLOAT32_INF) * lane->scale);
    return (uint32_t)(int32_t)float32(within || power < lane->above ? power : lane->above);
}

/* Add two words to a plane; returns what is carried over to the next one. */
INLINE uint32_t add(uint32_t *plane, uint32_t a, uint32_t b)
{
    uint32_t odd = a ^ *plane, carry = ((a ^ b) & odd) ^ a;
    *plane = odd ^ b;
    return carry;
}

INLINE uint32_t add2(Lane *lane, const float *x, bool within)
{
    return add(&lane->ones, one_bit(lane, x[0], within), one_bit(lane, x[LANES], within));
}

INLINE uint32_t add4(Lane *lane, const float *x, bool within)
{
    uint32_t a = add2(lane, x, within), b = add2(lane, x + 2 * LANES, within);
    return add(&lane->twos, a, b);
}

INLINE uint32_t add8(Lane *lane, const float *x, bool within)
{
    uint32_t a = add4(lane, x, within), b = add4(lane, x + 4 * LANES, within);
    return add(&lane->fours, a, b);
}

INLINE uint32_t add16(Lane *lane, const float *x, bool within)
{
    uint32_t a = add8(lane, x, within), b = add8(lane, x + 8 * LANES, within);
    return add(&lane->eights, a, b);
}

/* Add what is carried over to one plane; returns what is carried over to the next one. */
INLINE uint32_t pass_on(uint32_t *plane, uint32_t carry)
{
    uint32_t both = *plane & carry;
    *plane ^= carry;
    return both;
}

/* Planes are named one by one, because compilers make no vectors of lanes around an inner loop. */
INLINE void count_group(Window *w, const float *x, float scale, int32_t above, bool within)
{
    for (int k = 0; k < LANES; k++) {
        Lane lane = {scale, above, w->planes[0][k], w->planes[1][k], w->planes[2][k], w->planes[3][k]};
        uint32_t carry = add16(&lane, x + k, within);
        w->planes[0][k] = lane.ones, w->planes[1][k] = lane.twos;
        w->planes[2][k] = lane.fours, w->planes[3][k] = lane.eights;
        carry = pass_on(&w->planes[4][k], carry);
        carry = pass_on(&w->planes[5][k], carry);
        carry = pass_on(&w->planes[6][k], carry);
        carry = pass_on(&w->planes[7][k], carry);
        w->planes[8][k] ^= carry;
    }
}

/* Add the upper half of the lanes to the lower one, which makes one more plane. */
INLINE void halve(uint32_t planes[SUMS][LANES], int n, int half)
{
    uint32_t carry[LANES] = {0};
    for (int k = 0; k < n; k++)
        for (int lane = 0; lane < half; lane++) {
            uint32_t a = planes[k][lane], b = planes[k][lane + half], c = carry[lane], odd = a ^ b;
            planes[k][lane] = odd ^ c;
            carry[lane] = (odd & c) | (a & b);
        }
    for (int lane = 0; lane < half; lane++) planes[n][lane] = carry[lane];
}

/* Add what a window has counted to the bins, and begin it anew. */
INLINE void read_out(Exponents *e, int window)
{
    Window *w = &e->windows[window];
    uint32_t sums[SUMS][LANES];
    int n = 4, counts[32] = {0};
    while (n < PLANES && w->groups * 16 >> n) n++;
    memcpy(sums, w->planes, sizeof w->planes);
    halve(sums, n, 8), halve(sums, n + 1, 4), halve(sums, n + 2, 2), halve(sums, n + 3, 1);
    for (int k = 0; k < n + 4; k++)
        for (int bit = 0; bit < 32; bit++) counts[bit] += (int)(sums[k][0] >> bit & 1) << k;
    int begin = begin_of(e, window), end = end_of(e, window);
    if (end > BINS) end = BINS;
    for (int bin = begin; bin < end; bin++) e->bins[bin] += counts[bin - begin];
    memset(w->planes, 0, sizeof w->planes);
    w->groups = 0;
}

INLINE void clear_bins(Exponents *e, int window)
{
    int begin = begin_of(e, window), end = end_of(e, window);
    if (end > BINS) end = BINS;
    if (begin < end) memset(e->bins + begin, 0, (size_t)(end - begin) * sizeof *e->bins);
}

INLINE void use_window(Exponents *e, int window)
{
    Window *w = &e->windows[window];
    e->used |= 1u << window;
    clear_bins(e, window);
    memset(w->planes, 0, sizeof w->planes);
    w->groups = 0;
}

INLINE void count_groups(Exponents *e, int window, const float *x, int n, bool within)
{
    Window *w = &e->windows[window];
    int begin = begin_of(e, window), end = end_of(e, window);
    float scale = float32((254 - begin) << 23);
    int32_t above = (127 + end - begin) << 23;
    for (int i = 0; i < n; i += GROUP) {
        if (w->groups == MOST_GROUPS) read_out(e, window);
        w->groups++;
        if (n - i >= GROUP) {
            count_group(w, x + i, scale, above, within);
        } else {
            float rest[GROUP] = {0};
            memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
            count_group(w, rest, scale, above, within);
        }
    }
}

INLINE void count_in_window(Exponents *e, int window, const float *x, int n, const Sizes *sizes)
{
    if (!(e->used >> window & 1)) use_window(e, window);
    if (sizes->finite && sizes->largest >> 23 < end_of(e, window)) count_groups(e, window, x, n, true);
    else count_groups(e, window, x, n, false);
}

/* Put the windows so that one holds this magnitude, a few exponents above it, and many below. That they begin at
   multiples of 3 keeps every scale a normal number. */
INLINE void place_windows(Exponents *e, int32_t largest)
{
    int begin = ((largest >> 23) - 24) / 3 * 3;
    if (begin < 0) begin = 0;
    e->origin = begin % WIDTH;
    e->small = begin ? begin << 23 : 1 << 23;
}

INLINE int exponent_of(float x) { return (bits32(x) & INT32_MAX) >> 23; }

/* Add what was counted one by one to the bins, of which those of windows in use are known. */
static NOINLINE void read_singles(Exponents *e)
{
    for (int window = 0; window < WINDOWS; window++)
        if (!(e->used >> window & 1)) clear_bins(e, window);
    for (int bin = 1; bin < BINS; bin++)
        for (int k = 0; k < COPIES; k++) e->bins[bin] += e->singles[k][bin];
}

static NOINLINE void count_singly(Exponents *e, const float *x, int n)
{
    if (!e->has_singles) memset(e->singles, 0, sizeof e->singles);
    e->has_singles = true;
    int i = 0;
    for (; i + COPIES <= n; i += COPIES)
        for (int k = 0; k < COPIES; k++) e->singles[k][exponent_of(x[i + k])]++;
    for (; i < n; i++) e->singles[0][exponent_of(x[i])]++;
}

/* Count a block. */
INLINE void count_exponents(Exponents *e, const float *x, int n, const Sizes *sizes)
{
    if (sizes->smallest > sizes->largest) return;
    if (e->origin < 0) place_windows(e, sizes->largest);
    int first = window_of(e, sizes->smallest), last = window_of(e, sizes->largest);
    if (last - first >= MANY) count_singly(e, x, n);
    else for (int window = first; window <= last; window++) count_in_window(e, window, x, n, sizes);
}

/* The bins of a contribution whose moments are known: subnormal numbers have not been counted, and are what is left. */
INLINE void end_exponents(Exponents *e, Contribution *c)
{
    int64_t subnormal = finite_count(&c->moments) - c->moments.zeros;
    int begin = BINS, end = 0;
    for (int window = 0; window < WINDOWS; window++)
        if (e->used >> window & 1) {
            read_out(e, window);
            if (begin == BINS) begin = begin_of(e, window);
            else memset(c->bins + end, 0, (size_t)(begin_of(e, window) - end) * sizeof *c->bins);
            end = end_of(e, window);
        }
    if (end > BINS) end = BINS;
    if (e->has_singles) {
        read_singles(e);
        begin = 0, end = BINS;
    }
    while (begin < end && !c->bins[begin]) begin++;
    while (begin < end && !c->bins[end - 1]) end--;
    for (int bin = begin; bin < end; bin++) subnormal -= c->bins[bin];
    if (subnormal) {
        if (end > 1) memset(c->bins + 1, 0, (size_t)(begin - 1) * sizeof *c->bins);
        else end = 1;
        begin = 0, c->bins[0] = subnormal;
    }
    c->first = begin, c->last = end - 1;
}
#endif
