/* The hook on a gradient that has rules, without a Python frame between torch and the rules.

   Its twin is `GradientRewriter.change` of rewriting/site_rewriter.py with `RuleChain.change` of rewriting/chain.py, and
   whatever is not as nearly always is left to that. Nothing is known of torch but Python attributes and functions. All
   of it runs with the GIL held. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>

static PyObject *s_is_active, *s_is_scaling, *s_all, *s_step, *s_call, *s_training, *s_version, *s_shape, *s_dtype,
    *s_device;
static const struct { PyObject **string; const char *text; } STRINGS[] = {
    {&s_is_active, "is_active"}, {&s_is_scaling, "is_scaling"}, {&s_all, "all"}, {&s_step, "step"}, {&s_call, "call"},
    {&s_training, "training"}, {&s_version, "_version"}, {&s_shape, "shape"}, {&s_dtype, "dtype"},
    {&s_device, "device"},
};

/* All members are Python objects, from the first to the last. */
typedef struct {
    PyObject_HEAD
    PyObject *otherwise, *factory, *clock, *listeners, *tensor_type, *compiles; /* who is asked, and whether to go on */
    PyObject *steps, *call, *acquire, *release, *explain, *check; /* of the chain */
} GradientHook;

enum { MEMBERS = (sizeof(GradientHook) - offsetof(GradientHook, otherwise)) / sizeof(PyObject *) };

static PyObject **members_of(GradientHook *hook) { return &hook->otherwise; }

/* Whether an attribute is this very object. False, with an exception, where there is no such attribute. */
static bool is_attribute(PyObject *owner, PyObject *name, PyObject *value)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found == value;
}

/* Whether anything is to be done that is not done here. Perhaps with an exception. */
static bool is_special(GradientHook *hook, PyObject *gradient)
{
    if ((PyObject *)Py_TYPE(gradient) != hook->tensor_type) return true;
    PyObject *listeners = PyObject_GetAttr(hook->listeners, s_all);
    PyObject *compiles = listeners ? PyObject_CallNoArgs(hook->compiles) : NULL; /* it would compile the rules, too */
    bool is_plain = compiles == Py_None && PyTuple_Size(listeners) == 0;
    Py_XDECREF(listeners);
    Py_XDECREF(compiles);
    return !is_plain || !is_attribute(hook->factory, s_is_active, Py_True)
        || !is_attribute(hook->clock, s_is_scaling, Py_False);
}

/* Whether two tensors have equal, or the same, attributes. Perhaps with an exception. */
static bool is_alike(PyObject *a, PyObject *b, PyObject *name)
{
    PyObject *x = PyObject_GetAttr(a, name), *y = x ? PyObject_GetAttr(b, name) : NULL;
    bool alike = x && y && (x == y || PyObject_RichCompareBool(x, y, Py_EQ) == 1);
    Py_XDECREF(x);
    Py_XDECREF(y);
    return alike;
}

/* The error of a rule, as the chain words it; what is no fault of the rule stays as it is. */
static void explain(GradientHook *hook, PyObject *rule)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *none = PyObject_CallFunctionObjArgs(hook->explain, rule, error, NULL); /* raises */
    Py_XDECREF(none);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* What one rule makes of a value of this version, which is that very value where the rule leaves it alone. */
static PyObject *ask(GradientHook *hook, PyObject *each, PyObject *value, PyObject *before)
{
    PyObject *rule = PyTuple_GetItem(each, 0), *state = PyTuple_GetItem(each, 1), *change = PyTuple_GetItem(each, 2);
    PyObject *changed = change ? PyObject_CallFunctionObjArgs(change, value, state, NULL) : NULL, *after = NULL;
    if (change && !changed) explain(hook, rule);
    if (changed) after = PyObject_GetAttr(value, s_version);
    bool same = after && PyObject_RichCompareBool(before, after, Py_EQ) == 1, fits = false;
    if (same && (changed == Py_None || changed == value)) {
        Py_DECREF(changed);
        changed = Py_NewRef(value);
        fits = true;
    } else if (same && PyObject_IsInstance(changed, hook->tensor_type) == 1) {
        fits = is_alike(value, changed, s_shape) && is_alike(value, changed, s_dtype) && is_alike(value, changed, s_device);
    }
    if (changed && !fits) {
        PyErr_Clear();
        PyObject *none = PyObject_CallFunctionObjArgs(hook->check, rule, value, before, changed, NULL);
        Py_XDECREF(none);
        if (!none) Py_CLEAR(changed); /* else it fits all the same */
    }
    Py_XDECREF(after);
    return changed;
}

/* What the rules make of a gradient of this version, one after the other. */
static PyObject *change(GradientHook *hook, PyObject *gradient, PyObject *version)
{
    PyObject *value = Py_NewRef(gradient), *step = PyObject_GetAttr(hook->clock, s_step);
    PyObject *training = step ? PyObject_GetAttr(hook->otherwise, s_training) : NULL;
    bool fine = training != NULL;
    for (Py_ssize_t k = 0; fine && k < PyList_Size(hook->steps); k++) {
        PyObject *each = Py_NewRef(PyList_GetItem(hook->steps, k)), *state = PyTuple_GetItem(each, 1);
        PyObject *before = k ? PyObject_GetAttr(value, s_version) : Py_NewRef(version), *given = value;
        fine = before && state && PyObject_SetAttr(state, s_step, step) == 0
            && PyObject_SetAttr(state, s_call, hook->call) == 0 && PyObject_SetAttr(state, s_training, training) == 0;
        value = fine ? ask(hook, each, given, before) : NULL;
        fine = value != NULL;
        Py_DECREF(given);
        Py_XDECREF(before);
        Py_DECREF(each);
    }
    if (!fine) Py_CLEAR(value);
    Py_XDECREF(step);
    Py_XDECREF(training);
    return value;
}

static PyObject *hook_call(GradientHook *hook, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *gradient;
    if (!PyArg_UnpackTuple(args, "GradientHook", 1, 1, &gradient)) return NULL;
    PyObject *version = is_special(hook, gradient) ? NULL : PyObject_GetAttr(gradient, s_version);
    if (!version) { /* of inference mode, or special in another way */
        PyErr_Clear();
        return PyObject_CallFunctionObjArgs(hook->otherwise, gradient, NULL);
    }
    PyObject *held = PyObject_CallNoArgs(hook->acquire);
    PyObject *changed = held ? change(hook, gradient, version) : NULL, *type, *error, *traceback;
    Py_DECREF(version);
    if (!held) return NULL;
    Py_DECREF(held);
    PyErr_Fetch(&type, &error, &traceback);
    Py_XDECREF(PyObject_CallNoArgs(hook->release));
    if (type) PyErr_Restore(type, error, traceback);
    if (changed != gradient) return changed;
    Py_DECREF(changed);
    Py_RETURN_NONE;
}

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *given[MEMBERS];
    if (!PyArg_ParseTuple(args, "OOOOOOO!OOOOO:GradientHook", &given[0], &given[1], &given[2], &given[3], &given[4],
                          &given[5], &PyList_Type, &given[6], &given[7], &given[8], &given[9], &given[10], &given[11]))
        return NULL;
    GradientHook *hook = (GradientHook *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    for (int k = 0; hook && k < MEMBERS; k++) members_of(hook)[k] = Py_NewRef(given[k]);
    return (PyObject *)hook;
}

static int hook_traverse(GradientHook *hook, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)hook));
    for (int k = 0; k < MEMBERS; k++) Py_VISIT(members_of(hook)[k]);
    return 0;
}

static void hook_dealloc(GradientHook *hook)
{
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    PyObject_GC_UnTrack(hook);
    for (int k = 0; k < MEMBERS; k++) Py_XDECREF(members_of(hook)[k]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "GradientHook(otherwise, factory, clock, …): what flows on instead of a gradient; None for no change."},
    {Py_tp_new, hook_new},
    {Py_tp_call, hook_call},
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_traverse, hook_traverse},
    {0, NULL},
};

static PyType_Spec hook_spec = {
    .name = "retrograd.hooks._rules.GradientHook",
    .basicsize = sizeof(GradientHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hook_slots,
};

static PyModuleDef rules = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_rules",
    .m_doc = "Rules on gradients, without a Python frame before them.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__rules(void)
{
    for (size_t i = 0; i < sizeof STRINGS / sizeof *STRINGS; i++)
        if (!(*STRINGS[i].string = PyUnicode_InternFromString(STRINGS[i].text))) return NULL;
    PyObject *module = PyModule_Create(&rules), *type = module ? PyType_FromSpec(&hook_spec) : NULL;
    bool fine = type && PyObject_SetAttrString(type, "__torch_unserializable__", Py_True) == 0
        && PyModule_AddObjectRef(module, "GradientHook", type) == 0;
    Py_XDECREF(type);
    if (!fine) Py_CLEAR(module);
    return module;
}
