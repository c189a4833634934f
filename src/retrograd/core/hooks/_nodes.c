/* Nodes of a graph: `follow` and `order_upwards` of reach.py. */

#include "_native.h"

#include <stdlib.h>

static PyObject *s_next_functions, *s_sequence_nr;
static const Name NAMES[] = {
    {&s_next_functions, "next_functions"}, {&s_sequence_nr, "_sequence_nr"},
};

int learn_nodes(void) { return INTERN(NAMES); }

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

PyObject *follow(PyObject *Py_UNUSED(module), PyObject *args)
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

PyObject *number_nodes(PyObject *Py_UNUSED(module), PyObject *args)
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

PyObject *order_upwards(PyObject *Py_UNUSED(module), PyObject *args)
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
