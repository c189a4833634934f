/* The launcher of the CUDA slab. */
#ifndef RETROGRAD_LAUNCHER_H
#define RETROGRAD_LAUNCHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec launcher_spec;

#endif
