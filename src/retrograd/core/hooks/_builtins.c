/* Calls of built-in functions of torch's, shown to one listener with what they have returned.

   A built-in function that takes a tuple and a dictionary is called by way of its type, for it has no vectorcall of
   its own. While somebody listens it has this one. Nothing else of it changes: it is the same object with the same
   name, hash and C function, so tables of torch.compile, torch.jit and torch.fx find it as ever. */

#include "_native.h"

typedef PyObject *(*CallVector)(PyObject *, PyObject *const *, size_t, PyObject *);

typedef struct { /* CPython's PyCFunctionObject, which the stable ABI does not tell of; `find_place` checks it */
    PyObject head;
    PyMethodDef *method;
    PyObject *self, *module, *weak_references;
    CallVector vectorcall;
} Builtin;

static PyObject *listener;

static PyObject *call_shown(PyObject *function, PyObject *const *args, size_t nargs, PyObject *names)
{
    Py_ssize_t count = (Py_ssize_t)(nargs & ~((size_t)1 << (8 * sizeof(size_t) - 1)));
    PyObject *tuple = PyTuple_New(count), *keywords = NULL, *result = NULL;
    if (!tuple) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    if (named && !(keywords = PyDict_New())) goto done;
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + i]) < 0) goto done;

    PyCFunctionWithKeywords call = (PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GetFunction(function);
    result = call(PyCFunction_GetSelf(function), tuple, keywords);
    if (result && listener) {
        PyObject *shown = Py_NewRef(listener);
        PyObject *nothing = PyObject_CallFunctionObjArgs(shown, function, tuple, result, NULL);
        if (!nothing) Py_CLEAR(result); /* interrupted: a listener raises nothing else */
        Py_XDECREF(nothing);
        Py_DECREF(shown);
    }
done:
    Py_DECREF(tuple);
    Py_XDECREF(keywords);
    return result;
}

/* Where the vectorcall of a built-in function is; NULL where this Python lays it out in another way, or it has one. */
static CallVector *find_place(PyObject *function)
{
    if (!PyCFunction_CheckExact(function)) return NULL;
    PyObject *size = PyObject_GetAttrString((PyObject *)Py_TYPE(function), "__basicsize__");
    PyObject *offset = PyObject_GetAttrString((PyObject *)Py_TYPE(function), "__weakrefoffset__");
    bool fits = size && offset && PyLong_AsSize_t(size) == sizeof(Builtin)
        && PyLong_AsSize_t(offset) == offsetof(Builtin, weak_references);
    Py_XDECREF(size);
    Py_XDECREF(offset);
    PyErr_Clear();
    Builtin *builtin = (Builtin *)function;
    if (!fits || builtin->method->ml_meth != PyCFunction_GetFunction(function)
        || (PyCFunction_GetFlags(function) & ~METH_STATIC) != (METH_VARARGS | METH_KEYWORDS)
        || (builtin->vectorcall && builtin->vectorcall != call_shown))
        return NULL;
    return &builtin->vectorcall;
}

PyObject *show_calls(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *functions, *to;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &functions, &to)) return NULL;
    PyObject *before = listener;
    listener = to == Py_None ? NULL : Py_NewRef(to);
    Py_XDECREF(before);
    bool all = true;
    for (Py_ssize_t i = 0; i < PyTuple_Size(functions); i++) {
        CallVector *place = find_place(PyTuple_GetItem(functions, i));
        if (place) *place = listener ? call_shown : NULL;
        all &= place != NULL;
    }
    return PyBool_FromLong(all);
}
