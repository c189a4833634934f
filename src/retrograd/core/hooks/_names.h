/* Names of Python attributes, which are strings that are made once. */
#ifndef RETROGRAD_NAMES_H
#define RETROGRAD_NAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct { PyObject **string; const char *text; } Name;

/* Make strings of these names; -1 with an exception. */
static inline int intern_names(const Name *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!(*names[i].string = PyUnicode_InternFromString(names[i].text))) return -1;
    return 0;
}
#define INTERN(names) intern_names(names, sizeof names / sizeof *names)

#endif
