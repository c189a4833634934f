/* What a module returned, on its way to who records that call: `SlotWatch.after_forward` of module_watch.py.

   A tensor by itself, in a step that is recorded, at a call that has been seen before, where nothing of torch stands
   between: no backward pass, no function mode. All else, and whoever has to be told of it, is Python's. */

#include "_taps.h"

enum { NO_PASS = -1, MODES = 3 };

static PyObject *pass_number, *count_modes, *grad_enabled;
static PyObject *s_on, *s_buffer, *s_serial, *s_count, *s_plain, *s_unhooked, *s_touched, *s_visit;
static const Name NAMES[] = {
    {&s_on, "on"}, {&s_buffer, "buffer"}, {&s_serial, "serial"}, {&s_count, "count"},
    {&s_plain, "plain"}, {&s_unhooked, "unhooked"}, {&s_touched, "touched"}, {&s_visit, "visit"},
};

int learn_outputs(void)
{
    if (INTERN(NAMES) < 0 || !(pass_number = import_from("torch._C", "_current_graph_task_id"))) return -1;
    if (!(count_modes = import_from("torch._C", "_len_torch_function_stack"))) return -1;
    return (grad_enabled = import_from("torch", "is_grad_enabled")) ? 0 : -1;
}

typedef struct { PyObject *buffer, *calls, *plain, *unhooked; } Counted; /* a buffer, its calls, and two lists of these */

typedef struct {
    PyObject_HEAD
    PyObject *clock, *unhooked, *fault;
    Counted modes[MODES];
} OutputTap;

/* The calls in the buffer of the forward that runs, where its outputs are plain ones; NULL with no exception if not. */
static const Counted *find_calls(const OutputTap *tap)
{
    PyObject *buffer = is_on(tap->clock, s_on) ? PyObject_GetAttr(tap->clock, s_buffer) : NULL;
    const Counted *found = NULL;
    for (int i = 0; buffer && i < MODES; i++)
        if (tap->modes[i].buffer == buffer) found = &tap->modes[i];
    Py_XDECREF(buffer);
    if (found && (number(PyObject_CallNoArgs(pass_number)) != NO_PASS || number(PyObject_CallNoArgs(count_modes))))
        found = NULL;
    PyErr_Clear();
    return found;
}

/* The recorder of the next call, which is counted, and its number; a new reference. NULL where there is none by now, or
   with an exception: then the call is not counted. */
static PyObject *next_recorder(const Counted *of, long long *call)
{
    long long serial = number(PyObject_GetAttr(of->buffer, s_serial));
    long long last = number(PyObject_GetAttr(of->calls, s_serial));
    if (PyErr_Occurred()) return NULL;
    bool is_first = serial != last;
    *call = is_first ? 0 : number(PyObject_GetAttr(of->calls, s_count));
    if (*call < 0 || *call >= PyList_Size(of->plain) || (is_first && PyList_Size(of->unhooked))) return NULL;
    PyObject *recorder = PyList_GetItem(of->plain, (Py_ssize_t)*call);
    if (!recorder || recorder == Py_None) return NULL;
    Py_INCREF(recorder);
    bool fine = set_number(of->calls, s_count, *call + 1) && (!is_first || (
        set_number(of->calls, s_serial, serial) && PyObject_SetAttr(of->buffer, s_touched, Py_True) == 0));
    if (!fine) Py_CLEAR(recorder);
    return recorder;
}

/* Hand the exception on as Python does: to who takes faults, unless it is to end the program. NULL if it is. */
static PyObject *tell_fault(const OutputTap *tap)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *done = PyObject_CallFunctionObjArgs(tap->fault, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_True) : NULL;
}

/* Have Python note a call whose gradient has no hook, since a checkpoint may compute it again; false with an exception. */
static bool await_hook(const OutputTap *tap, const Counted *of, long long call)
{
    PyObject *has_grad = of == tap->modes ? PyObject_CallNoArgs(grad_enabled) : Py_NewRef(Py_True), *done = has_grad;
    if (has_grad == Py_False) {
        PyObject *number = PyLong_FromLongLong(call);
        done = number ? PyObject_CallFunctionObjArgs(tap->unhooked, of->buffer, of->calls, number, NULL) : NULL;
        Py_XDECREF(number);
        Py_DECREF(has_grad);
    }
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *output_see(OutputTap *tap, PyObject *output)
{
    const Counted *of = (PyObject *)Py_TYPE(output) == tensor_type ? find_calls(tap) : NULL;
    if (!of) Py_RETURN_FALSE;
    long long call;
    PyObject *recorder = next_recorder(of, &call);
    if (!recorder && !PyErr_Occurred()) Py_RETURN_FALSE;
    PyObject *visit = recorder ? PyObject_GetAttr(recorder, s_visit) : NULL;
    PyObject *hooked = visit ? PyObject_CallFunctionObjArgs(visit, output, NULL) : NULL;
    if (hooked && hooked != Py_True && !await_hook(tap, of, call)) Py_CLEAR(hooked);
    Py_XDECREF(visit);
    Py_XDECREF(recorder);
    if (!hooked) return tell_fault(tap);
    Py_DECREF(hooked);
    Py_RETURN_TRUE;
}

/* ---- the type ---- */

static bool learn_calls(Counted *of, PyObject *pair)
{
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "OutputTap takes pairs of a buffer and its calls");
        return false;
    }
    of->buffer = Py_NewRef(PyTuple_GetItem(pair, 0)), of->calls = Py_NewRef(PyTuple_GetItem(pair, 1));
    of->plain = PyObject_GetAttr(of->calls, s_plain);
    of->unhooked = of->plain ? PyObject_GetAttr(of->calls, s_unhooked) : NULL;
    return of->unhooked != NULL;
}

static PyObject *output_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"clock", "grad", "no_grad", "inference", "unhooked", "fault", NULL};
    PyObject *clock, *pairs[MODES], *unhooked, *fault;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOO:OutputTap", names, &clock, &pairs[0], &pairs[1], &pairs[2],
                                     &unhooked, &fault)) return NULL;
    OutputTap *tap = (OutputTap *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!tap) return NULL;
    tap->clock = Py_NewRef(clock), tap->unhooked = Py_NewRef(unhooked), tap->fault = Py_NewRef(fault);
    for (int i = 0; i < MODES; i++)
        if (!learn_calls(&tap->modes[i], pairs[i])) {
            Py_DECREF(tap);
            return NULL;
        }
    return (PyObject *)tap;
}

static int output_traverse(OutputTap *tap, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)tap));
    Py_VISIT(tap->clock);
    Py_VISIT(tap->unhooked);
    Py_VISIT(tap->fault);
    for (int i = 0; i < MODES; i++) {
        Py_VISIT(tap->modes[i].buffer);
        Py_VISIT(tap->modes[i].calls);
        Py_VISIT(tap->modes[i].plain);
        Py_VISIT(tap->modes[i].unhooked);
    }
    return 0;
}

static int output_clear(OutputTap *tap)
{
    Py_CLEAR(tap->unhooked); /* which lead back to whoever has the tap; the others lead nowhere */
    Py_CLEAR(tap->fault);
    return 0;
}

static void output_dealloc(OutputTap *tap)
{
    PyObject_GC_UnTrack(tap);
    output_clear(tap);
    Py_XDECREF(tap->clock);
    for (int i = 0; i < MODES; i++) {
        Py_XDECREF(tap->modes[i].buffer);
        Py_XDECREF(tap->modes[i].calls);
        Py_XDECREF(tap->modes[i].plain);
        Py_XDECREF(tap->modes[i].unhooked);
    }
    free_object((PyObject *)tap);
}

static PyMethodDef output_methods[] = {
    {"see", (PyCFunction)output_see, METH_O,
     "see(output): record it if it is a plain one; returns whether nothing is left to be done."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot output_slots[] = {
    {Py_tp_doc, "OutputTap(clock, grad, no_grad, inference, unhooked, fault): sees what one module returns."},
    {Py_tp_new, output_new},
    {Py_tp_dealloc, output_dealloc},
    {Py_tp_traverse, output_traverse},
    {Py_tp_clear, output_clear},
    {Py_tp_methods, output_methods},
    {0, NULL},
};

PyType_Spec output_tap_spec = {
    .name = "retrograd.core.hooks._taps.OutputTap",
    .basicsize = sizeof(OutputTap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = output_slots,
};
