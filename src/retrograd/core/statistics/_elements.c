/* Walking memory by sizes and strides. */

#include "_elements.h"

#include <string.h>

const int ITEM_SIZE[KINDS] = {4, 8, 2, 2, 1, 1, 1, 2, 4, 8};

void arrange(Elements *e)
{
    int n = 0;
    e->repeats = 1;
    for (int k = 0; k < e->n_dims; k++) {
        int64_t size = e->sizes[k], stride = e->strides[k];
        if (size == 1) continue;
        if (stride == 0) {
            e->repeats *= size;
            continue;
        }
        int at = n++;
        for (; at > 0 && e->strides[at - 1] > stride; at--) {
            e->sizes[at] = e->sizes[at - 1];
            e->strides[at] = e->strides[at - 1];
        }
        e->sizes[at] = size;
        e->strides[at] = stride;
    }
    if (n == 0) e->sizes[n] = e->strides[n] = 1, n = 1;

    int last = 0;
    for (int k = 1; k < n; k++) {
        if (e->strides[k] == e->strides[last] * e->sizes[last]) {
            e->sizes[last] *= e->sizes[k];
        } else {
            last++;
            e->sizes[last] = e->sizes[k];
            e->strides[last] = e->strides[k];
        }
    }
    e->n_dims = last + 1;
}

Cursor start(const Elements *of)
{
    Cursor c;
    c.of = of, c.at = of->data, c.left = 1;
    for (int k = 0; k < of->n_dims; k++) c.index[k] = 0, c.left *= of->sizes[k];
    return c;
}

static void copy_run(char *to, const char *from, int64_t stride, int n, int item)
{
    if (stride == 1) {
        memcpy(to, from, (size_t)n * item);
        return;
    }
    stride *= item;
    switch (item) { /* a memcpy of constant size is one move */
    case 1: for (int i = 0; i < n; i++) memcpy(to + i, from + i * stride, 1); break;
    case 2: for (int i = 0; i < n; i++) memcpy(to + i * 2, from + i * stride, 2); break;
    case 4: for (int i = 0; i < n; i++) memcpy(to + i * 4, from + i * stride, 4); break;
    default: for (int i = 0; i < n; i++) memcpy(to + i * 8, from + i * stride, 8); break;
    }
}

const void *next_block(Cursor *c, void *room, int *n)
{
    const Elements *e = c->of;
    int item = ITEM_SIZE[e->kind], wanted = c->left < BLOCK ? (int)c->left : BLOCK;
    *n = wanted;
    c->left -= wanted;
    if (e->n_dims == 1 && e->strides[0] == 1) {
        const char *block = c->at;
        c->at += (int64_t)wanted * item;
        return block;
    }
    for (int filled = 0; filled < wanted;) {
        int64_t run = e->sizes[0] - c->index[0];
        if (run > wanted - filled) run = wanted - filled;
        copy_run((char *)room + filled * item, c->at, e->strides[0], (int)run, item);
        filled += (int)run;
        c->index[0] += run;
        c->at += run * e->strides[0] * item;
        for (int k = 0; k + 1 < e->n_dims && c->index[k] == e->sizes[k]; k++) {
            c->at += (e->strides[k + 1] - e->strides[k] * e->sizes[k]) * item;
            c->index[k] = 0;
            c->index[k + 1]++;
        }
    }
    return room;
}
