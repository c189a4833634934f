/* Counting binary exponents, as the eight bits that float32 stores. Included by _fold.c alone, which compiles it
   for several processors.

   A tensor has few exponents. So a block is compared with each of them, many elements at once, and what is alike is added
   up in as many counters of one byte. A short block, or one of many exponents, is counted one by one. All of these small
   counters are emptied before they overflow. */
#ifndef RETROGRAD_EXPONENTS_H
#define RETROGRAD_EXPONENTS_H

enum {
    NO_EXPONENT = 255, /* of NaN and the infinities */
    LANES = 64,        /* elements that are compared at once */
    SHORT = 192,       /* elements */
    MANY = 32,         /* exponents */
    COPIES = 4,        /* of what counts one by one: a counter that is increased twice in a row has to wait for itself */
    MOST_BLOCKS = 255 / (BLOCK / LANES),
};

#if defined(__GNUC__)
typedef uint8_t Lanes __attribute__((vector_size(LANES)));
#else
typedef struct { uint8_t each[LANES]; } Lanes;
#endif

/* What lies between the lowest and the highest exponent is in use, and place 0; the rest is never cleared. */
typedef struct {
    int lowest, highest; /* of the exponents other than 0 */
    int blocks;          /* in the small counters */
    Lanes lanes[256];
    uint16_t singles[COPIES][256];
    int64_t counts[256];
} Exponents;

INLINE void clear_exponents(Exponents *e, int from, int to)
{
    if (to < from) return;
    size_t places = (size_t)(to - from + 1);
    for (int k = 0; k < COPIES; k++) memset(e->singles[k] + from, 0, places * sizeof **e->singles);
    memset(e->counts + from, 0, places * sizeof *e->counts);
    memset(e->lanes + from, 0, places * sizeof *e->lanes);
}

INLINE void begin_exponents(Exponents *e)
{
    e->lowest = NO_EXPONENT + 1, e->highest = 0, e->blocks = 0;
    clear_exponents(e, 0, 0);
}

/* Take these exponents into use, if there are any: the highest is 0 if not. */
INLINE void widen(Exponents *e, int lowest, int highest)
{
    if (!highest) return;
    if (!e->highest) {
        clear_exponents(e, lowest, highest);
        e->lowest = lowest, e->highest = highest;
        return;
    }
    clear_exponents(e, lowest, e->lowest - 1);
    clear_exponents(e, e->highest + 1, highest);
    if (lowest < e->lowest) e->lowest = lowest;
    if (highest > e->highest) e->highest = highest;
}

INLINE void count_singly(Exponents *e, const uint8_t *exponents, int n)
{
    int i = 0;
    for (; i + COPIES <= n; i += COPIES)
        for (int k = 0; k < COPIES; k++) e->singles[k][exponents[i + k]]++;
    for (; i < n; i++) e->singles[0][exponents[i]]++;
}

/* Count, of a number of elements that lanes divide, those that have one exponent. */
INLINE void count_alike(Exponents *e, const uint8_t *exponents, int n, int exponent)
{
#if defined(__GNUC__)
    Lanes sum = e->lanes[exponent], wanted = (Lanes){0} + (uint8_t)exponent, these;
    for (int i = 0; i < n; i += LANES) {
        memcpy(&these, exponents + i, LANES);
        sum -= (Lanes)(these == wanted); /* which is -1 where they are alike */
    }
    e->lanes[exponent] = sum;
#else
    for (int i = 0; i < n; i++) e->counts[exponent] += exponents[i] == exponent;
#endif
}

INLINE void empty_counters(Exponents *e, int exponent)
{
    uint8_t lanes[LANES];
    int sum = 0;
    memcpy(lanes, &e->lanes[exponent], LANES);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    for (int k = 0; k < COPIES; k++) sum += e->singles[k][exponent], e->singles[k][exponent] = 0;
    e->counts[exponent] += sum;
    memset(&e->lanes[exponent], 0, LANES);
}

INLINE void empty_all(Exponents *e)
{
    empty_counters(e, 0);
    for (int exponent = e->lowest; exponent <= e->highest; exponent++) empty_counters(e, exponent);
    e->blocks = 0;
}

/* Count a block. */
INLINE void count_exponents(Exponents *e, const uint8_t *exponents, int n)
{
    uint8_t smallest = 255, before_lowest = 255, highest = 0;
#pragma omp simd reduction(min : smallest, before_lowest) reduction(max : highest)
    for (int i = 0; i < n; i++) {
        uint8_t exponent = exponents[i], before = (uint8_t)(exponent - 1); /* of 0 that is 255, never the lowest */
        smallest = exponent < smallest ? exponent : smallest;
        before_lowest = before < before_lowest ? before : before_lowest;
        highest = exponent > highest ? exponent : highest;
    }
    int lowest = before_lowest + 1;
    widen(e, lowest, highest);
    if (smallest == highest) {
        e->counts[highest] += n;
        return;
    }
    if (e->blocks == MOST_BLOCKS) empty_all(e);
    e->blocks++;
    int whole = n > SHORT && highest - lowest < MANY ? n / LANES * LANES : 0;
    if (whole) {
        if (!smallest) count_alike(e, exponents, whole, 0);
        for (int exponent = lowest; exponent <= highest; exponent++) count_alike(e, exponents, whole, exponent);
    }
    count_singly(e, exponents + whole, n - whole);
}

/* The bins of a contribution whose zeros are known: they have exponent 0, as only subnormal numbers should. */
INLINE void end_exponents(Exponents *e, Contribution *c)
{
    empty_all(e);
    int64_t subnormal = e->counts[0] - c->moments.zeros;
    for (int bin = subnormal ? 0 : e->lowest; bin < BINS && bin <= e->highest; bin++) {
        int64_t count = !bin ? subnormal : bin < e->lowest ? 0 : e->counts[bin];
        c->bins[bin] = count;
        if (count > 0 && c->first > bin) c->first = bin;
        if (count > 0) c->last = bin;
    }
}
#endif
