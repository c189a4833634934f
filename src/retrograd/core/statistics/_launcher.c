/* Launches the kernel of cuda_kernel.py on the elements of a tensor, through CUDA's driver.

   Triton's own launch takes tens of microseconds of Python for each tensor, which is more than most kernels of a small
   net run. It compiles, and launches what is new; here its compiled kernels are launched again. */

#include "_launcher.h"

#include <stdint.h>

#include "_tensor.h"

enum {
    PER_PROGRAM = 4096, /* elements that a program reads at once, BLOCK of cuda_kernel.py */
    WIDTH = 16,         /* bytes, and elements: Triton compiles other kernels for multiples of it */
    STREAMS = 8,
};

/* Of CUDA's driver: 0 is success. */
typedef int (*Launch)(
    void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);
typedef int (*FindDevice)(int *number);

/* Of addresses, and of addresses and numbers of elements: multiples of WIDTH. */
typedef enum { UNALIGNED, ALIGNED, EVEN, FORMS } Form;

typedef struct {
    void *function; /* NULL where none is known yet */
    unsigned threads, shared;
} Compiled;

typedef struct {
    PyObject_HEAD
    PyObject *find_stream, *number_object; /* a function of the number of a device */
    DeviceType type;
    int32_t number;
    Launch launch;
    FindDevice find_device;
    Compiled compiled[KINDS][2][FORMS]; /* by kind, whether it is an update, form */
    uint64_t streams[STREAMS];          /* those that were used since streams were taken */
    int n_streams;
} Launcher;

static bool is_aligned(const Elements *e) { return (uintptr_t)e->data % WIDTH == 0; }

static Form form_of(const Elements *e, int64_t count)
{
    return !is_aligned(e) ? UNALIGNED : count % WIDTH ? ALIGNED : EVEN;
}

static bool is_row(const Elements *e) { return e->n_dims == 1 && e->strides[0] == 1; }

/* Find elements that fill their memory, each once, in the order of their dimensions or, sorted, in any. -1 without an
   exception where there are others. */
static int64_t find_dense(const Launcher *launcher, PyObject *tensor, bool sorted, Elements *e)
{
    int64_t count = find_elements_on(launcher->type, launcher->number, tensor, e);
    PyErr_Clear();
    if (count <= 0) return count;
    if (sorted && !is_row(e)) {
        arrange(e);
        if (e->repeats != 1) return -1;
    }
    return is_row(e) && count < INT32_MAX ? count : -1;
}

/* -1 without an exception where no more are remembered, with one where the stream cannot be told. */
static int note_stream(Launcher *launcher, uint64_t *stream)
{
    PyObject *found = PyObject_CallFunctionObjArgs(launcher->find_stream, launcher->number_object, NULL);
    *stream = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(found);
    if (PyErr_Occurred()) return -1;
    for (int k = 0; k < launcher->n_streams; k++)
        if (launcher->streams[k] == *stream) return 0;
    if (launcher->n_streams == STREAMS) return -1;
    launcher->streams[launcher->n_streams++] = *stream;
    return 0;
}

static PyObject *launcher_read(Launcher *launcher, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 7)
        return PyErr_Format(PyExc_TypeError, "read(new, old, parts, bins, line, row, programs) takes 7 arguments");
    uint64_t parts = PyLong_AsUnsignedLongLong(args[2]), bins = PyLong_AsUnsignedLongLong(args[3]);
    int64_t line = PyLong_AsLongLong(args[4]), row = PyLong_AsLongLong(args[5]), repeats = 1; /* it may read four bytes */
    long most = PyLong_AsLong(args[6]);
    if (PyErr_Occurred()) return NULL;

    Elements new, old;
    bool is_update = args[1] != Py_None;
    int64_t count = find_dense(launcher, args[0], !is_update, &new);
    if (count > 0 && is_update) {
        if (find_dense(launcher, args[1], false, &old) != count || old.kind != new.kind) count = -1;
    } else if (!is_update) {
        old = new;
    }
    if (count <= 0 || is_aligned(&new) != is_aligned(&old)) return PyLong_FromLong(count ? -1 : 0);
    const Compiled *compiled = &launcher->compiled[new.kind][is_update][form_of(&new, count)];
    int device;
    uint64_t stream;
    if (!compiled->function || launcher->find_device(&device) != 0 || device != launcher->number)
        return PyLong_FromLong(-1);
    if (note_stream(launcher, &stream) < 0) return PyErr_Occurred() ? NULL : PyLong_FromLong(-1);

    int64_t programs = (count + PER_PROGRAM - 1) / PER_PROGRAM;
    if (programs > most) programs = most;
    uint64_t scratch = 0; /* of which the kernel takes none, in two parameters that Triton adds */
    void *parameters[] = {&new.data, &old.data, &parts, &bins, &count, &line, &row, &repeats, &scratch, &scratch};
    int error = launcher->launch(
        compiled->function, (unsigned)programs, 1, 1, compiled->threads, 1, 1, compiled->shared,
        (void *)(uintptr_t)stream, parameters, NULL);
    return PyLong_FromLongLong(error ? -1 : programs);
}

static PyObject *launcher_learn(Launcher *launcher, PyObject *args)
{
    PyObject *new, *old;
    unsigned long long function;
    unsigned threads, shared;
    if (!PyArg_ParseTuple(args, "OOKII:learn", &new, &old, &function, &threads, &shared)) return NULL;
    Elements a, b;
    bool is_update = old != Py_None;
    int64_t count = find_dense(launcher, new, !is_update, &a);
    if (count <= 0) Py_RETURN_NONE;
    if (is_update && find_dense(launcher, old, false, &b) <= 0) Py_RETURN_NONE;
    if (is_update && is_aligned(&a) != is_aligned(&b)) Py_RETURN_NONE;
    launcher->compiled[a.kind][is_update][form_of(&a, count)] =
        (Compiled){(void *)(uintptr_t)function, threads, shared};
    Py_RETURN_NONE;
}

static PyObject *launcher_take_streams(Launcher *launcher, PyObject *Py_UNUSED(none))
{
    PyObject *streams = PyList_New(0);
    for (int k = 0; streams && k < launcher->n_streams; k++) {
        PyObject *stream = PyLong_FromUnsignedLongLong(launcher->streams[k]);
        if (!stream || PyList_Append(streams, stream) < 0) Py_CLEAR(streams);
        Py_XDECREF(stream);
    }
    launcher->n_streams = 0;
    return streams;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"on", "number", "find_stream", "launch", "find_device", NULL};
    int number, device_type;
    PyObject *find_stream;
    unsigned long long launch, find_device;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "iiOKK:Launcher", names, &device_type, &number, &find_stream, &launch, &find_device))
        return NULL;
    Launcher *launcher = (Launcher *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!launcher) return NULL;
    launcher->type = (DeviceType)device_type;
    launcher->number = number;
    launcher->number_object = PyLong_FromLong(number);
    launcher->find_stream = Py_NewRef(find_stream);
    launcher->launch = (Launch)(uintptr_t)launch;
    launcher->find_device = (FindDevice)(uintptr_t)find_device;
    return (PyObject *)launcher;
}

static void launcher_dealloc(Launcher *launcher)
{
    PyTypeObject *type = Py_TYPE((PyObject *)launcher);
    Py_XDECREF(launcher->find_stream);
    Py_XDECREF(launcher->number_object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(launcher);
    Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"read", (PyCFunction)(void (*)(void))launcher_read, METH_FASTCALL,
     "read(new, old, parts, bins, line, row, programs): read a tensor, or its difference to old if that is not None. "
     "Returns how many programs read it, or -1: it has to be read otherwise."},
    {"learn", (PyCFunction)launcher_learn, METH_VARARGS,
     "learn(new, old, function, threads, shared): launch this for all tensors that are of the kind of these."},
    {"take_streams", (PyCFunction)launcher_take_streams, METH_NOARGS,
     "take_streams(): the streams on which something was launched since they were taken."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "Launcher(on, number, find_stream, launch, find_device): launches kernels on the device of this type, "
                "as DLPack has it, and number; the last two are addresses of cuLaunchKernel and cuCtxGetDevice."},
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_methods, launcher_methods},
    {0, NULL},
};

PyType_Spec launcher_spec = {
    .name = "retrograd.core.statistics._kernel.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = launcher_slots,
};
