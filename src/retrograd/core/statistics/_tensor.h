/* What a tensor's Python object tells about its memory. */
#ifndef RETROGRAD_TENSOR_H
#define RETROGRAD_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "_elements.h"

/* Look up all that is needed of torch; -1 with an exception when that fails. */
int learn_torch(void);

/* Find the elements of a tensor in memory, not yet arranged, and return how many there are. A tensor that is not on
   the CPU, not strided, of another kind, or without memory gives -1, and leaves an exception or none. */
int64_t find_elements(PyObject *tensor, Elements *out);

/* The same, in the memory of a device: of this type, as DLPack numbers them, and this number among those of its type. */
typedef enum { ON_CPU = 1, ON_CUDA = 2 } DeviceType;
int64_t find_elements_on(DeviceType type, int32_t number, PyObject *tensor, Elements *out);

/* New references, NULL with an exception on failure. */
PyObject *requires_grad_of(PyObject *tensor);
PyObject *contiguous_copy(PyObject *tensor);

/* The number that grows with each change of the data, and where they are. Without an exception -1 and NULL where
   that cannot be told. */
int64_t version_of(PyObject *tensor);
const char *data_of(PyObject *tensor);

#endif
