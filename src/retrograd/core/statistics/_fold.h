/* What the elements of one tensor add to a row. */
#ifndef RETROGRAD_FOLD_H
#define RETROGRAD_FOLD_H

#include <stdbool.h>

#include "_elements.h"

enum { BINS = 255 };

/* The columns of a row (see row.py); min and max are +inf and -inf while there is no finite element. */
typedef struct {
    int64_t count, nan, pos_inf, neg_inf, zeros;
    double sum, m2, abs_sum, min, max;
} Moments;

typedef struct {
    Moments moments;
    int first, last; /* used bins, all others may hold anything; first > last when there are none */
    int64_t bins[BINS];
} Contribution;

extern const Moments NO_MOMENTS;

/* Merge `part` into `whole` (Chan et al. 1979). */
void merge_moments(Moments *whole, const Moments *part);

/* Read all elements once. */
void fold(const Elements *elements, bool histogram, Contribution *out);

/* What is known of both sides of a difference a - b: the sum of the squares of b's finite elements, and of each the sum
   of the eight-byte words that its bits are. */
typedef struct {
    double reference;
    uint64_t bits_of_a, bits_of_b;
} Sides;

/* The same of the differences a - b. Both must have the same kind, sizes and strides. */
void fold_difference(const Elements *a, const Elements *b, bool histogram, Contribution *out, Sides *sides);

/* The sum of the eight-byte words that the bits of all elements are. */
uint64_t sum_bits(const Elements *elements);

/* The sum of the squares of all elements, of a floating-point kind. */
double sum_squares(const Elements *elements);

#endif
