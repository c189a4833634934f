/* Asks tensors by DLPack, and by attributes and methods of theirs, which torch keeps, instead of through its C++
   interface, which changes from release to release. */

#include "_tensor.h"

#include <string.h>

/* ---- DLPack 1: how libraries of arrays show their memory to one another, fixed for all of them ---- */

typedef struct { int32_t type, number; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;

typedef struct {
    void *data;
    Device device;
    int32_t n_dims;
    DataType dtype;
    int64_t *sizes, *strides;
    uint64_t offset;
} Described;

typedef struct {
    uint32_t major, minor;
    const void *older;
    void (*allocate)(void), (*give)(void), (*take)(void);
    int (*describe)(void *object, Described *out); /* -1 with an exception; nothing of it is held */
} Exchange;

enum { INT = 0, UINT = 1, FLOAT = 2, BFLOAT = 4, TRUTH = 6 }; /* codes of data types */

static Kind kind_of(DataType dtype)
{
    if (dtype.lanes != 1) return KINDS;
    switch (dtype.code << 8 | dtype.bits) {
    case FLOAT << 8 | 32: return FLOAT32;
    case FLOAT << 8 | 64: return FLOAT64;
    case FLOAT << 8 | 16: return FLOAT16;
    case BFLOAT << 8 | 16: return BFLOAT16;
    case TRUTH << 8 | 8: return BOOL;
    case UINT << 8 | 8: return UINT8;
    case INT << 8 | 8: return INT8;
    case INT << 8 | 16: return INT16;
    case INT << 8 | 32: return INT32;
    case INT << 8 | 64: return INT64;
    default: return KINDS;
    }
}

/* ---- what we know of torch ---- */

static PyObject *tensor_type, *parameter_type, *is_neg, *strided;
static const Exchange *exchange;
static bool wary; /* a tensor has been met that DLPack cannot describe; torch takes a millisecond to say so */

static PyObject *s_storage_offset, *s_untyped_storage, *s_nbytes, *s_requires_grad, *s_version, *s_is_inference,
    *s_detach, *s_contiguous, *s_is_cpu, *s_is_cuda, *s_layout;
static const struct { PyObject **string; const char *text; } STRINGS[] = {
    {&s_storage_offset, "storage_offset"}, {&s_untyped_storage, "untyped_storage"}, {&s_nbytes, "nbytes"},
    {&s_requires_grad, "requires_grad"}, {&s_version, "_version"}, {&s_is_inference, "is_inference"},
    {&s_detach, "detach"}, {&s_contiguous, "contiguous"}, {&s_is_cpu, "is_cpu"}, {&s_is_cuda, "is_cuda"},
    {&s_layout, "layout"},
};

/* The table is torch's own and stays for as long as its type does. */
static void learn_exchange(void)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    exchange = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    if (exchange && exchange->major != 1)
        PyErr_Format(PyExc_ImportError, "this torch has version %u of DLPack, and 1 is known", exchange->major);
}

int learn_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch"), *nn = PyImport_ImportModule("torch.nn");
    if (torch && nn) {
        tensor_type = PyObject_GetAttrString(torch, "Tensor");
        strided = PyObject_GetAttrString(torch, "strided");
        parameter_type = PyObject_GetAttrString(nn, "Parameter");
        is_neg = tensor_type ? PyObject_GetAttrString(tensor_type, "is_neg") : NULL;
        if (is_neg) learn_exchange();
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

/* -1 with an exception set when there is no number; takes the reference. */
static int64_t number(PyObject *answer)
{
    if (!answer) return -1;
    int64_t value = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return value;
}

static bool is_plain(PyObject *tensor)
{
    PyObject *layout = PyObject_GetAttr(tensor, s_layout);
    Py_XDECREF(layout);
    if (layout != strided) return false;
    return truth(PyObject_GetAttr(tensor, s_is_cpu)) == 1 || truth(PyObject_GetAttr(tensor, s_is_cuda)) == 1;
}

/* False with an exception or none. */
static bool describe(PyObject *tensor, Described *out)
{
    if (wary && !is_plain(tensor)) return false;
    if (exchange->describe(tensor, out) == 0) return true;
    wary = true;
    return false;
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

/* Take over sizes and strides, as one dimension where the elements lie one after the other; returns their number. */
static int64_t lay_out(Elements *e, const Described *described)
{
    int64_t count = 1;
    bool dense = true;
    for (int k = described->n_dims - 1; k >= 0; k--) {
        dense = dense && (described->sizes[k] == 1 || described->strides[k] == count);
        count *= described->sizes[k];
    }
    if (dense || count == 0) {
        e->n_dims = 1, e->sizes[0] = count, e->strides[0] = 1;
        return count;
    }
    if (described->n_dims > MAX_DIMS) return -1;
    e->n_dims = described->n_dims;
    memcpy(e->sizes, described->sizes, (size_t)e->n_dims * sizeof *e->sizes);
    memcpy(e->strides, described->strides, (size_t)e->n_dims * sizeof *e->strides);
    return count;
}

int64_t find_elements(PyObject *tensor, Elements *e) { return find_elements_on(ON_CPU, 0, tensor, e); }

int64_t find_elements_on(DeviceType on, int32_t of, PyObject *tensor, Elements *e)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != tensor_type && type != parameter_type) return -1;
    Described described;
    if (!describe(tensor, &described)) return -1;
    if (described.device.type != (int32_t)on || described.device.number != of) return -1;
    e->kind = kind_of(described.dtype);
    if (e->kind == KINDS) return -1;
    if (truth(PyObject_CallFunctionObjArgs(is_neg, tensor, NULL)) != 0) return -1; /* DLPack does not tell */
    int64_t count = lay_out(e, &described);
    e->data = (const char *)described.data + described.offset;
    return count > 0 && !is_backed(tensor, e, (uintptr_t)e->data) ? -1 : count;
}

PyObject *requires_grad_of(PyObject *tensor) { return PyObject_GetAttr(tensor, s_requires_grad); }

PyObject *contiguous_copy(PyObject *tensor)
{
    PyObject *detached = ask(tensor, s_detach);
    PyObject *contiguous = detached ? ask(detached, s_contiguous) : NULL;
    Py_XDECREF(detached);
    return contiguous;
}

int64_t version_of(PyObject *tensor)
{
    int64_t version = truth(ask(tensor, s_is_inference)) == 0 ? number(PyObject_GetAttr(tensor, s_version)) : -1;
    PyErr_Clear();
    return version;
}

const char *data_of(PyObject *tensor)
{
    Described described;
    if (describe(tensor, &described)) return (const char *)described.data + described.offset;
    PyErr_Clear();
    return NULL;
}
