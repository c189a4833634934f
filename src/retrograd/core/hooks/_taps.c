/* Who records one site, without a Python frame: the value, the hook on its gradient, and what sets that.

   Whatever is not plain is left to the Python function that each was made with, and so is what the slab raises. */

#include "_taps.h"

static PyObject *make_table;
static PyObject *s_grad_fn, *s_requires_grad, *s_backward_hooks, *s_register, *s_count, *s_string, *s_table;
static const Name NAMES[] = {
    {&s_grad_fn, "grad_fn"}, {&s_requires_grad, "requires_grad"}, {&s_backward_hooks, "_backward_hooks"},
    {&s_register, "_register_hook_dict"}, {&s_count, "count"}, {&s_string, "string"}, {&s_table, "_table"},
};

/* ---- the hook on a gradient ---- */

typedef struct {
    PyObject_HEAD
    PyObject *state, *switches, *otherwise;
    Target target;
} GradientTap;

static bool all_on(const GradientTap *tap)
{
    bool on = true;
    for (Py_ssize_t at = 0; on && at < PyTuple_Size(tap->switches); at++)
        on = is_on(tap->state, PyTuple_GetItem(tap->switches, at));
    return on;
}

static PyTypeObject *gradient_type;

/* As a function, since that is what torch.compile can be given another for, see gradients.py. */
static PyObject *see_gradient(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2 || Py_TYPE(args[0]) != gradient_type)
        return PyErr_Format(PyExc_TypeError, "see_gradient(tap, gradient) takes a GradientTap and a gradient");
    GradientTap *tap = (GradientTap *)args[0];
    PyObject *gradient = args[1], *answer = all_on(tap) ? take_in(&tap->target, gradient) : NULL;
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

static PyObject *gradient_keep(GradientTap *tap, PyObject *const *args, Py_ssize_t n_args)
{
    return bind_keeper(&tap->target, args, n_args);
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
    return visit_target(&tap->target, visit, arg);
}

static int gradient_clear(GradientTap *tap)
{
    Py_CLEAR(tap->otherwise); /* which leads back to whoever has the tap, as what it keeps for does */
    clear_target(&tap->target);
    return 0;
}

static void gradient_dealloc(GradientTap *tap)
{
    PyObject_GC_UnTrack(tap);
    gradient_clear(tap);
    Py_XDECREF(tap->state);
    Py_XDECREF(tap->switches);
    free_object((PyObject *)tap);
}

static PyMethodDef gradient_methods[] = {
    {"bind", (PyCFunction)(void (*)(void))gradient_bind, METH_FASTCALL,
     "bind(observe, row): hand plain gradients to observe(gradient, row) from now on; to Python, where it is None."},
    {"keep", (PyCFunction)(void (*)(void))gradient_keep, METH_FASTCALL,
     "keep(recorder, keeper, buffer): keep references to them, too, in buffer.kept."},
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
    .name = "retrograd.core.hooks._taps.GradientTap",
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
    long long count = number(PyObject_GetAttr(tap->guard, s_count)) + 1;
    if (PyErr_Occurred() || !set_number(tap->guard, s_count, count)) return false;
    if (count <= tap->free_depth) return true;
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
    PyObject *requires_grad = take_in(&tap->target, tensor);
    if (!requires_grad && PyErr_Occurred()) return NULL;
    if (!requires_grad) return PyObject_CallFunctionObjArgs(tap->otherwise, tensor, NULL);
    if (requires_grad == Py_None) { /* nobody has asked it */
        Py_DECREF(requires_grad);
        if (!(requires_grad = PyObject_GetAttr(tensor, s_requires_grad))) return NULL;
    }
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

static PyObject *value_keep(ValueTap *tap, PyObject *const *args, Py_ssize_t n_args)
{
    return bind_keeper(&tap->target, args, n_args);
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
    return visit_target(&tap->target, visit, arg);
}

static int value_clear(ValueTap *tap)
{
    Py_CLEAR(tap->otherwise); /* which leads back to whoever has the tap, as what it keeps for does */
    clear_target(&tap->target);
    return 0;
}

static void value_dealloc(ValueTap *tap)
{
    PyObject_GC_UnTrack(tap);
    value_clear(tap);
    Py_XDECREF(tap->watch);
    Py_XDECREF(tap->hook);
    Py_XDECREF(tap->guard);
    free_object((PyObject *)tap);
}

static PyMethodDef value_methods[] = {
    {"visit", (PyCFunction)value_visit, METH_O,
     "visit(tensor): read it and set the hook on its gradient; returns whether that gradient will come."},
    {"bind", (PyCFunction)(void (*)(void))value_bind, METH_FASTCALL,
     "bind(observe, row): hand plain tensors to observe(tensor, row) from now on; to Python, where it is None."},
    {"keep", (PyCFunction)(void (*)(void))value_keep, METH_FASTCALL,
     "keep(recorder, keeper, buffer): keep references to them, too, in buffer.kept."},
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
    .name = "retrograd.core.hooks._taps.ValueTap",
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
    if (INTERN(NAMES) < 0 || learn_target() < 0 || learn_outputs() < 0) return NULL;
    make_table = import_from("collections", "OrderedDict");
    PyObject *module = make_table ? PyModule_Create(&taps) : NULL;
    gradient_type = module ? add_type(module, &gradient_tap_spec, "GradientTap") : NULL;
    if (!gradient_type || !add_type(module, &value_tap_spec, "ValueTap")
        || !add_type(module, &output_tap_spec, "OutputTap")) Py_CLEAR(module);
    return module;
}
