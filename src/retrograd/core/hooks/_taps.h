/* What runs for every tensor that is recorded, without a Python frame.

   _target.c      what is done with a tensor: its statistics, and a reference to it
   _output_tap.c  finds who records what a module returned
   _taps.c        who records one site: the value, the hook on the gradient, and what sets it; and the Python module

   All know the plain case alone, a tensor of torch's own class; whatever else comes is left to Python. Nothing is known
   of torch but Python attributes and functions. All of it runs with the GIL held, but what the slab does. */
#ifndef RETROGRAD_TAPS_H
#define RETROGRAD_TAPS_H

#include "_names.h"
#include <stdbool.h>
#include <stddef.h>

/* ---- _target.c ---- */

extern PyObject *tensor_type;

/* -1 with an exception where torch is not as we know it. */
int learn_target(void);

typedef struct {
    PyObject *observe, *row;             /* a slab's method, and the row; or nothing */
    PyObject *recorder, *keeper, *buffer; /* what a reference is kept for, who makes room for it, who has it; or nothing */
} Target;

/* Do with a plain tensor what is to be done. What the slab said of it, or None without one; NULL with an exception, or
   with none where it is not ours: then nothing has been done. */
PyObject *take_in(const Target *target, PyObject *tensor);

/* Methods for Python: see the pyi. */
PyObject *bind_target(Target *target, PyObject *const *args, Py_ssize_t n_args);
PyObject *bind_keeper(Target *target, PyObject *const *args, Py_ssize_t n_args);

int visit_target(const Target *target, visitproc visit, void *arg);
void clear_target(Target *target);

/* ---- for all ---- */

/* A module's attribute; a new reference, or NULL with an exception. */
PyObject *import_from(const char *module, const char *name);

/* Whether an attribute is True; an exception is cleared. */
bool is_on(PyObject *object, PyObject *name);

/* A number, or -1 with an exception; takes the reference. */
long long number(PyObject *object);

/* Set an attribute to a number; false with an exception. */
bool set_number(PyObject *object, PyObject *name, long long value);

void free_object(PyObject *self);

/* ---- _output_tap.c ---- */

extern PyType_Spec output_tap_spec;
int learn_outputs(void);

#endif
