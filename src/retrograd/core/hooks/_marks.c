/* What is noted of each node as it runs. */

#include "_native.h"

static PyObject *s_sequence_nr, *s_shape, *s_dtype, *s_device;
static const Name NAMES[] = {
    {&s_sequence_nr, "_sequence_nr"}, {&s_shape, "shape"}, {&s_dtype, "dtype"}, {&s_device, "device"},
};

int learn_marks(void) { return INTERN(NAMES); }

/* ---- the last events: `see` of ring.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *writers, *kinds, *meet, *current_node, *clock;
    Py_buffer memory;
    uint64_t mask;
} Pen;

enum { ENTRY = 4 }; /* numbers of 8 bytes: when, number, what, count */

/* False, perhaps with an exception, if thread or kind have not been met. */
static bool write_entry(Pen *pen, PyObject *node)
{
    PyObject *ident = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    PyObject *writer = ident ? PyDict_GetItemWithError(pen->writers, ident) : NULL;
    Py_XDECREF(ident);
    PyObject *kind = writer ? PyDict_GetItemWithError(pen->kinds, (PyObject *)Py_TYPE(node)) : NULL;
    if (!kind) return false;
    uint64_t what = PyLong_AsUnsignedLongLong(kind), base = PyLong_AsUnsignedLongLong(PyTuple_GetItem(writer, 1));
    uint64_t stamp = unsigned_of(PyObject_CallNoArgs(PyTuple_GetItem(writer, 0)));
    uint64_t place = base + (stamp & pen->mask) * ENTRY * sizeof(uint64_t);
    uint64_t now = unsigned_of(PyObject_CallNoArgs(pen->clock));
    uint64_t number = unsigned_of(PyObject_CallMethodObjArgs(node, s_sequence_nr, NULL));
    if (PyErr_Occurred() || place + ENTRY * sizeof(uint64_t) > (uint64_t)pen->memory.len) return false;
    volatile uint64_t *entry = (volatile uint64_t *)((char *)pen->memory.buf + place);
    entry[0] = now, entry[1] = number, entry[2] = what, entry[3] = stamp; /* in this order: the count is last */
    return true;
}

static PyObject *pen_see(Pen *pen, PyObject *Py_UNUSED(gradient))
{
    PyObject *node = PyObject_CallNoArgs(pen->current_node), *met = NULL;
    bool written = node && node != Py_None && write_entry(pen, node);
    if (!written) PyErr_Clear(); /* the program's backward pass goes on whatever becomes of ours */
    if (node && !written) met = PyObject_CallFunctionObjArgs(pen->meet, node, NULL);
    if (!met) PyErr_Clear();
    Py_XDECREF(met);
    Py_XDECREF(node);
    Py_RETURN_NONE;
}

static PyObject *pen_exchange(Pen *pen, PyObject *memory)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) < 0) return NULL;
    PyBuffer_Release(&pen->memory);
    pen->memory = view;
    Py_RETURN_NONE;
}

static PyObject *pen_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "capacity", "writers", "kinds", "meet", "current_node", "clock", NULL};
    PyObject *memory, *writers, *kinds, *meet, *current_node, *clock;
    unsigned long long capacity;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKO!O!OOO:Pen", names, &memory, &capacity, &PyDict_Type, &writers,
                                     &PyDict_Type, &kinds, &meet, &current_node, &clock)) return NULL;
    Pen *pen = (Pen *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!pen) return NULL;
    pen->writers = Py_NewRef(writers), pen->kinds = Py_NewRef(kinds), pen->meet = Py_NewRef(meet);
    pen->current_node = Py_NewRef(current_node), pen->clock = Py_NewRef(clock);
    pen->mask = capacity - 1;
    if (PyObject_GetBuffer(memory, &pen->memory, PyBUF_WRITABLE) < 0) Py_CLEAR(pen);
    return (PyObject *)pen;
}

static int pen_traverse(Pen *pen, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)pen));
    Py_VISIT(pen->writers);
    Py_VISIT(pen->kinds);
    Py_VISIT(pen->meet);
    return 0;
}

static int pen_clear(Pen *pen)
{
    Py_CLEAR(pen->meet); /* which leads back to the ring; the others lead nowhere */
    return 0;
}

static void pen_dealloc(Pen *pen)
{
    PyTypeObject *type = Py_TYPE((PyObject *)pen);
    PyObject_GC_UnTrack(pen);
    pen_clear(pen);
    Py_XDECREF(pen->writers);
    Py_XDECREF(pen->kinds);
    Py_XDECREF(pen->current_node);
    Py_XDECREF(pen->clock);
    PyBuffer_Release(&pen->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(pen);
    Py_DECREF(type);
}

static PyMethodDef pen_methods[] = {
    {"see", (PyCFunction)pen_see, METH_O, "see(gradient): note the node that the engine is at. Never raises."},
    {"exchange", (PyCFunction)pen_exchange, METH_O, "exchange(memory): write there from now on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pen_slots[] = {
    {Py_tp_doc, "Pen(memory, capacity, writers, kinds, meet, current_node, clock): writes the entries of a ring."},
    {Py_tp_new, pen_new},
    {Py_tp_dealloc, pen_dealloc},
    {Py_tp_traverse, pen_traverse},
    {Py_tp_clear, pen_clear},
    {Py_tp_methods, pen_methods},
    {0, NULL},
};

PyType_Spec pen_spec = {
    .name = "retrograd.core.hooks._native.Pen",
    .basicsize = sizeof(Pen),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = pen_slots,
};

/* ---- what comes in to each node of a pass: `mark_one` of pass_log.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *notes, *current, *otherwise, *current_node, *clock;
    PyObject *shape, *device, *thread; /* of what came in last */
    unsigned long ident; /* of that thread */
} Marker;

/* An attribute; where it is equal to that of the tensor before, the very same object, so that not so many are held. */
static PyObject *shared_of(PyObject *tensor, PyObject *name, PyObject **last)
{
    PyObject *value = PyObject_GetAttr(tensor, name);
    bool differs = value && (!*last || PyObject_RichCompareBool(value, *last, Py_EQ) != 1);
    if (value && differs) PyErr_Clear();
    PyObject *dropped = differs ? *last : value;
    if (differs) *last = value;
    Py_XDECREF(dropped);
    return value ? Py_NewRef(*last) : NULL;
}

static PyObject *thread_of(Marker *marker)
{
    unsigned long ident = PyThread_get_thread_ident();
    if (!marker->thread || marker->ident != ident) {
        Py_XDECREF(marker->thread);
        marker->thread = PyLong_FromUnsignedLong(ident), marker->ident = ident;
    }
    return Py_XNewRef(marker->thread);
}

static PyObject *marker_mark(Marker *marker, PyObject *incoming)
{
    PyObject *shape = shared_of(incoming, s_shape, &marker->shape);
    PyObject *dtype = shape ? PyObject_GetAttr(incoming, s_dtype) : NULL;
    PyObject *device = dtype ? shared_of(incoming, s_device, &marker->device) : NULL;
    if (!device) { /* None, or a nested tensor, which has no shape */
        PyErr_Clear();
        Py_XDECREF(shape);
        Py_XDECREF(dtype);
        PyObject *several = PyTuple_Pack(1, incoming);
        PyObject *result = several ? PyObject_CallFunctionObjArgs(marker->otherwise, several, NULL) : NULL;
        Py_XDECREF(several);
        return result;
    }
    PyObject *node = PyObject_CallNoArgs(marker->current_node), *notes = marker->notes;
    bool fine = append(notes, PyObject_CallNoArgs(marker->clock))
        && append(notes, thread_of(marker)) && append(notes, PyLong_FromVoidPtr(node));
    fine = append(notes, shape) && append(notes, dtype) && append(notes, device) && fine;
    Py_XDECREF(node);
    return fine && PyList_SetItem(marker->current, 0, Py_NewRef(incoming)) == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *marker_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"notes", "current", "otherwise", "current_node", "clock", NULL};
    PyObject *notes, *current, *otherwise, *current_node, *clock;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!OOO:Marker", names, &PyList_Type, &notes, &PyList_Type,
                                     &current, &otherwise, &current_node, &clock)) return NULL;
    Marker *marker = (Marker *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!marker) return NULL;
    marker->notes = Py_NewRef(notes), marker->current = Py_NewRef(current), marker->otherwise = Py_NewRef(otherwise);
    marker->current_node = Py_NewRef(current_node), marker->clock = Py_NewRef(clock);
    return (PyObject *)marker;
}

static int marker_traverse(Marker *marker, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)marker));
    Py_VISIT(marker->notes);
    Py_VISIT(marker->current);
    Py_VISIT(marker->otherwise);
    return 0;
}

static void marker_dealloc(Marker *marker)
{
    PyTypeObject *type = Py_TYPE((PyObject *)marker);
    PyObject_GC_UnTrack(marker);
    Py_XDECREF(marker->notes);
    Py_XDECREF(marker->current);
    Py_XDECREF(marker->otherwise);
    Py_XDECREF(marker->current_node);
    Py_XDECREF(marker->clock);
    Py_XDECREF(marker->shape);
    Py_XDECREF(marker->device);
    Py_XDECREF(marker->thread);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(marker);
    Py_DECREF(type);
}

static PyMethodDef marker_methods[] = {
    {"mark", (PyCFunction)marker_mark, METH_O, "mark(gradient): note what comes in to the node that the engine is at."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot marker_slots[] = {
    {Py_tp_doc, "Marker(notes, current, otherwise, current_node, clock): notes what comes in to nodes that take one."},
    {Py_tp_new, marker_new},
    {Py_tp_dealloc, marker_dealloc},
    {Py_tp_traverse, marker_traverse},
    {Py_tp_methods, marker_methods},
    {0, NULL},
};

PyType_Spec marker_spec = {
    .name = "retrograd.core.hooks._native.Marker",
    .basicsize = sizeof(Marker),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = marker_slots,
};
