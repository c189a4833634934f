/* Counting binary exponents, as the eight bits that float32 stores. Included by _fold.c alone, which compiles it
   for several processors.

   A counter that is increased twice in a row has to wait for itself, and a tensor has few exponents. So they are
   counted in pairs: one counter for each pair of neighbours halves the increments and spreads them. */
#ifndef RETROGRAD_EXPONENTS_H
#define RETROGRAD_EXPONENTS_H

enum {
    NO_EXPONENT = 255, /* of NaN and the infinities */
    WINDOW = 64,       /* exponents that are counted in pairs: 0, and those next above the floor */
    HEADROOM = 8,      /* by how much later blocks may exceed the first one and stay in the window */
};

static const int64_t FEW = 8192, MANY = 1ll << 32; /* elements between which pairs pay, and can't overflow */

typedef struct {
    int lowest, highest; /* of the exponents other than 0 */
    int floor;           /* of the window; negative while nothing is counted in pairs */
    uint64_t single[4][256];
    uint32_t pairs[2][WINDOW * WINDOW]; /* by the second and the first exponent of the pair, above the floor */
} Exponents;

INLINE void begin_exponents(Exponents *e)
{
    e->lowest = NO_EXPONENT, e->highest = 0, e->floor = -1;
    memset(e->single, 0, sizeof e->single);
}

INLINE void open_window(Exponents *e, int highest)
{
    int top = highest + HEADROOM < NO_EXPONENT ? highest + HEADROOM : NO_EXPONENT - 1;
    e->floor = top < WINDOW ? 0 : top - (WINDOW - 1);
    memset(e->pairs, 0, sizeof e->pairs);
}

INLINE void count_singly(Exponents *e, const uint8_t *exponents, int n)
{
    int i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++) e->single[k][exponents[i + k]]++;
    for (; i < n; i++) e->single[0][exponents[i]]++;
}

INLINE void count_pairs(Exponents *e, const uint8_t *exponents)
{
    uint8_t places[BLOCK], floor = (uint8_t)e->floor;
    uint16_t pairs[BLOCK / 2];
    for (int i = 0; i < BLOCK; i++) places[i] = exponents[i] > floor ? (uint8_t)(exponents[i] - floor) : 0;
    memcpy(pairs, places, sizeof pairs);
    for (int i = 0; i < BLOCK / 2; i++) pairs[i] = (uint16_t)((pairs[i] & 0x3f) | (pairs[i] >> 2 & 0xfc0));
    for (int i = 0; i < BLOCK / 2; i += 4)
        for (int k = 0; k < 4; k++) e->pairs[k & 1][pairs[i + k]]++;
}

/* Count a block of a tensor that has `total` elements. */
INLINE void count_exponents(Exponents *e, const uint8_t *exponents, int n, int64_t total)
{
    uint8_t smallest = 255, before_lowest = 255, highest = 0;
#pragma omp simd reduction(min : smallest, before_lowest) reduction(max : highest)
    for (int i = 0; i < n; i++) {
        uint8_t exponent = exponents[i], before = (uint8_t)(exponent - 1); /* of 0 that is 255, never the lowest */
        smallest = exponent < smallest ? exponent : smallest;
        before_lowest = before < before_lowest ? before : before_lowest;
        highest = exponent > highest ? exponent : highest;
    }
    if (highest > e->highest) e->highest = highest;
    if (before_lowest + 1 < e->lowest) e->lowest = before_lowest + 1;
    if (smallest == highest) {
        e->single[0][highest] += n;
        return;
    }
    if (e->floor < 0 && total > FEW && total < MANY && highest < NO_EXPONENT) open_window(e, highest);
    if (n == BLOCK && e->floor >= 0 && before_lowest >= e->floor && highest < e->floor + WINDOW)
        count_pairs(e, exponents);
    else
        count_singly(e, exponents, n);
}

/* Turn counts of pairs into counts of exponents; place 0 of a window stands for exponent 0. */
INLINE void unfold_pairs(Exponents *e)
{
    uint32_t firsts[WINDOW] = {0}, seconds[WINDOW] = {0};
    for (int second = 0; second < WINDOW; second++) {
        const uint32_t *even = e->pairs[0] + second * WINDOW, *odd = e->pairs[1] + second * WINDOW;
        uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int first = 0; first < WINDOW; first++) {
            uint32_t count = even[first] + odd[first];
            firsts[first] += count;
            sum += count;
        }
        seconds[second] = sum;
    }
    for (int place = 0; place < WINDOW; place++) {
        e->single[0][place ? e->floor + place : 0] += firsts[place];
        e->single[1][place ? e->floor + place : 0] += seconds[place];
    }
}

INLINE int64_t singles(const Exponents *e, int exponent)
{
    return (int64_t)(e->single[0][exponent] + e->single[1][exponent] + e->single[2][exponent] + e->single[3][exponent]);
}

/* The bins of a contribution whose zeros are known: they have exponent 0, as only subnormal numbers should. */
INLINE void end_exponents(Exponents *e, Contribution *c)
{
    if (e->floor >= 0) unfold_pairs(e);
    int64_t subnormal = singles(e, 0) - c->moments.zeros;
    for (int bin = subnormal ? 0 : e->lowest; bin < BINS && bin <= e->highest; bin++) {
        int64_t count = bin ? singles(e, bin) : subnormal;
        c->bins[bin] = count;
        if (count > 0 && c->first > bin) c->first = bin;
        if (count > 0) c->last = bin;
    }
}
#endif
