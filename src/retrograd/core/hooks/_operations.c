/* Operations: the function mode of function_mode.py, with the listeners OperationLog and WriteNotes. */

#include "_native.h"

static PyObject *s_version, *s_log, *s_begin, *s_is_silent, *s_operations, *s_top, *s_owner, *s_insert, *s_note,
    *s_filename, *s_back, *s_lasti;
static const Name NAMES[] = {
    {&s_version, "_version"}, {&s_log, "log"}, {&s_begin, "begin"}, {&s_is_silent, "is_silent"},
    {&s_operations, "operations"}, {&s_top, "top"}, {&s_owner, "owner"}, {&s_insert, "insert"}, {&s_note, "note"},
    {&s_filename, "co_filename"}, {&s_back, "f_back"}, {&s_lasti, "f_lasti"},
};

int learn_operations(void) { return INTERN(NAMES); }

typedef struct {
    PyObject_HEAD
    PyObject *logs, *here, *writes, *otherwise, *fail; /* writes may be None */
    PyObject *tensor_type, *sequence_number, *torchs_way, *is_inner, *to_arrays;
    Py_ssize_t most;
} OperationTap;

enum { MEMBERS = 10, MOST_SEEN = 16, DEEPEST = 8, FIELDS = 6 /* of an operation, as in calls.py */ };

/* The tensors that an operation is given, and how often each had been written to. */
typedef struct {
    int count;
    bool overflows; /* there are more */
    PyObject *tensors[MOST_SEEN];
    long long versions[MOST_SEEN];
} Seen;

/* -1, and no exception, where there is none: of a tensor of inference mode. */
static long long version_of(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttr(tensor, s_version);
    long long number = version ? PyLong_AsLongLong(version) : -1;
    Py_XDECREF(version);
    PyErr_Clear();
    return number;
}

static void gather(OperationTap *tap, PyObject *value, Seen *seen, int depth)
{
    bool is_list = PyList_Check(value);
    if (PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)tap->tensor_type)) {
        long long version = seen->count < MOST_SEEN ? version_of(value) : -1;
        seen->overflows |= seen->count == MOST_SEEN;
        if (version < 0) return;
        seen->tensors[seen->count] = Py_NewRef(value);
        seen->versions[seen->count++] = version;
    } else if (is_list || PyTuple_Check(value) || PyDict_Check(value)) {
        if (depth == DEEPEST) seen->overflows = true;
        if (seen->overflows) return;
        PyObject *key, *item;
        Py_ssize_t at = 0;
        if (PyDict_Check(value))
            while (PyDict_Next(value, &at, &key, &item)) gather(tap, item, seen, depth + 1);
        else
            for (; at < (is_list ? PyList_Size(value) : PyTuple_Size(value)); at++)
                gather(tap, is_list ? PyList_GetItem(value, at) : PyTuple_GetItem(value, at), seen, depth + 1);
    }
}

/* Tell of what was written to, or given away; forget all that was seen. */
static bool tell_writes(OperationTap *tap, Seen *seen, PyObject *function, PyObject *frame)
{
    bool gives = false;
    for (Py_ssize_t at = 0; at < PyTuple_Size(tap->to_arrays); at++)
        gives |= PyTuple_GetItem(tap->to_arrays, at) == function;
    PyObject *told = NULL;
    bool fine = true;
    for (int at = 0; at < seen->count; at++) {
        if (fine && (gives || version_of(seen->tensors[at]) != seen->versions[at])) {
            if (!told) told = PyList_New(0);
            PyObject *version = PyLong_FromLongLong(seen->versions[at]);
            fine = told && version && append(told, PyTuple_Pack(2, seen->tensors[at], version));
            Py_XDECREF(version);
        }
        Py_DECREF(seen->tensors[at]);
    }
    seen->count = 0;
    PyObject *noted = fine && told
        ? PyObject_CallMethodObjArgs(tap->writes, s_note, told, function, frame, NULL) : NULL;
    fine = fine && (!told || noted);
    Py_XDECREF(noted);
    Py_XDECREF(told);
    return fine;
}

/* 1 if the code of a frame is none of the user's, 0 if it is, -1 with an exception. */
static int is_inner(OperationTap *tap, PyObject *code)
{
    PyObject *file = PyObject_GetAttr(code, s_filename);
    PyObject *answer = file ? PyObject_GetItem(tap->is_inner, file) : NULL;
    int inner = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(file);
    Py_XDECREF(answer);
    return inner;
}

/* Replace a frame, of which we have a reference, by that of the user's around it, if there is one; a new reference to
   its code, or NULL with an exception. */
static PyObject *find_user(OperationTap *tap, PyObject **frame)
{
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)*frame);
    int inner;
    while ((inner = is_inner(tap, code)) == 1) {
        PyObject *outer = PyObject_GetAttr(*frame, s_back);
        if (!outer || outer == Py_None) {
            Py_XDECREF(outer);
            inner = outer ? 0 : -1;
            break;
        }
        Py_DECREF(code);
        Py_DECREF(*frame);
        *frame = outer;
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)outer);
    }
    if (inner < 0) Py_CLEAR(code);
    return code;
}

/* To whom what runs now belongs. */
static PyObject *owner_in(PyObject *log)
{
    PyObject *top = PyObject_GetAttr(log, s_top);
    if (top != Py_None) return top;
    Py_DECREF(top);
    return PyObject_CallMethodObjArgs(log, s_owner, NULL);
}

/* Put the fields of an operation, a new reference that is let go of, behind those of all others. */
static bool extend(PyObject *operations, PyObject *fields)
{
    Py_ssize_t end = PyList_Size(operations);
    bool fine = fields && PyList_SetSlice(operations, end, end, fields) == 0;
    Py_XDECREF(fields);
    return fine;
}

/* Whether the last operation that was noted ends at a larger number; -1 with an exception. */
static int overlaps(PyObject *operations, PyObject *first)
{
    PyObject *last = PyList_GetItem(operations, PyList_Size(operations) - FIELDS + 1);
    return last ? PyObject_RichCompareBool(last, first, Py_GT) : -1;
}

static bool note_in(OperationTap *tap, PyObject *log, PyObject *first, PyObject *last, PyObject *function,
                    PyObject *caller)
{
    PyObject *frame = Py_NewRef(caller), *code = find_user(tap, &frame), *none = NULL;
    PyObject *offset = code ? PyObject_GetAttr(frame, s_lasti) : NULL, *owner = offset ? owner_in(log) : NULL;
    PyObject *operations = owner ? PyObject_GetAttr(log, s_operations) : NULL;
    int inserts = operations ? overlaps(operations, first) : -1;
    if (inserts == 1 || (inserts == 0 && PyList_Size(operations) > tap->most))
        none = PyObject_CallMethodObjArgs(log, s_insert, first, last, code, offset, function, owner, NULL);
    else if (inserts == 0 && extend(operations, PyTuple_Pack(FIELDS, first, last, code, offset, function, owner)))
        none = Py_NewRef(Py_None);
    Py_DECREF(frame);
    Py_XDECREF(code);
    Py_XDECREF(offset);
    Py_XDECREF(owner);
    Py_XDECREF(operations);
    Py_XDECREF(none);
    return none != NULL;
}

/* Note an operation that has made nodes. */
static bool note_operation(OperationTap *tap, PyObject *first, PyObject *last, PyObject *function, PyObject *frame)
{
    PyObject *log = PyObject_GetAttr(tap->here, s_log);
    if (log == Py_None) {
        Py_DECREF(log);
        log = PyObject_CallMethodObjArgs(tap->logs, s_begin, NULL);
    }
    PyObject *silent = log ? PyObject_GetAttr(log, s_is_silent) : NULL;
    bool fine = silent && (silent == Py_True || note_in(tap, log, first, last, function, frame));
    Py_XDECREF(silent);
    Py_XDECREF(log);
    return fine;
}

/* A fault of ours must not stop the program: whoever made this is told of it. */
static void tell_fault(OperationTap *tap)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *told = error ? PyObject_CallFunctionObjArgs(tap->fail, error, NULL) : NULL;
    if (!told) PyErr_Clear();
    Py_XDECREF(told);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static PyObject *call_noted(OperationTap *tap, PyObject *function, PyObject *args, PyObject *kwargs, PyObject *frame,
                            Seen *seen)
{
    PyObject *first = PyObject_CallNoArgs(tap->sequence_number), *last = NULL;
    if (!first) tell_fault(tap);
    PyObject *result = PyObject_Call(function, args, kwargs);
    if (!result) {
        while (seen->count) Py_DECREF(seen->tensors[--seen->count]);
    } else if (first) {
        bool fine = tap->writes == Py_None || tell_writes(tap, seen, function, frame);
        last = fine ? PyObject_CallNoArgs(tap->sequence_number) : NULL;
        int made = last ? PyObject_RichCompareBool(last, first, Py_NE) : -1;
        if (made < 0 || (made && !note_operation(tap, first, last, function, frame))) tell_fault(tap);
    }
    Py_XDECREF(first);
    Py_XDECREF(last);
    return result;
}

static PyObject *tap_call(OperationTap *tap, PyObject *const *args, Py_ssize_t n_args)
{
    args++, n_args--; /* the mode, whose method this is */
    if (n_args < 3 || n_args > 4) return PyErr_Format(PyExc_TypeError, "call(mode, function, types, args, kwargs)");
    PyObject *kwargs = n_args == 4 && PyDict_Check(args[3]) ? args[3] : NULL, *result;
    PyObject *frame = Py_XNewRef((PyObject *)PyEval_GetFrame());
    PyObject *code = frame ? (PyObject *)PyFrame_GetCode((PyFrameObject *)frame) : NULL;
    Seen seen = {.count = 0, .overflows = !code || code == tap->torchs_way || !PyTuple_Check(args[2])};
    if (tap->writes != Py_None && !seen.overflows) {
        gather(tap, args[2], &seen, 0);
        if (kwargs) gather(tap, kwargs, &seen, 0);
    }
    if (seen.overflows) {
        while (seen.count) Py_DECREF(seen.tensors[--seen.count]);
        PyObject *none = kwargs ? Py_NewRef(kwargs) : PyDict_New();
        result = none ? PyObject_CallFunctionObjArgs(tap->otherwise, args[0], args[1], args[2], none, NULL) : NULL;
        Py_XDECREF(none);
    } else {
        result = call_noted(tap, args[0], args[2], kwargs, frame, &seen);
    }
    Py_XDECREF(code);
    Py_XDECREF(frame);
    return result;
}

static PyObject **tap_members(OperationTap *tap) { return &tap->logs; }

static PyObject *tap_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"logs", "here", "writes", "otherwise", "fail", "tensor_type", "sequence_number",
                            "torchs_way", "is_inner", "to_arrays", "most", NULL};
    PyObject *given[MEMBERS];
    Py_ssize_t most;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOO!OOOO!n:OperationTap", names, &given[0], &given[1],
                                     &given[2], &given[3], &given[4], &PyType_Type, &given[5], &given[6], &given[7],
                                     &given[8], &PyTuple_Type, &given[9], &most)) return NULL;
    OperationTap *tap = (OperationTap *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!tap) return NULL;
    for (int k = 0; k < MEMBERS; k++) tap_members(tap)[k] = Py_NewRef(given[k]);
    tap->most = most;
    return (PyObject *)tap;
}

static int tap_traverse(OperationTap *tap, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)tap));
    for (int k = 0; k < MEMBERS; k++) Py_VISIT(tap_members(tap)[k]);
    return 0;
}

static void tap_dealloc(OperationTap *tap)
{
    PyTypeObject *type = Py_TYPE((PyObject *)tap);
    PyObject_GC_UnTrack(tap);
    for (int k = 0; k < MEMBERS; k++) Py_XDECREF(tap_members(tap)[k]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(tap);
    Py_DECREF(type);
}

static PyMethodDef tap_methods[] = {
    {"call", (PyCFunction)(void (*)(void))tap_call, METH_FASTCALL,
     "call(mode, function, types, args, kwargs): call a torch function, and note what it makes and writes to."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tap_slots[] = {
    {Py_tp_doc, "OperationTap(logs, here, writes, otherwise, fail, …): notes operations of a function mode."},
    {Py_tp_new, tap_new},
    {Py_tp_dealloc, tap_dealloc},
    {Py_tp_traverse, tap_traverse},
    {Py_tp_methods, tap_methods},
    {0, NULL},
};

PyType_Spec operation_tap_spec = {
    .name = "retrograd.core.hooks._native.OperationTap",
    .basicsize = sizeof(OperationTap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = tap_slots,
};
