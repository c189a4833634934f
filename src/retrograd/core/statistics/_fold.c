/* One pass over the elements of a tensor: counts, moments, extremes and binary exponents. */

#include "_fold.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#else
#define INLINE static inline
#define NOINLINE
#endif

const Moments NO_MOMENTS = {0, 0, 0, 0, 0, 0.0, 0.0, 0.0, (double)INFINITY, -(double)INFINITY};

static int64_t finite_count(const Moments *m) { return m->count - m->nan - m->pos_inf - m->neg_inf; }

void merge_moments(Moments *whole, const Moments *part)
{
    int64_t n = finite_count(whole), k = finite_count(part);
    if (n > 0 && k > 0) {
        double apart = part->sum / k - whole->sum / n;
        whole->m2 += apart * apart * ((double)n * (double)k / (double)(n + k));
    }
    whole->m2 += part->m2;
    whole->count += part->count;
    whole->nan += part->nan;
    whole->pos_inf += part->pos_inf;
    whole->neg_inf += part->neg_inf;
    whole->zeros += part->zeros;
    whole->sum += part->sum;
    whole->abs_sum += part->abs_sum;
    if (k > 0 && (n == 0 || part->min < whole->min)) whole->min = part->min;
    if (k > 0 && (n == 0 || part->max > whole->max)) whole->max = part->max;
}

#define FLOAT32_INF 0x7f800000
#define FLOAT64_INF 0x7ff0000000000000

INLINE int32_t bits32(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE int64_t bits64(double value) { int64_t bits; memcpy(&bits, &value, 8); return bits; }
INLINE float float32(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

#include "_exponents.h"
#include "_moments.h"

/* ---- kinds ---- */

static bool is_wide(Kind kind) { return kind == FLOAT64 || kind == INT32 || kind == INT64; }

INLINE float from_float16(uint16_t half)
{
    int32_t magnitude = (half & 0x7fff) << 13, sign = (half >> 15) * INT32_MIN;
    int32_t normal = magnitude + (112 << 23), special = magnitude + (224 << 23);
    int32_t tiny = bits32(float32(magnitude + (113 << 23)) - float32(113 << 23));
    return float32(sign | (magnitude < 1 << 23 ? tiny : magnitude < 31 << 23 ? normal : special));
}

INLINE const float *to_float32(const void *block, Kind kind, int n, float *room)
{
    const uint16_t *halves = block;
    switch (kind) {
    case FLOAT32: return block;
    case FLOAT16: for (int i = 0; i < n; i++) room[i] = from_float16(halves[i]); break;
    case BFLOAT16: for (int i = 0; i < n; i++) room[i] = float32((int32_t)((uint32_t)halves[i] << 16)); break;
    case INT8: for (int i = 0; i < n; i++) room[i] = ((const int8_t *)block)[i]; break;
    case INT16: for (int i = 0; i < n; i++) room[i] = ((const int16_t *)block)[i]; break;
    default: for (int i = 0; i < n; i++) room[i] = ((const uint8_t *)block)[i]; break;
    }
    return room;
}

INLINE const double *to_float64(const void *block, Kind kind, int n, double *room)
{
    switch (kind) {
    case FLOAT64: return block;
    case INT32: for (int i = 0; i < n; i++) room[i] = ((const int32_t *)block)[i]; break;
    default: for (int i = 0; i < n; i++) room[i] = (double)((const int64_t *)block)[i]; break;
    }
    return room;
}

/* Numbers with the exponents that float32 has for these, or the nearest ones that it has. */
INLINE void powers64(const double *x, int n, float *out)
{
    for (int i = 0; i < n; i++) {
        int64_t stored = bits64(x[i]) >> 52 & 0x7ff, exponent = stored - 1023 + 127;
        exponent = exponent < 0 ? 0 : exponent < 255 ? exponent : 254;
        out[i] = float32((int32_t)(stored == 0x7ff ? 255 : exponent) << 23);
    }
}

/* ---- bits ---- */

INLINE uint64_t sum_words(const void *block, int bytes)
{
    const char *at = block;
    uint64_t sum = 0, word, rest = 0;
    int whole = bytes & ~7;
    for (int i = 0; i < whole; i += 8) {
        memcpy(&word, at + i, 8);
        sum += word;
    }
    memcpy(&rest, at + whole, (size_t)(bytes - whole));
    return sum + rest;
}

FOR_EACH_CPU uint64_t sum_bits(const Elements *e)
{
    double gathered[BLOCK];
    uint64_t sum = 0;
    int n;
    Cursor cursor = start(e);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        sum += sum_words(block, n * ITEM_SIZE[e->kind]);
    }
    return sum;
}

/* ---- squares ---- */

#define LANES 8

INLINE double squares32(const float *x, int n)
{
    double parts[LANES] = {0}, sum = 0;
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++) parts[k] += (double)x[i + k] * (double)x[i + k];
    for (int i = whole; i < n; i++) sum += (double)x[i] * (double)x[i];
    for (int k = 0; k < LANES; k++) sum += parts[k];
    return sum;
}

INLINE double squares64(const double *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

FOR_EACH_CPU double sum_squares(const Elements *e)
{
    float room[BLOCK];
    double gathered[BLOCK], sum = 0;
    int n;
    Cursor cursor = start(e);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        sum += e->kind == FLOAT64 ? squares64(block, n) : squares32(to_float32(block, e->kind, n, room), n);
    }
    return sum * (double)e->repeats;
}

/* ---- tensors ---- */

/* Elements of e, or of e - minus. */
INLINE void fold32(const Elements *e, const Elements *minus, bool histogram, Contribution *out, Sides *sides)
{
    float room[BLOCK], gathered[BLOCK], other_room[BLOCK], other_gathered[BLOCK];
    Exponents exponents;
    Sizes sizes;
    int n;
    Cursor cursor = start(e), other = start(minus ? minus : e);
    Run run = begin_run(0, 0);
    if (histogram) begin_exponents(&exponents, out->bins);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        const float *x = to_float32(block, e->kind, n, room);
        if (minus) {
            sides->bits_of_a += sum_words(block, n * ITEM_SIZE[e->kind]);
            block = next_block(&other, other_gathered, &n);
            sides->bits_of_b += sum_words(block, n * ITEM_SIZE[e->kind]);
            const float *y = to_float32(block, e->kind, n, other_room);
            sides->reference += subtract32(x, y, n, room);
            x = room;
        }
        add_float32(&run, x, n, histogram ? exponents.small : 1, &sizes, &out->moments);
        if (histogram) count_exponents(&exponents, x, n, &sizes);
    }
    end_run(&run, &out->moments);
    if (histogram) end_exponents(&exponents, out);
}

INLINE void fold64(const Elements *e, const Elements *minus, bool histogram, Contribution *out, Sides *sides)
{
    double room[BLOCK], gathered[BLOCK], other_room[BLOCK], other_gathered[BLOCK];
    float powers[BLOCK];
    Exponents exponents;
    int n;
    Cursor cursor = start(e), other = start(minus ? minus : e);
    if (histogram) begin_exponents(&exponents, out->bins);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        const double *x = to_float64(block, e->kind, n, room);
        if (minus) {
            sides->bits_of_a += sum_words(block, n * ITEM_SIZE[e->kind]);
            block = next_block(&other, other_gathered, &n);
            sides->bits_of_b += sum_words(block, n * ITEM_SIZE[e->kind]);
            const double *y = to_float64(block, e->kind, n, other_room);
            sides->reference += finite_squares64(y, n);
            for (int i = 0; i < n; i++) room[i] = x[i] - y[i];
            x = room;
        }
        if (histogram) {
            powers64(x, n, powers);
            Sizes sizes = look_at(powers, n);
            count_exponents(&exponents, powers, n, &sizes);
        }
        Moments part = moments64(x, n, room);
        merge_moments(&out->moments, &part);
    }
    if (histogram) end_exponents(&exponents, out);
}

static void begin(Contribution *c)
{
    c->moments = NO_MOMENTS;
    c->first = BINS, c->last = -1;
}

static void repeat(Contribution *c, int64_t times)
{
    if (times == 1) return;
    Moments *m = &c->moments;
    m->count *= times, m->nan *= times, m->pos_inf *= times, m->neg_inf *= times, m->zeros *= times;
    m->sum *= (double)times, m->m2 *= (double)times, m->abs_sum *= (double)times;
    for (int bin = c->first; bin <= c->last; bin++) c->bins[bin] *= times;
}

FOR_EACH_CPU void fold(const Elements *e, bool histogram, Contribution *out)
{
    begin(out);
    if (is_wide(e->kind)) fold64(e, NULL, histogram, out, NULL);
    else fold32(e, NULL, histogram, out, NULL);
    repeat(out, e->repeats);
}

FOR_EACH_CPU void fold_difference(const Elements *a, const Elements *b, bool histogram, Contribution *out, Sides *sides)
{
    begin(out);
    *sides = (Sides){0};
    if (is_wide(a->kind)) fold64(a, b, histogram, out, sides);
    else fold32(a, b, histogram, out, sides);
    sides->reference *= (double)a->repeats;
    repeat(out, a->repeats);
}
