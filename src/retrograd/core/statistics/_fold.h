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

/* The same of the differences a - b; `reference` becomes the sum of the squares of b's finite elements.
   Both must have the same kind, sizes and strides. */
void fold_difference(const Elements *a, const Elements *b, bool histogram, Contribution *out, double *reference);

#endif
