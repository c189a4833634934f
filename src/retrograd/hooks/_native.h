/* The parts of `_native`, each in the file that holds its idea. */
#ifndef RETROGRAD_NATIVE_H
#define RETROGRAD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* Make a type and put it into the module, which holds it; borrowed, or NULL with an exception. */
PyObject *add_type(PyObject *module, PyType_Spec *spec, const char *name);

/* _taps.c */
bool add_taps(PyObject *module);
PyObject *see_gradient(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
