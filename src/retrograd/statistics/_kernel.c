/* The Slab of CPU tensors: rows of statistics, and the one call that reads a tensor into a row.

   Uses Python's limited API, and no C++ interface of torch: what must be known of a tensor is asked of its Python
   object. Memory is read only where the tensor says that it is on the CPU, strided, of a kind we know, and whole;
   any other tensor goes to `make_readable`, a Python callable that returns one we can read, or raises. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "_fold.h"

enum {
    WITHOUT_GIL = 32768, /* elements from which others may run while we read */
    REMEMBERED = 4096,   /* elements from which it pays to remember what was read last */
};

/* As ROW in row.py; bins of a row count from first_bin while they are used. */
typedef struct {
    int32_t row, calls;
    Moments moments;
    double reference;
    int32_t first_bin, bins;
} Row;

_Static_assert(sizeof(Row) == 104, "ROW of row.py has 104 bytes");

typedef struct {
    PyObject_HEAD
    PyObject *make_readable;
    bool histogram;
    Py_ssize_t length, capacity;
    Row *rows;
    int64_t (*bins)[BINS];
    /* what was read last, if it was large: parents often hand on the object that their child returned */
    PyObject *last; /* weak reference */
    PyObject *last_version;
    const char *last_data;
    Contribution last_contribution;
} Slab;

/* ---- what we know of torch ---- */

static PyObject *tensor_type, *parameter_type;
static PyObject *dtypes[KINDS];
static const char *const DTYPE_NAMES[KINDS] = {
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64",
};

static PyObject *s_is_cpu, *s_dtype, *s_is_contiguous, *s_is_neg, *s_numel, *s_data_ptr, *s_shape, *s_stride,
    *s_storage_offset, *s_untyped_storage, *s_nbytes, *s_requires_grad, *s_version, *s_is_inference, *s_detach,
    *s_contiguous;
static const struct { PyObject **string; const char *text; } STRINGS[] = {
    {&s_is_cpu, "is_cpu"}, {&s_dtype, "dtype"}, {&s_is_contiguous, "is_contiguous"}, {&s_is_neg, "is_neg"},
    {&s_numel, "numel"}, {&s_data_ptr, "data_ptr"}, {&s_shape, "shape"}, {&s_stride, "stride"},
    {&s_storage_offset, "storage_offset"}, {&s_untyped_storage, "untyped_storage"}, {&s_nbytes, "nbytes"},
    {&s_requires_grad, "requires_grad"}, {&s_version, "_version"}, {&s_is_inference, "is_inference"},
    {&s_detach, "detach"}, {&s_contiguous, "contiguous"},
};

static int learn_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch"), *nn = PyImport_ImportModule("torch.nn");
    if (torch && nn) {
        tensor_type = PyObject_GetAttrString(torch, "Tensor");
        parameter_type = PyObject_GetAttrString(nn, "Parameter");
        for (int kind = 0; kind < KINDS; kind++) dtypes[kind] = PyObject_GetAttrString(torch, DTYPE_NAMES[kind]);
    }
    Py_XDECREF(torch);
    Py_XDECREF(nn);
    for (size_t i = 0; i < sizeof STRINGS / sizeof *STRINGS; i++)
        *STRINGS[i].string = PyUnicode_InternFromString(STRINGS[i].text);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- asking a tensor ---- */

static PyObject *ask(PyObject *object, PyObject *method)
{
    return PyObject_CallMethodObjArgs(object, method, NULL);
}

/* 1, 0, or -1 with an exception set; takes the reference. */
static int truth(PyObject *answer)
{
    int is_true = answer == Py_True ? 1 : answer == Py_False ? 0 : answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_true;
}

/* −1 with an exception set when there is no number; takes the reference. */
static int64_t number(PyObject *answer)
{
    if (!answer) return -1;
    int64_t value = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return value;
}

static int numbers(PyObject *tuple, int64_t *out)
{
    Py_ssize_t n = tuple ? PyTuple_Size(tuple) : -1;
    if (n > MAX_DIMS) n = -1;
    for (Py_ssize_t i = 0; i < n; i++) out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    Py_XDECREF(tuple);
    return PyErr_Occurred() ? -1 : (int)n;
}

/* Whether there is memory behind a pointer: a storage may have been freed or shrunk, or never have had any. Pointers
   far up come from an allocator, those near zero perhaps from an offset alone, so only these pay for the question. */
static bool is_backed(PyObject *tensor, const Elements *e, uintptr_t data)
{
    if (data >> 36) return true;
    int64_t offset = number(ask(tensor, s_storage_offset)), needed = offset + 1;
    for (int k = 0; k < e->n_dims; k++) needed += (e->sizes[k] - 1) * e->strides[k];
    PyObject *storage = ask(tensor, s_untyped_storage);
    int64_t bytes = storage ? number(ask(storage, s_nbytes)) : -1;
    Py_XDECREF(storage);
    bool based = data > (uintptr_t)offset * ITEM_SIZE[e->kind];
    return !PyErr_Occurred() && based && needed * ITEM_SIZE[e->kind] <= bytes;
}

/* Fill in `e` and return how many elements it has; −1 when the tensor is not ours to read (an exception may be set). */
static int64_t look_at(PyObject *tensor, Elements *e)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != tensor_type && type != parameter_type) return -1;
    if (truth(PyObject_GetAttr(tensor, s_is_cpu)) != 1) return -1;

    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
    Py_XDECREF(dtype);
    for (e->kind = 0; e->kind < KINDS && dtypes[e->kind] != dtype; e->kind++);
    if (e->kind == KINDS) return -1;

    if (truth(ask(tensor, s_is_neg)) != 0) return -1;
    int contiguous = truth(ask(tensor, s_is_contiguous));
    int64_t count = contiguous < 0 ? -1 : number(ask(tensor, s_numel));
    PyObject *pointer = count < 0 ? NULL : ask(tensor, s_data_ptr);
    if (!pointer) return -1;
    uintptr_t data = (uintptr_t)PyLong_AsVoidPtr(pointer);
    Py_DECREF(pointer);

    e->data = (const char *)data;
    if (contiguous) {
        e->n_dims = 1, e->sizes[0] = count, e->strides[0] = 1;
    } else {
        e->n_dims = numbers(PyObject_GetAttr(tensor, s_shape), e->sizes);
        if (e->n_dims < 0 || numbers(ask(tensor, s_stride), e->strides) != e->n_dims) return -1;
    }
    return count && !is_backed(tensor, e, data) ? -1 : count;
}

/* look_at(), then with what make_readable gives for it. A new reference to the tensor that `e` reads, or NULL. */
static PyObject *find_elements(Slab *slab, PyObject *tensor, Elements *e, int64_t *count)
{
    if ((*count = look_at(tensor, e)) >= 0) {
        Py_INCREF(tensor);
        return tensor;
    }
    PyErr_Clear();
    PyObject *readable = PyObject_CallFunctionObjArgs(slab->make_readable, tensor, NULL);
    if (readable && (*count = look_at(readable, e)) < 0) {
        Py_DECREF(readable);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "make_readable returned a tensor that is not");
        return NULL;
    }
    return readable;
}

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
    row->calls++;
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

/* ---- the last tensor ---- */

static void forget_last(Slab *slab)
{
    Py_CLEAR(slab->last);
    Py_CLEAR(slab->last_version);
}

/* Version of a tensor, or NULL without an exception where there is none. */
static PyObject *version_of(PyObject *tensor)
{
    PyObject *version = truth(ask(tensor, s_is_inference)) == 0 ? PyObject_GetAttr(tensor, s_version) : NULL;
    PyErr_Clear();
    return version;
}

static bool is_last(Slab *slab, PyObject *tensor)
{
    if (!slab->last || PyWeakref_GetObject(slab->last) != tensor) return false;
    PyObject *version = version_of(tensor);
    bool same = version && PyObject_RichCompareBool(version, slab->last_version, Py_EQ) == 1;
    Py_XDECREF(version);
    return same && (const char *)(intptr_t)number(ask(tensor, s_data_ptr)) == slab->last_data;
}

/* Takes the reference to version. */
static void remember(Slab *slab, PyObject *tensor, PyObject *version, const char *data, const Contribution *c)
{
    forget_last(slab);
    slab->last = PyWeakref_NewRef(tensor, NULL);
    if (!slab->last) PyErr_Clear();
    slab->last_version = version;
    slab->last_data = data;
    slab->last_contribution = *c;
}

/* ---- methods ---- */

static PyObject *slab_observe(Slab *slab, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "observe(tensor, row) takes 2 arguments, not %zd", n_args);
    PyObject *tensor = args[0];
    Py_ssize_t row = row_number(slab, args[1]);
    if (row < 0) return NULL;
    if (is_last(slab, tensor)) {
        merge_into(slab, row, &slab->last_contribution, 0);
        return PyObject_GetAttr(tensor, s_requires_grad);
    }

    Elements elements;
    int64_t count;
    PyObject *read = find_elements(slab, tensor, &elements, &count);
    if (!read) return NULL;
    arrange(&elements);
    Contribution contribution;
    PyObject *version = count >= REMEMBERED && read == tensor ? version_of(tensor) : NULL;
    PyThreadState *state = count >= WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    fold(&elements, slab->histogram, &contribution);
    if (state) PyEval_RestoreThread(state);
    merge_into(slab, row, &contribution, 0);
    if (version) remember(slab, tensor, version, elements.data, &contribution);
    Py_DECREF(read);
    return PyObject_GetAttr(tensor, s_requires_grad);
}

/* Before they are arranged. */
static bool alike(const Elements *a, const Elements *b)
{
    size_t bytes = (size_t)a->n_dims * sizeof *a->sizes;
    return a->kind == b->kind && a->n_dims == b->n_dims
        && !memcmp(a->sizes, b->sizes, bytes) && !memcmp(a->strides, b->strides, bytes);
}

/* Replaces the tensor that `e` reads by a contiguous copy; NULL with an exception when that fails. */
static void make_contiguous(PyObject **tensor, Elements *e, int64_t *count)
{
    PyObject *detached = ask(*tensor, s_detach);
    PyObject *contiguous = detached ? ask(detached, s_contiguous) : NULL;
    Py_XDECREF(detached);
    Py_DECREF(*tensor);
    *tensor = contiguous;
    if (contiguous && (*count = look_at(contiguous, e)) < 0) Py_CLEAR(*tensor);
}

static PyObject *slab_observe_update(Slab *slab, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 3) return PyErr_Format(PyExc_TypeError, "observe_update(new, old, row) takes 3 arguments");
    Py_ssize_t row = row_number(slab, args[2]);
    if (row < 0) return NULL;
    Elements new, old;
    int64_t count, old_count;
    PyObject *read_new = find_elements(slab, args[0], &new, &count);
    PyObject *read_old = read_new ? find_elements(slab, args[1], &old, &old_count) : NULL;
    if (read_old && !alike(&new, &old)) {
        make_contiguous(&read_new, &new, &count);
        if (read_new) make_contiguous(&read_old, &old, &old_count);
        if (read_new && read_old && !alike(&new, &old))
            PyErr_SetString(PyExc_ValueError, "an update is the difference of two tensors of one size and dtype");
    }
    if (!PyErr_Occurred()) {
        Contribution contribution;
        double reference;
        arrange(&new);
        arrange(&old);
        PyThreadState *state = count >= WITHOUT_GIL ? PyEval_SaveThread() : NULL;
        fold_difference(&new, &old, slab->histogram, &contribution, &reference);
        if (state) PyEval_RestoreThread(state);
        merge_into(slab, row, &contribution, reference);
    }
    Py_XDECREF(read_new);
    Py_XDECREF(read_old);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
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
        for (Py_ssize_t at = slab->capacity; at < capacity; at++) rows[at].bins = 0, clear_row(slab, at);
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
    forget_last(slab);
    Py_RETURN_NONE;
}

static Py_ssize_t slab_length(Slab *slab) { return slab->length; }

/* ---- the type ---- */

static PyObject *slab_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"histogram", "make_readable", NULL};
    int histogram;
    PyObject *make_readable;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "pO:Slab", names, &histogram, &make_readable)) return NULL;
    Slab *slab = (Slab *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!slab) return NULL;
    Py_INCREF(make_readable);
    slab->make_readable = make_readable;
    slab->histogram = histogram;
    return (PyObject *)slab;
}

static void slab_dealloc(Slab *slab)
{
    PyTypeObject *type = Py_TYPE((PyObject *)slab);
    forget_last(slab);
    Py_XDECREF(slab->make_readable);
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
     "observe_update(new, old, row): merge new - old into the row, and the squares of old into its reference."},
    {"drain", (PyCFunction)slab_drain, METH_NOARGS, "drain(): the bytes of all rows in use and of their bins."},
    {"forget", (PyCFunction)slab_forget, METH_NOARGS, "forget(): empty all rows."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slab_slots[] = {
    {Py_tp_doc, "Slab(histogram, make_readable): rows of statistics of CPU tensors."},
    {Py_tp_new, slab_new},
    {Py_tp_dealloc, slab_dealloc},
    {Py_tp_methods, slab_methods},
    {Py_sq_length, slab_length},
    {0, NULL},
};

static PyType_Spec slab_spec = {
    .name = "retrograd.statistics._kernel.Slab",
    .basicsize = sizeof(Slab),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slab_slots,
};

static PyModuleDef kernel = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernel",
    .m_doc = "Statistics of CPU tensors, read in one pass.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    if (learn_torch() < 0) return NULL;
    PyObject *module = PyModule_Create(&kernel);
    PyObject *type = module ? PyType_FromSpec(&slab_spec) : NULL;
    if (!type || PyModule_AddObjectRef(module, "Slab", type) < 0) Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
