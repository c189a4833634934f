/* What is done with a tensor of a site: its statistics go into a row, and a reference to it is kept, or one of them. */

#include "_taps.h"

PyObject *tensor_type;
static PyObject *strided, *is_transformed;
static PyObject *s_layout, *s_detach, *s_version, *s_nbytes, *s_held, *s_budget, *s_admit, *s_keep, *s_kept;
static const Name NAMES[] = {
    {&s_layout, "layout"}, {&s_detach, "detach"}, {&s_version, "_version"}, {&s_nbytes, "nbytes"}, {&s_held, "held"},
    {&s_budget, "budget"}, {&s_admit, "admit"}, {&s_keep, "keep"}, {&s_kept, "kept"},
};

int learn_target(void)
{
    if (INTERN(NAMES) < 0 || !(tensor_type = import_from("torch", "Tensor"))) return -1;
    strided = import_from("torch", "strided");
    is_transformed = strided ? import_from("torch._C._functorch", "is_functorch_wrapped_tensor") : NULL;
    return is_transformed ? 0 : -1;
}

/* ---- for all ---- */

PyObject *import_from(const char *module, const char *name)
{
    PyObject *room = PyImport_ImportModule(module), *found = room ? PyObject_GetAttrString(room, name) : NULL;
    Py_XDECREF(room);
    return found;
}

bool is_on(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_True;
}

long long number(PyObject *object)
{
    long long value = object ? PyLong_AsLongLong(object) : -1;
    Py_XDECREF(object);
    return value;
}

bool set_number(PyObject *object, PyObject *name, long long value)
{
    PyObject *boxed = PyLong_FromLongLong(value);
    bool fine = boxed && PyObject_SetAttr(object, name, boxed) == 0;
    Py_XDECREF(boxed);
    return fine;
}

void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- references: `TensorRecorder._keep` of site_recorder.py, and `TensorKeeper.admit` of keep.py ---- */

/* Make a reference that holds no graph, and read its version. NULL where that is Python's to do: the tensor has no values
   of its own, counts no versions (an inference tensor), or is not strided. */
static PyObject *refer_to(PyObject *tensor, PyObject **version)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(is_transformed, tensor, NULL);
    PyObject *layout = answer == Py_False ? PyObject_GetAttr(tensor, s_layout) : NULL;
    bool is_plain = layout && layout == strided;
    Py_XDECREF(answer);
    Py_XDECREF(layout);
    PyObject *kept = is_plain ? PyObject_CallMethodObjArgs(tensor, s_detach, NULL) : NULL;
    *version = kept ? PyObject_GetAttr(kept, s_version) : NULL;
    if (*version) return kept;
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(); /* Python finds it again */
    Py_XDECREF(kept);
    return NULL;
}

/* Count the bytes of what is kept; where there is no room, Python makes some. Its bytes, or None where it cannot. */
static PyObject *admit(const Target *target, PyObject *kept)
{
    PyObject *size = PyObject_GetAttr(kept, s_nbytes);
    long long more = size ? PyLong_AsLongLong(size) : -1, held = number(PyObject_GetAttr(target->keeper, s_held));
    long long budget = number(PyObject_GetAttr(target->keeper, s_budget));
    if (!PyErr_Occurred() && held + more <= budget && set_number(target->keeper, s_held, held + more)) return size;
    Py_XDECREF(size);
    PyErr_Clear(); /* Python's numbers have no end */
    PyObject *keep = PyObject_GetAttr(target->recorder, s_keep);
    PyObject *admitted = keep ? PyObject_CallMethodObjArgs(target->keeper, s_admit, keep, kept, NULL) : NULL;
    Py_XDECREF(keep);
    if (!admitted && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(); /* Python finds it again */
    return admitted;
}

/* Take back what admit has counted, since the tensor could not be read; its exception stays. */
static void dismiss(const Target *target, PyObject *size)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    long long held = number(PyObject_GetAttr(target->keeper, s_held)), less = PyLong_AsLongLong(size);
    if (PyErr_Occurred() || !set_number(target->keeper, s_held, held - less)) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
}

/* False with an exception. */
static bool hold(const Target *target, PyObject *kept, PyObject *version, PyObject *size)
{
    PyObject *list = PyObject_GetAttr(target->buffer, s_kept);
    PyObject *entry = list ? PyTuple_Pack(4, target->recorder, kept, version, size) : NULL;
    bool fine = entry && PyList_Append(list, entry) == 0;
    Py_XDECREF(entry);
    Py_XDECREF(list);
    return fine;
}

/* ---- both ---- */

PyObject *take_in(const Target *shared, PyObject *tensor)
{
    if ((!shared->observe && !shared->keeper) || (PyObject *)Py_TYPE(tensor) != tensor_type) return NULL;
    Target target = { /* another thread may bind others */
        Py_XNewRef(shared->observe), Py_XNewRef(shared->row), Py_XNewRef(shared->recorder), Py_XNewRef(shared->keeper),
        Py_XNewRef(shared->buffer),
    };
    PyObject *version = NULL, *kept = target.keeper ? refer_to(tensor, &version) : NULL, *answer = NULL;
    PyObject *size = kept ? admit(&target, kept) : NULL; /* first, for what fails is done anew in Python, all of it */
    if (size || !target.keeper)
        answer = target.observe ? PyObject_CallFunctionObjArgs(target.observe, tensor, target.row, NULL)
                                : Py_NewRef(Py_None);
    if (size && size != Py_None) {
        if (!answer) dismiss(&target, size);
        else if (!hold(&target, kept, version, size)) Py_CLEAR(answer);
    }
    Py_XDECREF(size);
    Py_XDECREF(version);
    Py_XDECREF(kept);
    clear_target(&target);
    return answer;
}

static void replace(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    *place = Py_XNewRef(object);
    Py_XDECREF(old);
}

PyObject *bind_target(Target *target, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "bind(observe, row) takes 2 arguments, not %zd", n_args);
    bool is_bound = args[0] != Py_None;
    if (!is_bound) clear_target(target);
    replace(&target->row, is_bound ? args[1] : NULL);
    replace(&target->observe, is_bound ? args[0] : NULL);
    Py_RETURN_NONE;
}

PyObject *bind_keeper(Target *target, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 3)
        return PyErr_Format(PyExc_TypeError, "keep(recorder, keeper, buffer) takes 3 arguments, not %zd", n_args);
    replace(&target->recorder, args[0]);
    replace(&target->buffer, args[2]);
    replace(&target->keeper, args[1]); /* last: it says that the others are there */
    Py_RETURN_NONE;
}

int visit_target(const Target *target, visitproc visit, void *arg)
{
    Py_VISIT(target->observe);
    Py_VISIT(target->recorder);
    Py_VISIT(target->keeper);
    Py_VISIT(target->buffer);
    return 0;
}

void clear_target(Target *target)
{
    Py_CLEAR(target->keeper);
    Py_CLEAR(target->observe);
    Py_CLEAR(target->row);
    Py_CLEAR(target->recorder);
    Py_CLEAR(target->buffer);
}
