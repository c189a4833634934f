/* What runs for every tensor that is recorded, without a Python frame: the hook on its gradient, and what sets that.

   Both know the plain case alone: a tensor of torch's own class, of which nothing but the statistics of a slab is wanted.
   Whatever else comes is left to the Python function that each was made with, and so is what the slab raises. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>

static PyObject *tensor_type, *make_table;
static PyObject *s_grad_fn, *s_backward_hooks, *s_register, *s_count, *s_string, *s_table;
static const struct { PyObject **string; const char *text; } STRINGS[] = {
    {&s_grad_fn, "grad_fn"}, {&s_backward_hooks, "_backward_hooks"}, {&s_register, "_register_hook_dict"},
    {&s_count, "count"}, {&s_string, "string"}, {&s_table, "_table"},
};

static PyObject *import_from(const char *module, const char *name)
{
    PyObject *room = PyImport_ImportModule(module), *found = room ? PyObject_GetAttrString(room, name) : NULL;
    Py_XDECREF(room);
    return found;
}

/* ---- where statistics go ---- */

typedef struct { PyObject *observe, *row; } Target; /* a slab's method, and the row; or nothing */

static PyObject *bind_target(Target *target, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "bind(observe, row) takes 2 arguments, not %zd", n_args);
    PyObject *observe = target->observe, *row = target->row;
    bool is_bound = args[0] != Py_None;
    *target = (Target){is_bound ? Py_NewRef(args[0]) : NULL, is_bound ? Py_NewRef(args[1]) : NULL};
    Py_XDECREF(observe);
    Py_XDECREF(row);
    Py_RETURN_NONE;
}

/* What the slab says of a plain tensor; NULL with an exception, or with none where it is not ours to read. */
static PyObject *observe(const Target *target, PyObject *tensor)
{
    if (!target->observe || (PyObject *)Py_TYPE(tensor) != tensor_type) return NULL;
    PyObject *method = Py_NewRef(target->observe), *row = Py_NewRef(target->row); /* another thread may bind others */
    PyObject *answer = PyObject_CallFunctionObjArgs(method, tensor, row, NULL);
    Py_DECREF(method);
    Py_DECREF(row);
    return answer;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- the hook on a gradient ---- */

typedef struct {
    PyObject_HEAD
    PyObject *state, *switches, *otherwise;
    Target target;
} GradientTap;

static bool all_on(const GradientTap *tap)
{
    bool on = true;
    for (Py_ssize_t at = 0; on && at < PyTuple_Size(tap->switches); at++) {
        PyObject *value = PyObject_GetAttr(tap->state, PyTuple_GetItem(tap->switches, at));
        on = value == Py_True;
        Py_XDECREF(value);
    }
    return on;
}

static PyTypeObject *gradient_type;

/* As a function, since that is what torch.compile can be given another for, see gradients.py. */
static PyObject *see_gradient(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2 || Py_TYPE(args[0]) != gradient_type)
        return PyErr_Format(PyExc_TypeError, "see_gradient(tap, gradient) takes a GradientTap and a gradient");
    GradientTap *tap = (GradientTap *)args[0];
    PyObject *gradient = args[1], *answer = all_on(tap) ? observe(&tap->target, gradient) : NULL;
    if (answer) {
        Py_DECREF(answer);
        Py_RETURN_NONE;
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* somebody presses Ctrl-C */
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(tap->otherwise, gradient, NULL);
}

static PyObject *gradient_bind(GradientTap *tap, PyObject *const *args, Py_ssize_t n_args)
{
    return bind_target(&tap->target, args, n_args);
}

static PyObject *gradient_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"state", "switches", "otherwise", NULL};
    PyObject *state, *switches, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!O:GradientTap", names, &state, &PyTuple_Type, &switches,
                                     &otherwise)) return NULL;
    GradientTap *tap = (GradientTap *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!tap) return NULL;
    tap->state = Py_NewRef(state), tap->switches = Py_NewRef(switches), tap->otherwise = Py_NewRef(otherwise);
    return (PyObject *)tap;
}

static int gradient_traverse(GradientTap *tap, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)tap));
    Py_VISIT(tap->state);
    Py_VISIT(tap->otherwise);
    Py_VISIT(tap->target.observe);
    return 0;
}

static int gradient_clear(GradientTap *tap)
{
    Py_CLEAR(tap->otherwise); /* which leads back to whoever has the tap; the others lead nowhere */
    return 0;
}

static void gradient_dealloc(GradientTap *tap)
{
    PyObject_GC_UnTrack(tap);
    gradient_clear(tap);
    Py_XDECREF(tap->state);
    Py_XDECREF(tap->switches);
    Py_XDECREF(tap->target.observe);
    Py_XDECREF(tap->target.row);
    free_object((PyObject *)tap);
}

static PyMethodDef gradient_methods[] = {
    {"bind", (PyCFunction)(void (*)(void))gradient_bind, METH_FASTCALL,
     "bind(observe, row): hand plain gradients to observe(gradient, row) from now on; to Python, where it is None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gradient_slots[] = {
    {Py_tp_doc, "GradientTap(state, switches, otherwise): what see_gradient reads a gradient by while all switches are on."},
    {Py_tp_new, gradient_new},
    {Py_tp_dealloc, gradient_dealloc},
    {Py_tp_traverse, gradient_traverse},
    {Py_tp_clear, gradient_clear},
    {Py_tp_methods, gradient_methods},
    {0, NULL},
};

static PyType_Spec gradient_tap_spec = {
    .name = "retrograd.hooks._taps.GradientTap",
    .basicsize = sizeof(GradientTap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = gradient_slots,
};

/* ---- the value of a site, and what sets the hook on its gradient: `watch` of gradients.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *otherwise, *watch, *hook, *guard; /* watch, hook and guard are None where no gradient is wanted */
    long free_depth;
    Target target;
} ValueTap;

/* The table of the hooks on a tensor, made if there is none. A new reference, or NULL with an exception. */
static PyObject *table_of(PyObject *tensor, PyObject *node)
{
    PyObject *table = PyObject_GetAttr(tensor, s_backward_hooks);
    if (table != Py_None) return table;
    Py_DECREF(table);
    table = PyObject_CallNoArgs(make_table);
    PyObject *done = table && PyObject_SetAttr(tensor, s_backward_hooks, table) == 0
        ? PyObject_CallMethodObjArgs(node, s_register, tensor, NULL) : NULL;
    if (!done) Py_CLEAR(table);
    Py_XDECREF(done);
    return table;
}

/* Have the guard count a node, and gather it in a deep graph; false with an exception. */
static bool count_node(const ValueTap *tap, PyObject *node)
{
    PyObject *before = PyObject_GetAttr(tap->guard, s_count);
    long count = before ? PyLong_AsLong(before) + 1 : 0;
    Py_XDECREF(before);
    PyObject *now = PyErr_Occurred() ? NULL : PyLong_FromLong(count);
    bool fine = now && PyObject_SetAttr(tap->guard, s_count, now) == 0;
    Py_XDECREF(now);
    if (!fine || count <= tap->free_depth) return fine;
    PyObject *done = PyObject_CallMethodObjArgs(tap->guard, s_string, node, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* Set the hook on a tensor that a node has made; false with an exception. */
static bool set_hook(ValueTap *tap, PyObject *tensor, PyObject *node)
{
    PyObject *table = table_of(tensor, node), *weak = NULL;
    bool fine = table && PyObject_SetItem(table, tap->hook, tap->hook) == 0 && (weak = PyWeakref_NewRef(table, NULL))
        && PyObject_SetAttr(tap->watch, s_table, weak) == 0 && count_node(tap, node);
    Py_XDECREF(weak);
    Py_XDECREF(table);
    return fine;
}

static PyObject *value_visit(ValueTap *tap, PyObject *tensor)
{
    PyObject *requires_grad = observe(&tap->target, tensor);
    if (!requires_grad && PyErr_Occurred()) return NULL;
    if (!requires_grad) return PyObject_CallFunctionObjArgs(tap->otherwise, tensor, NULL);
    bool is_wanted = requires_grad == Py_True && tap->watch != Py_None;
    Py_DECREF(requires_grad);
    if (!is_wanted) Py_RETURN_FALSE;
    PyObject *node = PyObject_GetAttr(tensor, s_grad_fn); /* before the table: an in-place change of a base renews both */
    PyObject *done = NULL;
    if (node == Py_None)
        done = PyObject_CallMethod(tap->watch, "watch", "O", tensor); /* a leaf */
    else if (node && set_hook(tap, tensor, node))
        done = Py_NewRef(Py_None);
    Py_XDECREF(node);
    if (!done) return NULL;
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

static PyObject *value_bind(ValueTap *tap, PyObject *const *args, Py_ssize_t n_args)
{
    return bind_target(&tap->target, args, n_args);
}

static PyObject *value_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"otherwise", "watch", "hook", "guard", "free_depth", NULL};
    PyObject *otherwise, *watch, *hook, *guard;
    long free_depth;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOl:ValueTap", names, &otherwise, &watch, &hook, &guard,
                                     &free_depth)) return NULL;
    ValueTap *tap = (ValueTap *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!tap) return NULL;
    tap->otherwise = Py_NewRef(otherwise), tap->watch = Py_NewRef(watch);
    tap->hook = Py_NewRef(hook), tap->guard = Py_NewRef(guard);
    tap->free_depth = free_depth;
    return (PyObject *)tap;
}

static int value_traverse(ValueTap *tap, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)tap));
    Py_VISIT(tap->otherwise);
    Py_VISIT(tap->watch);
    Py_VISIT(tap->hook);
    Py_VISIT(tap->guard);
    Py_VISIT(tap->target.observe);
    return 0;
}

static int value_clear(ValueTap *tap)
{
    Py_CLEAR(tap->otherwise); /* which leads back to whoever has the tap; the others lead nowhere */
    return 0;
}

static void value_dealloc(ValueTap *tap)
{
    PyObject_GC_UnTrack(tap);
    value_clear(tap);
    Py_XDECREF(tap->watch);
    Py_XDECREF(tap->hook);
    Py_XDECREF(tap->guard);
    Py_XDECREF(tap->target.observe);
    Py_XDECREF(tap->target.row);
    free_object((PyObject *)tap);
}

static PyMethodDef value_methods[] = {
    {"visit", (PyCFunction)value_visit, METH_O,
     "visit(tensor): read it and set the hook on its gradient; returns whether that gradient will come."},
    {"bind", (PyCFunction)(void (*)(void))value_bind, METH_FASTCALL,
     "bind(observe, row): hand plain tensors to observe(tensor, row) from now on; to Python, where it is None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot value_slots[] = {
    {Py_tp_doc, "ValueTap(otherwise, watch, hook, guard, free_depth): sees the tensors of one site."},
    {Py_tp_new, value_new},
    {Py_tp_dealloc, value_dealloc},
    {Py_tp_traverse, value_traverse},
    {Py_tp_clear, value_clear},
    {Py_tp_methods, value_methods},
    {0, NULL},
};

static PyType_Spec value_tap_spec = {
    .name = "retrograd.hooks._taps.ValueTap",
    .basicsize = sizeof(ValueTap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = value_slots,
};

/* ---- the module ---- */

static PyMethodDef functions[] = {
    {"see_gradient", (PyCFunction)(void (*)(void))see_gradient, METH_FASTCALL,
     "see_gradient(tap, gradient): read a gradient, or have Python do so."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef taps = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_taps",
    .m_doc = "What runs for every tensor that is recorded, without a Python frame.",
    .m_size = -1,
    .m_methods = functions,
};

/* Make a type and put it into the module, which holds it; NULL with an exception. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    bool fine = type && PyModule_AddObjectRef(module, name, type) == 0;
    Py_XDECREF(type);
    return fine ? (PyTypeObject *)type : NULL;
}

PyMODINIT_FUNC PyInit__taps(void)
{
    for (size_t i = 0; i < sizeof STRINGS / sizeof *STRINGS; i++)
        if (!(*STRINGS[i].string = PyUnicode_InternFromString(STRINGS[i].text))) return NULL;
    tensor_type = import_from("torch", "Tensor");
    make_table = tensor_type ? import_from("collections", "OrderedDict") : NULL;
    PyObject *module = make_table ? PyModule_Create(&taps) : NULL;
    gradient_type = module ? add_type(module, &gradient_tap_spec, "GradientTap") : NULL;
    if (!gradient_type || !add_type(module, &value_tap_spec, "ValueTap")) Py_CLEAR(module);
    return module;
}
