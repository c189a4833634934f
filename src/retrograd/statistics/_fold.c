/* One pass over the elements of a tensor: counts, moments, extremes and binary exponents.

   A block is summed in float32, as deviations from a pivot that lies near the mean, and blocks are added up in
   float64. A block for which float32 is not good enough (non-finite elements, squares out of range, a pivot far
   off) is read again in float64, and its mean is the next pivot. Scaling by powers of two keeps squares in range.

   Compiled with -ffinite-math-only, so that loops vectorise: non-finite elements are found by their bits, and what
   was summed over a block that has one is thrown away. */

#include "_fold.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#include "_exponents.h"

#define FLOAT32_INF 0x7f800000
#define FLOAT64_INF 0x7ff0000000000000
#define SQUARE_MIN 1e-11f /* between these, squares of what float32 can tell apart stay normal numbers */
#define SQUARE_MAX 1e17f
#define LARGEST_ADDED 0x79800000 /* 2^116, of which a block can be added up */

const Moments NO_MOMENTS = {0, 0, 0, 0, 0, 0.0, 0.0, 0.0, (double)INFINITY, -(double)INFINITY};

INLINE int32_t bits32(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE int64_t bits64(double value) { int64_t bits; memcpy(&bits, &value, 8); return bits; }
INLINE float float32(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

/* ---- moments ---- */

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

/* ---- a block in float64 ---- */

/* Count the non-finite elements and move the finite ones together; returns how many these are. */
static int sort_out(const double *x, int n, double *finite, Moments *m)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        int64_t bits = bits64(x[i]), magnitude = bits & INT64_MAX;
        if (magnitude < FLOAT64_INF) finite[kept++] = x[i];
        else if (magnitude > FLOAT64_INF) m->nan++;
        else if (bits > 0) m->pos_inf++;
        else m->neg_inf++;
    }
    return kept;
}

/* `room` may be `x`. */
INLINE Moments moments64(const double *x, int n, double *room)
{
    Moments m = NO_MOMENTS;
    int64_t largest = 0, zeros = 0;
    m.count = n;
#pragma omp simd reduction(max : largest) reduction(+ : zeros)
    for (int i = 0; i < n; i++) {
        int64_t magnitude = bits64(x[i]) & INT64_MAX;
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
    }
    m.zeros = zeros;
    if (largest >= FLOAT64_INF) {
        n = sort_out(x, n, room, &m);
        x = room;
    }
    if (n == 0) return m;

    double sum = 0, abs_sum = 0, low = DBL_MAX, high = -DBL_MAX, rest = 0, squares = 0;
#pragma omp simd reduction(+ : sum, abs_sum) reduction(min : low) reduction(max : high)
    for (int i = 0; i < n; i++) {
        sum += x[i];
        abs_sum += fabs(x[i]);
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    double mean = sum / n;
#pragma omp simd reduction(+ : rest, squares)
    for (int i = 0; i < n; i++) {
        double d = x[i] - mean;
        rest += d;
        squares += d * d;
    }
    m.sum = sum + rest, m.m2 = squares - rest * rest / n, m.abs_sum = abs_sum, m.min = low, m.max = high;
    return m;
}

/* ---- blocks in float32 ---- */

/* Blocks that were summed with one scale and one pivot. */
typedef struct {
    float scale, pivot; /* a power of two, so that scaling is exact; near the scaled mean */
    int64_t n, zeros;
    float min, max;
    double abs_sum, sum, squares; /* the last two of scaled deviations from the pivot */
} Run;

/* For blocks like one with this mean and this largest magnitude. */
INLINE Run begin_run(double mean, double largest)
{
    int exponent = 0;
    frexp(largest, &exponent);
    if (exponent > -24 && exponent < 24) exponent = 0;
    float scale = ldexpf(1, exponent < -120 ? 120 : -exponent);
    return (Run){.scale = scale, .pivot = (float)(mean * scale), .min = FLT_MAX, .max = -FLT_MAX};
}

INLINE void end_run(const Run *run, Moments *m)
{
    if (run->n == 0) return;
    double n = (double)run->n, m2 = run->squares - run->sum * run->sum / n, unit = 1.0 / run->scale;
    Moments part = {.count = run->n, .zeros = run->zeros, .sum = (n * run->pivot + run->sum) * unit,
                    .m2 = m2 > 0 ? m2 * unit * unit : 0, .abs_sum = run->abs_sum, .min = run->min, .max = run->max};
    merge_moments(m, &part);
}

/* Add a block to a run, or return false where float32 is not good enough for it. */
INLINE bool add_block(Run *run, const float *x, int n)
{
    float scale = run->scale, pivot = run->pivot, sum = 0, squares = 0, abs_sum = 0, low = run->min, high = run->max;
    int32_t largest = 0, zeros = 0;
#pragma omp simd reduction(+ : sum, squares, abs_sum, zeros) reduction(min : low) reduction(max : high, largest)
    for (int i = 0; i < n; i++) {
        float v = x[i], d = v * scale - pivot;
        int32_t magnitude = bits32(v) & INT32_MAX;
        sum += d;
        squares += d * d;
        abs_sum += float32(magnitude);
        low = v < low ? v : low;
        high = v > high ? v : high;
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
    }
    if (largest >= LARGEST_ADDED) return false;
    float scaled = float32(largest) * scale;
    if (largest != 0 && (scaled < SQUARE_MIN || scaled > SQUARE_MAX)) return false;
    if ((double)sum * sum > 0.8 * n * squares) return false; /* the pivot is more than 2 standard deviations off */
    run->n += n, run->zeros += zeros, run->min = low, run->max = high;
    run->abs_sum += abs_sum, run->sum += sum, run->squares += squares;
    return true;
}

INLINE void add_float32(Run *run, const float *x, int n, Moments *m)
{
    if (add_block(run, x, n)) return;
    double wide[BLOCK];
    for (int i = 0; i < n; i++) wide[i] = x[i];
    Moments block = moments64(wide, n, wide);
    end_run(run, m);
    merge_moments(m, &block);
    int64_t finite = finite_count(&block);
    if (finite > 0) *run = begin_run(block.sum / (double)finite, fmax(-block.min, block.max));
    else *run = begin_run(0, 0);
}

/* ---- kinds ---- */

static bool is_wide(Kind kind) { return kind == FLOAT64 || kind == INT32 || kind == INT64; }

INLINE float from_float16(uint16_t half)
{
    int32_t magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
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

INLINE void exponents32(const float *x, int n, uint8_t *out)
{
    for (int i = 0; i < n; i++) out[i] = (uint8_t)(bits32(x[i]) >> 23);
}

INLINE void exponents64(const double *x, int n, uint8_t *out)
{
    for (int i = 0; i < n; i++) {
        int64_t stored = bits64(x[i]) >> 52 & 0x7ff, exponent = stored - 1023 + 127;
        exponent = exponent < 0 ? 0 : exponent < NO_EXPONENT ? exponent : NO_EXPONENT - 1;
        out[i] = (uint8_t)(stored == 0x7ff ? NO_EXPONENT : exponent);
    }
}

/* ---- updates ---- */

INLINE double finite_squares32(const float *x, int n)
{
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) {
        double v = (bits32(x[i]) & INT32_MAX) < FLOAT32_INF ? x[i] : 0.0;
        squares += v * v;
    }
    return squares;
}

INLINE double finite_squares64(const double *x, int n)
{
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) {
        double v = (bits64(x[i]) & INT64_MAX) < FLOAT64_INF ? x[i] : 0.0;
        squares += v * v;
    }
    return squares;
}

/* ---- tensors ---- */

/* Elements of e, or of e - minus. */
INLINE void fold32(const Elements *e, const Elements *minus, bool histogram, Contribution *out, double *reference)
{
    float room[BLOCK], gathered[BLOCK], other_room[BLOCK], other_gathered[BLOCK];
    uint8_t codes[BLOCK];
    Exponents exponents;
    int n;
    Cursor cursor = start(e), other = start(minus ? minus : e);
    Run run = begin_run(0, 0);
    int64_t total = cursor.left;
    if (histogram) begin_exponents(&exponents);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        const float *x = to_float32(block, e->kind, n, room);
        if (minus) {
            block = next_block(&other, other_gathered, &n);
            const float *y = to_float32(block, e->kind, n, other_room);
            *reference += finite_squares32(y, n);
            for (int i = 0; i < n; i++) room[i] = x[i] - y[i];
            x = room;
        }
        add_float32(&run, x, n, &out->moments);
        if (histogram) {
            exponents32(x, n, codes);
            count_exponents(&exponents, codes, n, total);
        }
    }
    end_run(&run, &out->moments);
    if (histogram) end_exponents(&exponents, out);
}

INLINE void fold64(const Elements *e, const Elements *minus, bool histogram, Contribution *out, double *reference)
{
    double room[BLOCK], gathered[BLOCK], other_room[BLOCK], other_gathered[BLOCK];
    uint8_t codes[BLOCK];
    Exponents exponents;
    int n;
    Cursor cursor = start(e), other = start(minus ? minus : e);
    int64_t total = cursor.left;
    if (histogram) begin_exponents(&exponents);
    while (cursor.left > 0) {
        const void *block = next_block(&cursor, gathered, &n);
        const double *x = to_float64(block, e->kind, n, room);
        if (minus) {
            block = next_block(&other, other_gathered, &n);
            const double *y = to_float64(block, e->kind, n, other_room);
            *reference += finite_squares64(y, n);
            for (int i = 0; i < n; i++) room[i] = x[i] - y[i];
            x = room;
        }
        if (histogram) {
            exponents64(x, n, codes);
            count_exponents(&exponents, codes, n, total);
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

FOR_EACH_CPU void fold_difference(const Elements *a, const Elements *b, bool histogram, Contribution *out,
                                  double *reference)
{
    begin(out);
    *reference = 0;
    if (is_wide(a->kind)) fold64(a, b, histogram, out, reference);
    else fold32(a, b, histogram, out, reference);
    *reference *= (double)a->repeats;
    repeat(out, a->repeats);
}
