/* Counting binary exponents, as the eight bits that float32 stores. Included by _fold.c alone, which compiles it
   for several processors.

   An element becomes a word of one bit, whose place says its exponent. Words are added up in planes of bits: plane k
   holds bit k of each of a lane's counters, and a few logical operations add two words to all of them at once, with a
   carry into the next plane (Harley and Seal's way of counting bits). Planes are read out before they overflow.

   A word has room for a window of exponents. The first elements say where windows lie, so that most tensors need one; a
   block whose elements reach further is read for each window that it touches, or, if these are many, one by one. */
#ifndef RETROGRAD_EXPONENTS_H
#define RETROGRAD_EXPONENTS_H

enum {
    NORMAL = 1 << 23, /* the bits of the smallest magnitude that has an exponent */
    WIDTH = 30,       /* exponents of a window; of a word's other bits one stands for all above, and one is a sign */
    WINDOWS = 10,
    MANY = 3,         /* windows, from which elements are better counted one by one */
    COPIES = 4,       /* of what counts one by one: a counter that is increased twice in a row has to wait for itself */
    LANES = 16,       /* elements that are counted side by side */
    GROUP = 16,       /* words that are added to a lane at once */
    FEW = 4,          /* the same where there are not as many */
    PLANES = 9,
    SUMS = PLANES + 4, /* planes when all lanes have been added up */
    MOST_WORDS = (1 << PLANES) - 1,
    SAMPLE = 64,      /* elements that say where windows lie */
};

typedef struct {
    int words; /* in each lane */
    uint32_t planes[PLANES][LANES];
} Window;

typedef struct {
    int origin;    /* the exponent at which window 1 begins, or -1 before it is known; window 0 has those below */
    int32_t small; /* the magnitude at which the window of most elements begins */
    unsigned used; /* windows, one bit each; what belongs to others has not been cleared */
    bool singly;   /* something has been counted in `singles`, which has not been cleared before */
    int64_t *bins;
    Window windows[WINDOWS];
    int64_t singles[COPIES][256];
} Exponents;

/* How large the elements of a block are; magnitudes are bits. */
typedef struct {
    int zeros;
    int32_t smallest, largest; /* of the finite ones that have an exponent; the first is greater where there are none */
    bool finite;
} Sizes;

/* What small elements a block has that has no others than finite ones. */
INLINE Sizes look_below(const float *x, int n, int32_t largest)
{
    int zeros = 0;
    uint32_t smallest = UINT32_MAX;
#pragma omp simd reduction(+ : zeros) reduction(min : smallest)
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(bits32(x[i]) & INT32_MAX);
        uint32_t above = magnitude - NORMAL; /* large where there is no exponent */
        zeros += magnitude == 0;
        smallest = above < smallest ? above : smallest;
    }
    return (Sizes){zeros, smallest < INT32_MAX ? (int32_t)smallest + NORMAL : INT32_MAX, largest, true};
}

INLINE Sizes look_at(const float *x, int n)
{
    float known[BLOCK];
    int32_t largest = 0;
    int special = 0;
#pragma omp simd reduction(+ : special) reduction(max : largest)
    for (int i = 0; i < n; i++) {
        int32_t magnitude = bits32(x[i]) & INT32_MAX;
        bool finite = magnitude < FLOAT32_INF;
        magnitude = finite ? magnitude : 1; /* has no exponent either, and is not counted as zero */
        known[i] = float32(magnitude);
        special += !finite;
        largest = magnitude > largest ? magnitude : largest;
    }
    Sizes sizes = look_below(known, n, largest);
    sizes.finite = !special;
    return sizes;
}

/* ---- windows ---- */

INLINE int window_of(const Exponents *e, int32_t magnitude) { return ((magnitude >> 23) + WIDTH - e->origin) / WIDTH; }
INLINE int window_begin(const Exponents *e, int window) { return window ? e->origin + (window - 1) * WIDTH : 0; }
INLINE int window_end(const Exponents *e, int window)
{
    int end = e->origin + window * WIDTH;
    return end < BINS ? end : BINS;
}

INLINE void begin_exponents(Exponents *e, int64_t *bins)
{
    e->origin = -1, e->small = FLOAT32_INF, e->used = 0, e->singly = false, e->bins = bins;
}

/* Have a window reach from many exponents below this magnitude to a few above. All windows begin at multiples of 3, and
   so none at 254, of which the scale were no normal number. */
INLINE void place_windows(Exponents *e, int32_t magnitude)
{
    int top = magnitude >> 23, begin = top > 24 ? (top - 24) / 3 * 3 : 0;
    e->origin = begin % WIDTH;
    e->small = begin ? begin << 23 : NORMAL;
}

/* Place windows by the first elements of a block, if they tell. */
INLINE void try_windows(Exponents *e, const float *x, int n)
{
    Sizes sizes = look_at(x, n < SAMPLE ? n : SAMPLE);
    if (sizes.smallest <= sizes.largest) place_windows(e, sizes.largest);
}

/* ---- planes ---- */

/* How elements become bits. */
typedef struct {
    float factor;         /* from a window's first power of two to 1 */
    int32_t below, above; /* bits of what all smaller elements are taken for, and all larger ones when they are scaled */
} Scale;

/* What one lane has in four of its planes. */
typedef struct {
    Scale scale;
    uint32_t ones, twos, fours, eights;
} Lane;

/* The bit of an element: none if it is smaller than the window's, the one after the last if it is larger. */
INLINE uint32_t bit_of(const Lane *lane, float x, bool within)
{
    int32_t power = bits32(x) & FLOAT32_INF;
    if (!within) power = power > lane->scale.below ? power : lane->scale.below; /* products that are subnormal are slow */
    power = bits32(float32(power) * lane->scale.factor);
    if (!within) power = power < lane->scale.above ? power : lane->scale.above;
    return (uint32_t)(int32_t)float32(power);
}

/* Add two words to a plane; returns what is carried over. */
INLINE uint32_t add(uint32_t *plane, uint32_t a, uint32_t b)
{
    uint32_t odd = a ^ *plane, carry = ((a ^ b) & odd) ^ a;
    *plane = odd ^ b;
    return carry;
}

INLINE uint32_t add_2(Lane *lane, const float *x, bool within)
{
    return add(&lane->ones, bit_of(lane, x[0], within), bit_of(lane, x[LANES], within));
}

INLINE uint32_t add_4(Lane *lane, const float *x, bool within)
{
    uint32_t a = add_2(lane, x, within), b = add_2(lane, x + 2 * LANES, within);
    return add(&lane->twos, a, b);
}

INLINE uint32_t add_8(Lane *lane, const float *x, bool within)
{
    uint32_t a = add_4(lane, x, within), b = add_4(lane, x + 4 * LANES, within);
    return add(&lane->fours, a, b);
}

INLINE uint32_t add_16(Lane *lane, const float *x, bool within)
{
    uint32_t a = add_8(lane, x, within), b = add_8(lane, x + 8 * LANES, within);
    return add(&lane->eights, a, b);
}

INLINE uint32_t pass_on(uint32_t *plane, uint32_t carry)
{
    uint32_t both = *plane & carry;
    *plane ^= carry;
    return both;
}

/* Add GROUP or FEW words to each lane. Planes are written out one by one, so that compilers make vectors of lanes. */
INLINE void add_words(Window *w, const float *x, int words, Scale scale, bool within)
{
    for (int k = 0; k < LANES; k++) {
        Lane lane = {scale, w->planes[0][k], w->planes[1][k], w->planes[2][k], w->planes[3][k]};
        uint32_t carry;
        if (words == GROUP) carry = add_16(&lane, x + k, within);
        else carry = pass_on(&lane.eights, pass_on(&lane.fours, add_4(&lane, x + k, within)));
        w->planes[0][k] = lane.ones, w->planes[1][k] = lane.twos;
        w->planes[2][k] = lane.fours, w->planes[3][k] = lane.eights;
        carry = pass_on(&w->planes[4][k], carry);
        carry = pass_on(&w->planes[5][k], carry);
        carry = pass_on(&w->planes[6][k], carry);
        carry = pass_on(&w->planes[7][k], carry);
        w->planes[8][k] ^= carry;
    }
    w->words += words;
}

/* Add the upper half of the lanes to the lower one, which takes one more plane. */
INLINE void halve(uint32_t sums[SUMS][LANES], int n, int half)
{
    for (int k = 0; k < half; k++) {
        uint32_t carry = 0;
        for (int p = 0; p < n; p++) {
            uint32_t plane = sums[p][k];
            carry = add(&plane, sums[p][k + half], carry);
            sums[p][k] = plane;
        }
        sums[n][k] = carry;
    }
}

/* Move what a window has counted to the bins. */
INLINE void read_out(Exponents *e, int window)
{
    Window *w = &e->windows[window];
    uint32_t sums[SUMS][LANES];
    int n = 1, counts[32] = {0}, begin = window_begin(e, window), end = window_end(e, window);
    while (w->words >> n) n++;
    memcpy(sums, w->planes, sizeof w->planes);
    halve(sums, n, 8), halve(sums, n + 1, 4), halve(sums, n + 2, 2), halve(sums, n + 3, 1);
    for (int p = 0; p < n + 4; p++)
        for (int bit = 0; bit < 32; bit++) counts[bit] += (int)(sums[p][0] >> bit & 1) << p;
    for (int bin = begin; bin < end; bin++) e->bins[bin] += counts[bin - begin];
    memset(w->planes, 0, sizeof w->planes);
    w->words = 0;
}

INLINE void clear_window(Exponents *e, int window)
{
    int begin = window_begin(e, window), end = window_end(e, window);
    memset(e->bins + begin, 0, (size_t)(end - begin) * sizeof *e->bins);
    memset(&e->windows[window], 0, sizeof *e->windows);
    e->used |= 1u << window;
}

INLINE void count_words(Exponents *e, int window, const float *x, int n, Scale scale, bool within)
{
    Window *w = &e->windows[window];
    for (int words; n > 0; n -= words * LANES, x += words * LANES) {
        if (w->words + GROUP > MOST_WORDS) read_out(e, window);
        if (n >= GROUP * LANES) {
            add_words(w, x, words = GROUP, scale, within);
        } else if (n >= FEW * LANES) {
            add_words(w, x, words = FEW, scale, within);
        } else {
            float rest[FEW * LANES] = {0};
            memcpy(rest, x, (size_t)n * sizeof *x);
            add_words(w, rest, words = FEW, scale, within);
        }
    }
}

INLINE void count_in_window(Exponents *e, int window, const float *x, int n, const Sizes *sizes)
{
    int begin = window_begin(e, window), end = window_end(e, window);
    Scale scale = {float32((254 - begin) << 23), (begin - 1) * NORMAL, (127 + end - begin) << 23};
    bool within = sizes->finite && sizes->largest >> 23 < end && (sizes->smallest >> 23) + 126 >= begin;
    if (!(e->used >> window & 1)) clear_window(e, window);
    if (within) count_words(e, window, x, n, scale, true);
    else count_words(e, window, x, n, scale, false);
}

/* ---- elements ---- */

INLINE void count_singly(Exponents *e, const float *x, int n)
{
    if (!e->singly) memset(e->singles, 0, sizeof e->singles);
    e->singly = true;
    int i = 0;
    for (; i + COPIES <= n; i += COPIES)
        for (int k = 0; k < COPIES; k++) e->singles[k][bits32(x[i + k]) >> 23 & 255]++;
    for (; i < n; i++) e->singles[0][bits32(x[i]) >> 23 & 255]++;
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

/* The bins of a contribution whose moments are known. Elements that have no exponent, but are not zero, are what is left
   when all others have been counted. */
INLINE void end_exponents(Exponents *e, Contribution *c)
{
    int begin = BINS, end = 1;
    for (int window = 0; window < WINDOWS && window_begin(e, window) < BINS; window++) {
        if (!(e->used >> window & 1)) {
            if (!e->singly) continue;
            clear_window(e, window);
        }
        read_out(e, window);
        int from = window_begin(e, window);
        if (begin == BINS) begin = from;
        else memset(c->bins + end, 0, (size_t)(from - end) * sizeof *c->bins);
        end = window_end(e, window);
    }
    if (e->singly)
        for (int bin = 1; bin < BINS; bin++)
            for (int k = 0; k < COPIES; k++) c->bins[bin] += e->singles[k][bin];
    while (begin < end && !c->bins[begin]) begin++;
    while (begin < end && !c->bins[end - 1]) end--;
    int64_t subnormal = finite_count(&c->moments) - c->moments.zeros;
    for (int bin = begin; bin < end; bin++) subnormal -= c->bins[bin];
    if (subnormal) {
        if (begin > 1) memset(c->bins, 0, ((size_t)begin < BINS ? begin : 1) * sizeof *c->bins);
        if (begin == BINS) end = 1;
        begin = 0, c->bins[0] = subnormal;
    }
    c->first = begin, c->last = end - 1;
}
#endif
