/* The Python module of what `_native.h` tells of. */

#include "_native.h"

bool append(PyObject *list, PyObject *item)
{
    bool fine = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return fine;
}

uint64_t unsigned_of(PyObject *object)
{
    uint64_t value = object ? PyLong_AsUnsignedLongLong(object) : 0;
    Py_XDECREF(object);
    return value;
}

static PyMethodDef functions[] = {
    {"follow", follow, METH_VARARGS,
     "follow(nodes, several, most): find all that the nodes lead to, and append it; returns the links, 8 bytes each."},
    {"number_nodes", number_nodes, METH_VARARGS, "number_nodes(nodes): their sequence numbers, 8 bytes each."},
    {"order_upwards", order_upwards, METH_VARARGS,
     "order_upwards(nodes, links, leaf): the nodes of lower number than a leaf's, by number; None if they lead upwards."},
    {"show_calls", show_calls, METH_VARARGS,
     "show_calls(functions, listener): call listener(function, args, result) after each call of these built-in "
     "functions, or no more where it is None; returns whether all of them can be watched."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef native = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "What runs for every node or operation, without a Python frame.",
    .m_size = -1,
    .m_methods = functions,
};

static bool add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    bool fine = type && PyModule_AddObjectRef(module, name, type) == 0;
    Py_XDECREF(type);
    return fine;
}

PyMODINIT_FUNC PyInit__native(void)
{
    if (learn_nodes() < 0 || learn_operations() < 0) return NULL;
    PyObject *module = PyModule_Create(&native);
    bool fine = module && add_type(module, &operation_tap_spec, "OperationTap");
    if (!fine) Py_CLEAR(module);
    return module;
}
