/* Sums over blocks of elements. Included by _fold.c alone, which compiles it for several processors.

   A block is summed in float32, as deviations from a pivot that lies near the mean, and blocks are added up in
   float64. A block for which float32 is not good enough (non-finite elements, squares out of range, a pivot far
   off) is read again in float64, and its mean is the next pivot. Scaling by powers of two keeps squares in range. */
#ifndef RETROGRAD_MOMENTS_H
#define RETROGRAD_MOMENTS_H

#define SQUARE_MIN 1e-11f /* between these, squares of what float32 can tell apart stay normal numbers */
#define SQUARE_MAX 1e17f
#define LARGEST_ADDED 0x79800000 /* 2^116, of which a block can be added up */

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

#if defined(__GNUC__)
typedef float Sum; /* one in each of 4 to 16 lanes, so that none has more than 128 terms */
#else
typedef double Sum; /* loops may stay scalar */
#endif

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

/* Add a block to a run, or return false where float32 is not good enough for it. Tells how large its elements are: where
   none is smaller than `small`, that stands for the smallest. If `small` is 1, only zeros are told. */
INLINE bool add_block(Run *run, const float *x, int n, int32_t small, Sizes *sizes)
{
    float scale = run->scale, pivot = run->pivot, low = run->min, high = run->max;
    Sum sum = 0, squares = 0, abs_sum = 0;
    int32_t largest = 0, smaller = 0;
#pragma omp simd reduction(+ : sum, squares, abs_sum, smaller) reduction(min : low) reduction(max : high, largest)
    for (int i = 0; i < n; i++) {
        float v = x[i], d = v * scale - pivot;
        int32_t magnitude = bits32(v) & INT32_MAX;
        sum += d;
        squares += d * d;
        abs_sum += float32(magnitude);
        low = v < low ? v : low;
        high = v > high ? v : high;
        largest = magnitude > largest ? magnitude : largest;
        smaller += magnitude < small;
    }
    if (small > 1 && largest >= FLOAT32_INF) *sizes = look_at(x, n);
    else if (small > 1 && smaller) *sizes = look_below(x, n, largest);
    else *sizes = (Sizes){smaller, small, largest, true};
    if (largest >= LARGEST_ADDED) return false;
    float scaled = float32(largest) * scale;
    if (largest != 0 && (scaled < SQUARE_MIN || scaled > SQUARE_MAX)) return false;
    if ((double)sum * sum > 0.8 * n * squares) return false; /* the pivot is more than 2 standard deviations off */
    run->n += n, run->zeros += sizes->zeros, run->min = low, run->max = high;
    run->abs_sum += abs_sum, run->sum += sum, run->squares += squares;
    return true;
}

INLINE void add_float32(Run *run, const float *x, int n, int32_t small, Sizes *sizes, Moments *m)
{
    if (add_block(run, x, n, small, sizes)) return;
    double wide[BLOCK];
    for (int i = 0; i < n; i++) wide[i] = x[i];
    Moments block = moments64(wide, n, wide);
    end_run(run, m);
    merge_moments(m, &block);
    int64_t finite = finite_count(&block);
    if (finite > 0) *run = begin_run(block.sum / (double)finite, fmax(-block.min, block.max));
    else *run = begin_run(0, 0);
}

/* ---- what an update was added to ---- */

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

/* Put x - y into `out`, which may be `x`; returns the sum of the squares of the finite y. */
INLINE double subtract32(const float *x, const float *y, int n, float *out)
{
    Sum squares = 0;
    int32_t largest = 0;
#pragma omp simd reduction(+ : squares) reduction(max : largest)
    for (int i = 0; i < n; i++) {
        float v = y[i];
        int32_t magnitude = bits32(v) & INT32_MAX;
        out[i] = x[i] - v;
        squares += v * v;
        largest = magnitude > largest ? magnitude : largest;
    }
    bool fits = largest == 0 || (float32(largest) >= SQUARE_MIN && float32(largest) <= SQUARE_MAX);
    return fits ? (double)squares : finite_squares32(y, n);
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

#endif
