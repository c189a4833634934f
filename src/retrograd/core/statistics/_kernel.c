/* The Slab of CPU tensors: rows of statistics, and the one call that reads a tensor into a row.

   Memory is read only where a tensor says that it is on the CPU, strided, of a kind we know, and whole. Any other
   goes to `make_readable`, a Python callable that returns one we can read, or raises.

   Several threads may use one slab: rows are touched with the GIL held, and only reading goes on without it. */

#include "_tensor.h"

#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "_fold.h"
#include "_launcher.h"

enum {
    BEYOND_CACHE = 4 << 20, /* bytes of copies that are no longer in a cache when an update has gone through its state */
    WITHOUT_GIL = 32768, /* elements from which others may run while we read */
    REMEMBERED = 4096,   /* elements from which it pays to remember what was read last */
};

/* As ROW in row.py. */
typedef struct {
    int32_t row, calls;
    int64_t order;
    Moments moments;
    double reference;
    int32_t first_bin, bins;
} Row;

_Static_assert(sizeof(Row) == 112, "ROW of row.py has 112 bytes");

/* The last large tensor that was read: parents often hand on the very object that their child returned. */
typedef struct {
    PyObject *weak;         /* reference to the tensor, or NULL */
    const PyObject *tensor; /* its address, which another one may have when it is gone */
    int64_t version;
    const char *data;
    Contribution contribution;
} Memory;

typedef struct {
    PyObject_HEAD
    PyObject *make_readable;
    Py_buffer turns; /* one int64: how many rows have been reached since the last drain, of all slabs that share it */
    bool histogram;
    Py_ssize_t length, capacity;
    Row *rows;
    int64_t (*bins)[BINS];
    Memory last;
} Slab;

/* ---- rows ---- */

static void clear_row(Slab *slab, Py_ssize_t at)
{
    Row *row = &slab->rows[at];
    if (slab->histogram && row->bins) memset(slab->bins[at] + row->first_bin, 0, (size_t)row->bins * sizeof(int64_t));
    *row = (Row){.row = (int32_t)at, .moments = NO_MOMENTS};
}

static void merge_into(Slab *slab, Py_ssize_t at, const Contribution *c, double reference)
{
    Row *row = &slab->rows[at];
    if (!row->calls++) row->order = (*(int64_t *)slab->turns.buf)++;
    row->reference += reference;
    merge_moments(&row->moments, &c->moments);
    if (!slab->histogram || c->first > c->last) return;
    for (int bin = c->first; bin <= c->last; bin++) slab->bins[at][bin] += c->bins[bin];
    int first = c->first, end = c->last + 1;
    if (row->bins && row->first_bin < first) first = row->first_bin;
    if (row->bins && row->first_bin + row->bins > end) end = row->first_bin + row->bins;
    row->first_bin = first, row->bins = end - first;
}

static Py_ssize_t row_number(Slab *slab, PyObject *argument)
{
    Py_ssize_t row = PyLong_AsSsize_t(argument);
    if (row == -1 && PyErr_Occurred()) return -1;
    if (row >= 0 && row < slab->length) return row;
    PyErr_Format(PyExc_IndexError, "row %zd of a slab of %zd rows", row, slab->length);
    return -1;
}

/* ---- memory ---- */

static void forget_last(Slab *slab) { Py_CLEAR(slab->last.weak); }

static bool is_last(const Slab *slab, PyObject *tensor)
{
    const Memory *last = &slab->last;
    if (!last->weak || last->tensor != tensor) return false;
    int64_t version = version_of(tensor);
    const char *data = data_of(tensor);
    /* looked at after asking, because meanwhile another thread may have read a tensor */
    if (!last->weak || last->version != version || last->data != data) return false;
    PyObject *alive = PyObject_CallNoArgs(last->weak);
    Py_XDECREF(alive);
    return alive == tensor;
}

static void remember(Slab *slab, PyObject *tensor, int64_t version, const char *data, const Contribution *c)
{
    forget_last(slab);
    PyObject *weak = PyWeakref_NewRef(tensor, NULL);
    if (!weak) PyErr_Clear();
    slab->last = (Memory){weak, tensor, version, data, *c};
}

/* ---- methods ---- */

/* Find the elements of a tensor, or of what make_readable gives for it. A new reference to the tensor that has them,
   or NULL with an exception. */
static PyObject *make_sure(Slab *slab, PyObject *tensor, Elements *e, int64_t *count)
{
    *count = find_elements(tensor, e);
    if (*count >= 0) return Py_NewRef(tensor);
    PyErr_Clear();
    PyObject *readable = PyObject_CallFunctionObjArgs(slab->make_readable, tensor, NULL);
    if (readable && (*count = find_elements(readable, e)) < 0) {
        Py_CLEAR(readable);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the kernel cannot read what was made readable");
    }
    return readable;
}

static PyObject *slab_observe(Slab *slab, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "observe(tensor, row) takes 2 arguments, not %zd", n_args);
    PyObject *tensor = args[0];
    Py_ssize_t row = row_number(slab, args[1]);
    if (row < 0) return NULL;
    if (is_last(slab, tensor)) {
        merge_into(slab, row, &slab->last.contribution, 0);
        return requires_grad_of(tensor);
    }

    Elements elements;
    int64_t count;
    PyObject *read = make_sure(slab, tensor, &elements, &count);
    if (!read) return NULL;
    arrange(&elements);
    int64_t version = count >= REMEMBERED && read == tensor ? version_of(tensor) : -1; /* before it is read */
    Contribution contribution;
    PyThreadState *state = count >= WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    fold(&elements, slab->histogram, &contribution);
    if (state) PyEval_RestoreThread(state);
    merge_into(slab, row, &contribution, 0);
    if (version >= 0) remember(slab, tensor, version, elements.data, &contribution);
    Py_DECREF(read);
    return requires_grad_of(tensor);
}

/* Whether elements lie alike in memory, asked before they are arranged. */
static bool alike(const Elements *a, const Elements *b)
{
    size_t bytes = (size_t)a->n_dims * sizeof *a->sizes;
    return a->kind == b->kind && a->n_dims == b->n_dims
        && !memcmp(a->sizes, b->sizes, bytes) && !memcmp(a->strides, b->strides, bytes);
}

/* Replace a tensor, of which we have a reference, by a contiguous copy of it, or by NULL with an exception. */
static void make_contiguous(PyObject **tensor, Elements *e, int64_t *count)
{
    PyObject *contiguous = contiguous_copy(*tensor);
    Py_DECREF(*tensor);
    *tensor = contiguous;
    if (contiguous && (*count = find_elements(contiguous, e)) < 0) Py_CLEAR(*tensor);
}

/* Whether elements fill their memory, in any order of dimensions. */
static bool is_dense(const Elements *elements)
{
    if (elements->n_dims == 1) return elements->strides[0] == 1;
    Elements e = *elements;
    arrange(&e);
    return e.n_dims == 1 && e.strides[0] == 1 && e.repeats == 1;
}

/* A number for the kind of elements and how they lie in memory, the same for those that lie alike. */
static uint64_t layout_of(const Elements *e)
{
    uint64_t number = (uint64_t)e->kind;
    for (int k = 0; k < e->n_dims; k++)
        number = (number * 1000003 + (uint64_t)e->sizes[k]) * 1000003 + (uint64_t)e->strides[k];
    return number;
}

/* Find the elements of a copy that copy_into has made of a tensor that lay like `new`. */
static bool find_copied(PyObject *copy, const Elements *new, int64_t count, Elements *old)
{
    const char *data = PyByteArray_AsString(copy);
    Py_ssize_t size = (Py_ssize_t)count * ITEM_SIZE[new->kind];
    uint64_t layout = layout_of(new);
    *old = *new;
    old->data = data;
    return PyByteArray_Size(copy) == size + (Py_ssize_t)sizeof layout && !memcmp(data + size, &layout, sizeof layout);
}

static Sides merge_difference(Slab *slab, Py_ssize_t row, Elements *new, Elements *old, int64_t count)
{
    Contribution contribution;
    Sides sides;
    arrange(new);
    arrange(old);
    PyThreadState *state = count >= WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    fold_difference(new, old, slab->histogram, &contribution, &sides);
    if (state) PyEval_RestoreThread(state);
    merge_into(slab, row, &contribution, sides.reference);
    return sides;
}

static PyObject *slab_observe_update(Slab *slab, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 3)
        return PyErr_Format(PyExc_TypeError, "observe_update(new, old, row) takes 3 arguments, not %zd", n_args);
    Py_ssize_t row = row_number(slab, args[2]);
    if (row < 0) return NULL;
    Elements new, old;
    int64_t count, old_count;
    bool copied = PyByteArray_Check(args[1]), fit;
    PyObject *read_new = make_sure(slab, args[0], &new, &count);
    PyObject *read_old = !read_new ? NULL : copied ? Py_NewRef(args[1]) : make_sure(slab, args[1], &old, &old_count);
    if (read_old && copied) {
        fit = find_copied(read_old, &new, count, &old);
    } else {
        if (read_old && !alike(&new, &old)) {
            make_contiguous(&read_new, &new, &count);
            make_contiguous(&read_old, &old, &old_count);
        }
        fit = !read_new || !read_old || alike(&new, &old);
    }
    if (!fit && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "an update is the difference of two tensors of one size and dtype");
    bool fine = read_new && read_old && !PyErr_Occurred();
    if (fine) merge_difference(slab, row, &new, &old, count);
    Py_XDECREF(read_new);
    Py_XDECREF(read_old);
    return fine ? Py_NewRef(Py_None) : NULL;
}

/* False, and no exception, for an update that is not the difference of a plain tensor and a copy of its elements; else
   the sums of the bits of both are known afterwards. */
static bool observe_copied(Slab *slab, PyObject *tensor, PyObject *copy, PyObject *row_object, Sides *sides)
{
    Elements new, old;
    Py_ssize_t row = row_number(slab, row_object);
    int64_t count = row >= 0 && PyByteArray_Check(copy) ? find_elements(tensor, &new) : -1;
    bool fit = count >= 0 && find_copied(copy, &new, count, &old);
    PyErr_Clear();
    if (fit) *sides = merge_difference(slab, row, &new, &old, count);
    return fit;
}

static PyObject *slab_observe_updates(Slab *slab, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 5 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        !PyByteArray_Check(args[4]) || PyByteArray_Size(args[4]) != PyList_Size(args[0]) * 2 * (Py_ssize_t)sizeof(uint64_t))
        return PyErr_Format(PyExc_TypeError, "observe_updates(new, old, rows, begin, bits) takes three lists, a number "
                                             "and two words for each update");
    Py_ssize_t at = PyLong_AsSsize_t(args[3]);
    if (at == -1 && PyErr_Occurred()) return NULL;
    for (; at >= 0 && at < PyList_Size(args[0]); at++) { /* others may run while one is read, and change the lists */
        PyObject *new = Py_XNewRef(PyList_GetItem(args[0], at)), *old = Py_XNewRef(PyList_GetItem(args[1], at));
        PyObject *row = Py_XNewRef(PyList_GetItem(args[2], at));
        Sides sides;
        bool fine = new && old && row, fit = fine && observe_copied(slab, new, old, row, &sides);
        Py_XDECREF(new);
        Py_XDECREF(old);
        Py_XDECREF(row);
        if (!fine) return NULL;
        if (!fit) break;
        uint64_t pair[2] = {sides.bits_of_b, sides.bits_of_a};
        if (PyByteArray_Size(args[4]) >= (at + 1) * (Py_ssize_t)sizeof pair)
            memcpy(PyByteArray_AsString(args[4]) + at * (Py_ssize_t)sizeof pair, pair, sizeof pair);
    }
    return PyLong_FromSsize_t(at);
}

static PyObject *slab_grow(Slab *slab, PyObject *argument)
{
    Py_ssize_t length = PyLong_AsSsize_t(argument);
    if (length == -1 && PyErr_Occurred()) return NULL;
    if (length > slab->capacity) {
        Py_ssize_t capacity = length > 2 * slab->capacity ? length : 2 * slab->capacity;
        Row *rows = realloc(slab->rows, (size_t)capacity * sizeof *rows);
        if (!rows) return PyErr_NoMemory();
        slab->rows = rows;
        if (slab->histogram) {
            int64_t (*bins)[BINS] = realloc(slab->bins, (size_t)capacity * sizeof *bins);
            if (!bins) return PyErr_NoMemory();
            memset(bins + slab->capacity, 0, (size_t)(capacity - slab->capacity) * sizeof *bins);
            slab->bins = bins;
        }
        for (Py_ssize_t at = slab->capacity; at < capacity; at++) {
            rows[at].bins = 0;
            clear_row(slab, at);
        }
        slab->capacity = capacity;
    }
    if (length > slab->length) slab->length = length;
    Py_RETURN_NONE;
}

static PyObject *slab_drain(Slab *slab, PyObject *Py_UNUSED(none))
{
    Py_ssize_t rows = 0, bins = 0;
    for (Py_ssize_t at = 0; at < slab->length; at++)
        if (slab->rows[at].calls) rows++, bins += slab->rows[at].bins;
    PyObject *row_bytes = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)sizeof(Row));
    PyObject *bin_bytes = PyBytes_FromStringAndSize(NULL, bins * (Py_ssize_t)sizeof(int64_t));
    if (row_bytes && bin_bytes) {
        char *row_end = PyBytes_AsString(row_bytes), *bin_end = PyBytes_AsString(bin_bytes);
        for (Py_ssize_t at = 0; at < slab->length; at++) {
            const Row *row = &slab->rows[at];
            if (!row->calls) continue;
            memcpy(row_end, row, sizeof *row);
            row_end += sizeof *row;
            size_t size = (size_t)row->bins * sizeof(int64_t);
            if (size) memcpy(bin_end, slab->bins[at] + row->first_bin, size);
            bin_end += size;
            clear_row(slab, at);
        }
        *(int64_t *)slab->turns.buf = 0;
        forget_last(slab);
    }
    PyObject *drained = row_bytes && bin_bytes ? PyTuple_Pack(2, row_bytes, bin_bytes) : NULL;
    Py_XDECREF(row_bytes);
    Py_XDECREF(bin_bytes);
    return drained;
}

static PyObject *slab_forget(Slab *slab, PyObject *Py_UNUSED(none))
{
    for (Py_ssize_t at = 0; at < slab->length; at++)
        if (slab->rows[at].calls) clear_row(slab, at);
    *(int64_t *)slab->turns.buf = 0;
    forget_last(slab);
    Py_RETURN_NONE;
}

static Py_ssize_t slab_length(Slab *slab) { return slab->length; }

/* ---- the type ---- */

static PyObject *slab_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"histogram", "make_readable", "turns", NULL};
    int histogram;
    PyObject *make_readable, *turns;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "pOO:Slab", names, &histogram, &make_readable, &turns)) return NULL;
    Slab *slab = (Slab *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!slab) return NULL;
    if (PyObject_GetBuffer(turns, &slab->turns, PyBUF_WRITABLE) < 0) goto failed;
    if (slab->turns.len != sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "turns is one int64");
        goto failed;
    }
    Py_INCREF(make_readable);
    slab->make_readable = make_readable;
    slab->histogram = histogram;
    return (PyObject *)slab;
failed:
    Py_DECREF(slab);
    return NULL;
}

static void slab_dealloc(Slab *slab)
{
    PyTypeObject *type = Py_TYPE((PyObject *)slab);
    forget_last(slab);
    Py_XDECREF(slab->make_readable);
    if (slab->turns.obj) PyBuffer_Release(&slab->turns);
    free(slab->rows);
    free(slab->bins);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(slab);
    Py_DECREF(type);
}

static PyMethodDef slab_methods[] = {
    {"grow", (PyCFunction)slab_grow, METH_O, "grow(n): make at least n rows."},
    {"observe", (PyCFunction)(void (*)(void))slab_observe, METH_FASTCALL,
     "observe(tensor, row): merge the tensor's elements into the row; returns tensor.requires_grad."},
    {"observe_update", (PyCFunction)(void (*)(void))slab_observe_update, METH_FASTCALL,
     "observe_update(new, old, row): merge new - old into the row, and the squares of old into its reference; old may "
     "be what copy_into has made."},
    {"observe_updates", (PyCFunction)(void (*)(void))slab_observe_updates, METH_FASTCALL,
     "observe_updates(new, old, rows, begin, bits): observe_update for lists, from a place on, as long as old is what "
     "copy_into has made of a tensor; the place of the first for which it is not. The bytearray bits gets two words "
     "for each: the sums of the bits of old and of new."},
    {"drain", (PyCFunction)slab_drain, METH_NOARGS, "drain(): the bytes of all rows in use and of their bins."},
    {"forget", (PyCFunction)slab_forget, METH_NOARGS, "forget(): empty all rows."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slab_slots[] = {
    {Py_tp_doc, "Slab(histogram, make_readable, turns): rows of statistics of CPU tensors."},
    {Py_tp_new, slab_new},
    {Py_tp_dealloc, slab_dealloc},
    {Py_tp_methods, slab_methods},
    {Py_sq_length, slab_length},
    {0, NULL},
};

static PyType_Spec slab_spec = {
    .name = "retrograd.core.statistics._kernel.Slab",
    .basicsize = sizeof(Slab),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slab_slots,
};

/* ---- copies ---- */

/* Copy into memory of 16-byte blocks that is read much later: where the processor can, without fetching it first. */
static void copy_past_cache(char *to, const char *from, Py_ssize_t size)
{
#if defined(__SSE2__)
    if (!((uintptr_t)to & 15)) {
        for (; size >= 16; to += 16, from += 16, size -= 16)
            _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
        _mm_sfence();
    }
#endif
    memcpy(to, from, (size_t)size);
}

/* The elements as they lie in memory, and behind them the number of their layout, in the bytearray `room` if it has that
   size, else in another one; None where there are none, or gaps between them. */
static PyObject *copy_of(PyObject *tensor, PyObject *room, bool past_cache)
{
    Elements e;
    int64_t count = find_elements(tensor, &e);
    PyErr_Clear();
    if (count < 0 || !is_dense(&e)) return Py_NewRef(Py_None);
    uint64_t layout = layout_of(&e);
    Py_ssize_t size = (Py_ssize_t)count * ITEM_SIZE[e.kind], whole = size + (Py_ssize_t)sizeof layout;
    bool fits = room && PyByteArray_Check(room) && PyByteArray_Size(room) == whole;
    PyObject *copy = fits ? Py_NewRef(room) : PyByteArray_FromStringAndSize(NULL, whole);
    if (!copy) return NULL;
    char *to = PyByteArray_AsString(copy);
    PyThreadState *state = count >= WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    if (size && past_cache) copy_past_cache(to, e.data, size);
    else if (size) memcpy(to, e.data, (size_t)size);
    memcpy(to + size, &layout, sizeof layout);
    if (state) PyEval_RestoreThread(state);
    return copy;
}

static PyObject *copy_into(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "copy_into(tensors, rooms) takes two lists");
    Py_ssize_t bytes = 0;
    for (Py_ssize_t at = 0; at < PyList_Size(args[1]); at++) {
        PyObject *room = PyList_GetItem(args[1], at);
        if (PyByteArray_Check(room)) bytes += PyByteArray_Size(room);
    }
    PyObject *copies = PyList_New(0);
    for (Py_ssize_t at = 0; copies && at < PyList_Size(args[0]); at++) { /* others may run while one is copied */
        PyObject *tensor = Py_XNewRef(PyList_GetItem(args[0], at));
        PyObject *room = at < PyList_Size(args[1]) ? Py_XNewRef(PyList_GetItem(args[1], at)) : NULL;
        PyObject *copy = tensor ? copy_of(tensor, room, bytes > BEYOND_CACHE) : NULL;
        if (!copy || PyList_Append(copies, copy) < 0) Py_CLEAR(copies);
        Py_XDECREF(copy);
        Py_XDECREF(room);
        Py_XDECREF(tensor);
    }
    return copies;
}

/* The sums of the bits of tensors; None where one is not plain. */
static PyObject *sum_all_bits(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "sum_bits(tensors) takes a list");
    PyObject *sums = PyList_New(0);
    for (Py_ssize_t at = 0; sums && at < PyList_Size(tensors); at++) {
        PyObject *tensor = Py_XNewRef(PyList_GetItem(tensors, at));
        Elements e;
        int64_t count = tensor ? find_elements(tensor, &e) : -1;
        PyErr_Clear();
        PyObject *sum = NULL;
        if (count >= 0) {
            arrange(&e);
            sum = PyLong_FromUnsignedLongLong(sum_bits(&e));
        } else if (tensor) {
            sum = Py_NewRef(Py_None);
        }
        if (!sum || PyList_Append(sums, sum) < 0) Py_CLEAR(sums);
        Py_XDECREF(sum);
        Py_XDECREF(tensor);
    }
    return sums;
}

/* The sum of the squares of the elements of all tensors; None where one is not plain, or not of floats. */
static PyObject *sum_all_squares(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "sum_squares(tensors) takes a list");
    double sum = 0;
    for (Py_ssize_t at = 0; at < PyList_Size(tensors); at++) {
        PyObject *tensor = Py_XNewRef(PyList_GetItem(tensors, at));
        Elements e;
        int64_t count = tensor ? find_elements(tensor, &e) : -1;
        bool is_plain = count >= 0 && e.kind <= BFLOAT16;
        PyErr_Clear();
        if (is_plain && count > 0) {
            arrange(&e);
            sum += sum_squares(&e);
        }
        Py_XDECREF(tensor);
        if (!is_plain) Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(sum);
}

static PyMethodDef functions[] = {
    {"sum_squares", (PyCFunction)sum_all_squares, METH_O,
     "sum_squares(tensors): the sum over all elements of all of them; None where one is not plain, or not of floats."},
    {"sum_bits", (PyCFunction)sum_all_bits, METH_O,
     "sum_bits(tensors): of each the sum of the eight-byte words that its bits are; None where it is not plain."},
    {"copy_into", (PyCFunction)(void (*)(void))copy_into, METH_FASTCALL,
     "copy_into(tensors, rooms): a copy of each for observe_update, in the bytearray at its place in rooms if that has "
     "its size; None where there are gaps in it."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef kernel = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernel",
    .m_doc = "Statistics of tensors, read in one pass.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    if (learn_torch() < 0) return NULL;
    PyObject *module = PyModule_Create(&kernel);
    PyObject *type = module ? PyType_FromSpec(&slab_spec) : NULL;
    if (!type || PyModule_AddObjectRef(module, "Slab", type) < 0) Py_CLEAR(module);
    Py_XDECREF(type);
    type = module ? PyType_FromSpec(&launcher_spec) : NULL;
    if (!type || PyModule_AddObjectRef(module, "Launcher", type) < 0) Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
