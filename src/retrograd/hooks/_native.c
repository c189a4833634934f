/* What runs for every node of a graph, or for every operation, without a Python frame.

   Each thing here has a twin in Python, which is used where there was no compiler; tests hold the two to the same.
   Nothing is known of torch but Python attributes and functions. All of it runs with the GIL held. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static PyObject *s_next_functions, *s_sequence_nr, *s_shape, *s_dtype, *s_device, *s_version, *s_log, *s_begin,
    *s_is_silent, *s_operations, *s_top, *s_owner, *s_insert, *s_after, *s_filename, *s_back, *s_lasti;
static const struct { PyObject **string; const char *text; } STRINGS[] = {
    {&s_next_functions, "next_functions"}, {&s_sequence_nr, "_sequence_nr"}, {&s_shape, "shape"}, {&s_dtype, "dtype"},
    {&s_device, "device"}, {&s_version, "_version"}, {&s_log, "log"}, {&s_begin, "begin"},
    {&s_is_silent, "is_silent"}, {&s_operations, "operations"}, {&s_top, "top"}, {&s_owner, "owner"},
    {&s_insert, "insert"}, {&s_after, "after"}, {&s_filename, "co_filename"},
    {&s_back, "f_back"}, {&s_lasti, "f_lasti"},
};

/* Append, and let go of, a new reference; false with an exception if there is none. */
static bool append(PyObject *list, PyObject *item)
{
    bool fine = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return fine;
}

/* A number without sign; takes the reference. Failure is told by PyErr_Occurred alone. */
static uint64_t unsigned_of(PyObject *object)
{
    uint64_t value = object ? PyLong_AsUnsignedLongLong(object) : 0;
    Py_XDECREF(object);
    return value;
}

/* ---- nodes: `follow` and `order_upwards` of reach.py ---- */

enum { NOWHERE = -1, END = -2 }; /* as there */

/* Numbers that are appended to, and handed over as bytes. */
typedef struct { int64_t *items; size_t count, room; } Numbers;

static bool add(Numbers *numbers, int64_t item)
{
    if (numbers->count == numbers->room) {
        size_t room = numbers->room ? 2 * numbers->room : 1024;
        int64_t *items = realloc(numbers->items, room * sizeof *items);
        if (!items) return PyErr_NoMemory() != NULL;
        numbers->items = items, numbers->room = room;
    }
    numbers->items[numbers->count++] = item;
    return true;
}

/* Where each node is among those found: by its address, in a table with open addressing that is never full. */
typedef struct { PyObject *node; int64_t place; } Found;
typedef struct { Found *slots; size_t mask, count; } Table;

/* The slot of a node, or the free one that it belongs into. */
static Found *slot_of(const Table *table, PyObject *node)
{
    size_t at = ((uintptr_t)node >> 4) * 0x9E3779B97F4A7C15u >> 20;
    while (table->slots[at & table->mask].node && table->slots[at & table->mask].node != node) at++;
    return &table->slots[at & table->mask];
}

static bool grow(Table *table)
{
    size_t size = table->slots ? 2 * (table->mask + 1) : 1024;
    Table larger = {calloc(size, sizeof *larger.slots), size - 1, table->count};
    if (!larger.slots) return PyErr_NoMemory() != NULL;
    for (size_t at = 0; table->slots && at <= table->mask; at++)
        if (table->slots[at].node) *slot_of(&larger, table->slots[at].node) = table->slots[at];
    free(table->slots);
    *table = larger;
    return true;
}

/* The place of a node among those found, to which it is added if it is new; -1 with an exception. */
static int64_t place_of(Table *table, PyObject *nodes, PyObject *node)
{
    if ((!table->slots || table->count > table->mask / 2) && !grow(table)) return -1;
    Found *slot = slot_of(table, node);
    if (!slot->node) {
        *slot = (Found){node, (int64_t)table->count++};
        if (slot->place == PyList_Size(nodes) && PyList_Append(nodes, node) < 0) return -1;
    }
    return slot->place;
}

/* Note one edge of a node, and where it leads if that was not found before. */
static bool follow_edge(PyObject *edge, PyObject *nodes, Table *table, PyObject *several, Numbers *links)
{
    PyObject *node = PyTuple_GetItem(edge, 0), *slot = PyTuple_GetItem(edge, 1);
    if (!node || !slot) return false;
    if (node == Py_None) return add(links, NOWHERE);
    int64_t place = place_of(table, nodes, node);
    long number = PyLong_AsLong(slot);
    if (place < 0 || (number == -1 && PyErr_Occurred())) return false;
    if (number && (PySet_Add(several, node) < 0 || !add(links, END - number))) return false;
    return add(links, place);
}

static PyObject *follow(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *nodes, *several, *told = NULL;
    double most;
    Table table = {NULL, 0, 0};
    Numbers links = {NULL, 0, 0};
    bool fine = PyArg_ParseTuple(args, "O!O!d:follow", &PyList_Type, &nodes, &PySet_Type, &several, &most);
    for (Py_ssize_t at = 0; fine && at < PyList_Size(nodes); at++) /* those that are given are all different */
        fine = place_of(&table, nodes, PyList_GetItem(nodes, at)) == at;
    for (Py_ssize_t at = 0; fine && at < PyList_Size(nodes); at++) { /* grows while it is walked */
        PyObject *edges = PyObject_GetAttr(PyList_GetItem(nodes, at), s_next_functions);
        Py_ssize_t count = edges ? PyTuple_Size(edges) : -1;
        for (Py_ssize_t k = 0; k < count; k++)
            if (!follow_edge(PyTuple_GetItem(edges, k), nodes, &table, several, &links)) count = -1;
        Py_XDECREF(edges);
        fine = count >= 0 && add(&links, END);
        if ((double)PyList_Size(nodes) > most) break;
    }
    if (fine) told = PyBytes_FromStringAndSize((char *)links.items, (Py_ssize_t)(links.count * sizeof *links.items));
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "A node is there twice.");
    free(table.slots);
    free(links.items);
    return told;
}

typedef struct { uint64_t number; Py_ssize_t place; } Numbered;

static int compare(const void *a, const void *b)
{
    const Numbered *x = a, *y = b;
    if (x->number != y->number) return x->number < y->number ? -1 : 1;
    return x->place < y->place ? -1 : 1;
}

/* The number of each node; NULL with an exception, else to be freed. */
static Numbered *number_all(PyObject *nodes, Py_ssize_t count)
{
    Numbered *found = calloc((size_t)count + 1, sizeof *found);
    if (!found) return (Numbered *)PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count && at < PyList_Size(nodes); at++) {
        found[at].number = unsigned_of(PyObject_CallMethodObjArgs(PyList_GetItem(nodes, at), s_sequence_nr, NULL));
        found[at].place = at;
        if (PyErr_Occurred()) {
            free(found);
            return NULL;
        }
    }
    return found;
}

static PyObject *number_nodes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *nodes;
    if (!PyArg_ParseTuple(args, "O!:number_nodes", &PyList_Type, &nodes)) return NULL;
    Py_ssize_t count = PyList_Size(nodes);
    Numbered *found = number_all(nodes, count);
    PyObject *told = found ? PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t)) : NULL;
    uint64_t *numbers = told ? (uint64_t *)PyBytes_AsString(told) : NULL;
    for (Py_ssize_t at = 0; numbers && at < count; at++) numbers[at] = found[at].number;
    free(found);
    return told;
}

/* Whether each node, but for the leaves, has a larger number than those that it leads to. */
static bool lead_downwards(const Numbered *found, Py_ssize_t count, const int64_t *links, Py_ssize_t n_links,
                           uint64_t leaf)
{
    Py_ssize_t place = 0;
    for (Py_ssize_t at = 0; at < n_links && place < count; at++) {
        int64_t link = links[at];
        if (link == END) place++;
        if (link < 0) continue;
        if (link >= count) return false;
        if (found[place].number <= found[link].number && found[link].number < leaf) return false;
    }
    return true;
}

/* Drop the leaves, and sort the others; returns how many they are. Those of a chain come from the top, and are turned
   round. */
static Py_ssize_t sort_inner(Numbered *found, Py_ssize_t count, uint64_t leaf)
{
    Py_ssize_t inner = 0;
    bool falls = true;
    for (Py_ssize_t at = 0; at < count; at++) {
        if (found[at].number >= leaf) continue;
        falls &= !inner || found[at].number < found[inner - 1].number;
        found[inner++] = found[at];
    }
    if (!falls) qsort(found, (size_t)inner, sizeof *found, compare);
    for (Py_ssize_t low = 0, high = inner - 1; falls && low < high; low++, high--) {
        Numbered swapped = found[low];
        found[low] = found[high], found[high] = swapped;
    }
    return inner;
}

static PyObject *order_upwards(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *nodes, *ordered = NULL;
    Py_buffer links;
    unsigned long long leaf;
    if (!PyArg_ParseTuple(args, "O!y*K:order_upwards", &PyList_Type, &nodes, &links, &leaf)) return NULL;
    Py_ssize_t count = PyList_Size(nodes);
    Numbered *found = number_all(nodes, count);
    if (found && !lead_downwards(found, count, links.buf, links.len / (Py_ssize_t)sizeof(int64_t), leaf)) {
        ordered = Py_NewRef(Py_None);
    } else if (found) {
        Py_ssize_t inner = sort_inner(found, count, leaf);
        ordered = PyList_New(0);
        for (Py_ssize_t at = 0; ordered && at < inner; at++)
            if (PyList_Append(ordered, PyList_GetItem(nodes, found[at].place)) < 0) Py_CLEAR(ordered);
    }
    free(found);
    PyBuffer_Release(&links);
    return ordered;
}

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

static PyType_Spec pen_spec = {
    .name = "retrograd.hooks._native.Pen",
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

static PyType_Spec marker_spec = {
    .name = "retrograd.hooks._native.Marker",
    .basicsize = sizeof(Marker),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = marker_slots,
};

/* ---- operations: the function mode of function_mode.py, with the listeners OperationLog and WriteNotes ---- */

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
static bool tell_writes(OperationTap *tap, Seen *seen, PyObject *function, PyObject *result, PyObject *frame)
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
        ? PyObject_CallMethodObjArgs(tap->writes, s_after, told, function, result, frame, NULL) : NULL;
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
        bool fine = tap->writes == Py_None || tell_writes(tap, seen, function, result, frame);
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

static PyType_Spec tap_spec = {
    .name = "retrograd.hooks._native.OperationTap",
    .basicsize = sizeof(OperationTap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = tap_slots,
};

/* ---- the module ---- */

static PyMethodDef functions[] = {
    {"follow", follow, METH_VARARGS,
     "follow(nodes, several, most): find all that the nodes lead to, and append it; returns the links, 8 bytes each."},
    {"number_nodes", number_nodes, METH_VARARGS, "number_nodes(nodes): their sequence numbers, 8 bytes each."},
    {"order_upwards", order_upwards, METH_VARARGS,
     "order_upwards(nodes, links, leaf): the nodes of lower number than a leaf's, by number; None if they lead upwards."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef native = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "What runs for every node or operation, without a Python frame.",
    .m_size = -1,
    .m_methods = functions,
};

static bool add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    bool fine = type && PyModule_AddObjectRef(module, name, type) == 0;
    Py_XDECREF(type);
    return fine;
}

PyMODINIT_FUNC PyInit__native(void)
{
    for (size_t i = 0; i < sizeof STRINGS / sizeof *STRINGS; i++)
        if (!(*STRINGS[i].string = PyUnicode_InternFromString(STRINGS[i].text))) return NULL;
    PyObject *module = PyModule_Create(&native);
    bool fine = module && add_type(module, &pen_spec, "Pen") && add_type(module, &marker_spec, "Marker")
        && add_type(module, &tap_spec, "OperationTap");
    if (!fine) Py_CLEAR(module);
    return module;
}
