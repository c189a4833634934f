/* Asks tensors with attributes and methods of theirs, which torch keeps, instead of through its C++ interface, which
   changes from release to release. */

#include "_tensor.h"

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

int learn_torch(void)
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

/* -1 with an exception set when there is no number; takes the reference. */
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

int64_t find_elements(PyObject *tensor, Elements *e)
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
    PyObject *pointer = ask(tensor, s_data_ptr);
    const char *data = pointer ? PyLong_AsVoidPtr(pointer) : NULL;
    Py_XDECREF(pointer);
    PyErr_Clear();
    return data;
}
