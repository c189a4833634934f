/* What lets all hooks on modules rest, and wakes them, once a step: `take_out` and `put_back` of resting.py.

   A place is a tuple of a weak reference to a table of hooks, the number of the hook in it, and the hook. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

static PyObject *s_watchers;

/* The table of a place: a new reference, which is to None where the table is gone; NULL with an exception. */
static PyObject *table_of(PyObject *place)
{
    PyObject *find = PyTuple_GetItem(place, 0);
    return find ? PyObject_CallNoArgs(find) : NULL;
}

/* Take a hook out if it is alone in its table: 1, or 0 where it stays, or -1 with an exception. */
static int take_one(PyObject *place)
{
    PyObject *table = table_of(place), *number = table ? PyTuple_GetItem(place, 1) : NULL;
    int alone = !number ? -1 : table == Py_None ? 0 : PyObject_Size(table) == 1 ? PySequence_Contains(table, number) : 0;
    if (alone == 1 && PyObject_DelItem(table, number) < 0) alone = -1;
    Py_XDECREF(table);
    return alone;
}

static PyObject *take_out(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "take_out(places, resting) takes two lists");
    for (Py_ssize_t at = 0; at < PyList_Size(args[0]); at++) {
        PyObject *place = Py_NewRef(PyList_GetItem(args[0], at));
        int taken = take_one(place);
        if (taken == 1) taken = PyList_Append(args[1], place);
        Py_DECREF(place);
        if (taken < 0) return NULL;
    }
    Py_RETURN_NONE;
}

/* Put a hook back if anybody watches behind it; false with an exception. */
static bool put_one(PyObject *place, PyObject *move_first)
{
    PyObject *table = table_of(place), *number = table ? PyTuple_GetItem(place, 1) : NULL;
    PyObject *hook = number ? PyTuple_GetItem(place, 2) : NULL;
    PyObject *watchers = hook && table != Py_None ? PyObject_GetAttr(hook, s_watchers) : NULL;
    if (watchers && PyObject_IsTrue(watchers) == 1 && PyObject_SetItem(table, number, hook) == 0
        && PyObject_Size(table) > 1)
        Py_XDECREF(PyObject_CallFunctionObjArgs(move_first, table, number, NULL));
    Py_XDECREF(watchers);
    Py_XDECREF(table);
    return !PyErr_Occurred();
}

static PyObject *put_back(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2 || !PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "put_back(resting, move_first) takes a list and a function");
    Py_ssize_t left;
    while ((left = PyList_Size(args[0]))) { /* one by one, since another thread may let one rest meanwhile */
        PyObject *place = Py_NewRef(PyList_GetItem(args[0], left - 1));
        bool fine = PyList_SetSlice(args[0], left - 1, left, NULL) == 0 && put_one(place, args[1]);
        Py_DECREF(place);
        if (!fine) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"take_out", (PyCFunction)(void (*)(void))take_out, METH_FASTCALL,
     "take_out(places, resting): take out each hook that is alone in its table, and append its place to the second."},
    {"put_back", (PyCFunction)(void (*)(void))put_back, METH_FASTCALL,
     "put_back(resting, move_first): put them back, before those that have come meanwhile, and empty the list."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef resting = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_resting",
    .m_doc = "Takes hooks out of torch's tables and puts them back, without a Python frame.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__resting(void)
{
    s_watchers = PyUnicode_InternFromString("watchers");
    return s_watchers ? PyModule_Create(&resting) : NULL;
}
