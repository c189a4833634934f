/* The elements of a tensor in memory, and how to walk them block by block. */
#ifndef RETROGRAD_ELEMENTS_H
#define RETROGRAD_ELEMENTS_H

#include <stdint.h>

enum {
    MAX_DIMS = 64,
    BLOCK = 512, /* elements; what is read at once stays in the first-level cache */
};

typedef enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, BOOL, UINT8, INT8, INT16, INT32, INT64, KINDS } Kind;

extern const int ITEM_SIZE[KINDS];

/* Each element that is named here stands for `repeats` equal ones: the tensor was expanded. */
typedef struct {
    const char *data;
    Kind kind;
    int n_dims;
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS]; /* in elements */
    int64_t repeats;
} Elements;

/* Sort dimensions by stride and join those that are dense together; those of stride 0 become repeats. */
void arrange(Elements *elements);

typedef struct {
    const Elements *of;
    const char *at;
    int64_t index[MAX_DIMS];
    int64_t left;
} Cursor;

Cursor start(const Elements *of);

/* The next up to BLOCK elements, `n` of them: in place where they are dense, else gathered into `room`. */
const void *next_block(Cursor *cursor, void *room, int *n);

#endif
