/* What runs for every node of a graph, or for every operation, without a Python frame.

   _nodes.c       finds all nodes of a graph
   _operations.c  notes each operation of a forward
   _builtins.c    shows calls of built-in functions
   _native.c      the Python module

   Nodes and operations have a twin in Python, which is used where there was no compiler; tests hold the two to the same.
   Nothing is known of torch but Python attributes and functions. All of it runs with the GIL held. */
#ifndef RETROGRAD_NATIVE_H
#define RETROGRAD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- for all ---- */

/* Names of Python attributes, which are strings that are made once. */
typedef struct { PyObject **string; const char *text; } Name;

/* Make strings of these names; -1 with an exception. */
static inline int intern_names(const Name *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!(*names[i].string = PyUnicode_InternFromString(names[i].text))) return -1;
    return 0;
}
#define INTERN(names) intern_names(names, sizeof names / sizeof *names)


/* Append, and let go of, a new reference; false with an exception if there is none. */
bool append(PyObject *list, PyObject *item);

/* A number without sign; takes the reference. Failure is told by PyErr_Occurred alone. */
uint64_t unsigned_of(PyObject *object);

/* ---- what each file gives to the module; to learn is to make its strings, -1 with an exception ---- */

int learn_nodes(void);
PyObject *follow(PyObject *module, PyObject *args);
PyObject *number_nodes(PyObject *module, PyObject *args);
PyObject *order_upwards(PyObject *module, PyObject *args);

int learn_operations(void);
extern PyType_Spec operation_tap_spec;

PyObject *show_calls(PyObject *module, PyObject *args);

#endif
