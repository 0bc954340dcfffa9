/* gemmlink.transport._atomics: the core's three operations for Python, on integer addresses.
 *
 * `load`, `store` and `wait` take an address each time. `reader`, `setter` and `waiter` check their
 * addresses once and return a function that only does the work: a small call is made of such.
 *
 * Built against the stable ABI, so that one build serves every CPython from 3.10 on.
 */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "_atomics_core.h"

/* A wait returns to the interpreter this often (nanoseconds) to run signal handlers. Taking the
 * GIL back costs up to one switch interval, 5 ms, which stays within 5 % of the time waited. */
#define SLICE 100000000

/* The word at an address, or NULL with ValueError (or TypeError) set. */
static int64_t *word_at(PyObject *address) {
    unsigned long long at = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
        at = 0;
    }
    if (at == 0 || at % 8 != 0 || at > UINTPTR_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "a word's address must be nonzero and a multiple of 8 bytes: got %S", address);
        return NULL;
    }
    return (int64_t *)(uintptr_t)at;
}

static int expect(const char *name, Py_ssize_t expected, Py_ssize_t got) {
    if (got == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments: got %zd", name, expected, got);
    return 0;
}

static int as_int64(PyObject *object, int64_t *value) {
    *value = PyLong_AsLongLong(object);
    return !(*value == -1 && PyErr_Occurred());
}

static PyObject *load(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t *word;
    if (!expect("load", 1, count) || !(word = word_at(args[0])))
        return NULL;
    return PyLong_FromLongLong(gemmlink_load(word));
}

static PyObject *store(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t *word;
    int64_t value;
    if (!expect("store", 2, count) || !(word = word_at(args[0])) || !as_int64(args[1], &value))
        return NULL;
    gemmlink_store(word, value);
    Py_RETURN_NONE;
}

/* The last value seen of a word, after at most `budget` nanoseconds; -1 and an exception set where
 * `*failed` is. A word that is there already costs no clock and no GIL. */
static int64_t await(const int64_t *word, int64_t at_least, int64_t budget, int *failed) {
    int64_t value = gemmlink_load(word);
    if (value >= at_least || budget <= 0)
        return value;
    int64_t started = gemmlink_now();
    int64_t until = budget > INT64_MAX - started ? INT64_MAX : started + budget;
    for (;;) {
        int64_t now = gemmlink_now();
        Py_BEGIN_ALLOW_THREADS;
        value = gemmlink_wait(word, at_least, started, until - now > SLICE ? now + SLICE : until);
        Py_END_ALLOW_THREADS;
        if (value >= at_least || now >= until)
            return value;
        if (PyErr_CheckSignals() != 0) {
            *failed = 1;
            return -1;
        }
    }
}

static PyObject *wait_for(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t *word;
    int64_t at_least, budget;
    int failed = 0;
    if (!expect("wait", 3, count) || !(word = word_at(args[0])) || !as_int64(args[1], &at_least) ||
        !as_int64(args[2], &budget))
        return NULL;
    int64_t value = await(word, at_least, budget, &failed);
    return failed ? NULL : PyLong_FromLongLong(value);
}

/* Words that a bound function works on, in the order of their addresses' list, and what keeps the
 * memory under them mapped. `ends[i]` is where the words of argument i end. */
typedef struct {
    PyObject *keep;
    int64_t budget;
    Py_ssize_t groups;
    Py_ssize_t *ends;
    int64_t *words[];
} Bound;

#define BOUND "gemmlink.transport._atomics.Bound"

static Bound *bound_of(PyObject *self) { return (Bound *)PyCapsule_GetPointer(self, BOUND); }

static void release(PyObject *capsule) {
    Bound *bound = bound_of(capsule);
    Py_XDECREF(bound->keep);
    PyMem_Free(bound->ends);
    PyMem_Free(bound);
}

/* A capsule with room for `count` words in `groups` groups. */
static PyObject *new_bound(Py_ssize_t count, Py_ssize_t groups, PyObject *keep) {
    Bound *bound = PyMem_Calloc(1, sizeof(Bound) + (size_t)count * sizeof(int64_t *));
    Py_ssize_t *ends = PyMem_Calloc((size_t)groups, sizeof(Py_ssize_t));
    PyObject *capsule = bound && ends ? PyCapsule_New(bound, BOUND, release) : NULL;
    if (!capsule) {
        PyMem_Free(bound);
        PyMem_Free(ends);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_INCREF(keep);
    bound->keep = keep;
    bound->ends = ends;
    bound->groups = groups;
    return capsule;
}

/* Put the addresses of a tuple into `words`; how many, or -1 with an exception set. */
static Py_ssize_t put_words(int64_t **words, PyObject *addresses) {
    Py_ssize_t count = PyTuple_Size(addresses);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(words[i] = word_at(PyTuple_GetItem(addresses, i))))
            return -1;
    return count;
}

/* The function `def` bound to a capsule, whose reference it takes. */
static PyObject *bind(PyMethodDef *def, PyObject *capsule) {
    PyObject *function = PyCFunction_NewEx(def, capsule, NULL);
    Py_DECREF(capsule);
    return function;
}

static PyObject *read_bound(PyObject *self, PyObject *Py_UNUSED(none)) {
    Bound *bound = bound_of(self);
    Py_ssize_t count = bound->ends[0];
    PyObject *values = PyTuple_New(count);
    for (Py_ssize_t i = 0; values && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(gemmlink_load(bound->words[i]));
        if (!value || PyTuple_SetItem(values, i, value) != 0)
            Py_CLEAR(values);
    }
    return values;
}

static PyObject *set_bound(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Bound *bound = bound_of(self);
    int64_t value;
    if (!expect("a setter", bound->groups, count))
        return NULL;
    for (Py_ssize_t group = 0, i = 0; group < count; group++) {
        if (!as_int64(args[group], &value))
            return NULL;
        for (; i < bound->ends[group]; i++)
            gemmlink_store(bound->words[i], value);
    }
    Py_RETURN_NONE;
}

static PyObject *wait_bound(PyObject *self, PyObject *object) {
    Bound *bound = bound_of(self);
    int64_t at_least;
    int failed = 0;
    if (!as_int64(object, &at_least))
        return NULL;
    int64_t value = await(bound->words[0], at_least, bound->budget, &failed);
    return failed ? NULL : PyLong_FromLongLong(value);
}

static PyMethodDef bound_methods[] = {
    {"read", read_bound, METH_NOARGS, NULL},
    {"set", (PyCFunction)(void (*)(void))set_bound, METH_FASTCALL, NULL},
    {"wait", wait_bound, METH_O, NULL},
};

static PyObject *make_reader(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!expect("reader", 2, count))
        return NULL;
    Py_ssize_t words = PyTuple_Size(args[0]);
    PyObject *capsule = words < 0 ? NULL : new_bound(words, 1, args[1]);
    if (!capsule)
        return NULL;
    Bound *bound = bound_of(capsule);
    if ((bound->ends[0] = put_words(bound->words, args[0])) < 0) {
        Py_DECREF(capsule);
        return NULL;
    }
    return bind(&bound_methods[0], capsule);
}

static PyObject *make_setter(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!expect("setter", 2, count))
        return NULL;
    Py_ssize_t groups = PyTuple_Size(args[0]), words = 0;
    for (Py_ssize_t i = 0; i < groups; i++) {
        Py_ssize_t more = PyTuple_Size(PyTuple_GetItem(args[0], i));
        if (more < 0)
            return NULL;
        words += more;
    }
    PyObject *capsule = groups < 0 ? NULL : new_bound(words, groups, args[1]);
    if (!capsule)
        return NULL;
    Bound *bound = bound_of(capsule);
    for (Py_ssize_t i = 0, end = 0; i < groups; i++) {
        Py_ssize_t more = put_words(bound->words + end, PyTuple_GetItem(args[0], i));
        if (more < 0) {
            Py_DECREF(capsule);
            return NULL;
        }
        bound->ends[i] = end += more;
    }
    return bind(&bound_methods[1], capsule);
}

static PyObject *make_waiter(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t *word;
    int64_t budget;
    if (!expect("waiter", 3, count) || !(word = word_at(args[0])) || !as_int64(args[1], &budget))
        return NULL;
    PyObject *capsule = new_bound(1, 1, args[2]);
    if (!capsule)
        return NULL;
    Bound *bound = bound_of(capsule);
    bound->words[0] = word;
    bound->budget = budget;
    return bind(&bound_methods[2], capsule);
}

static PyMethodDef methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_FASTCALL,
     "load(address) -> int: read the word, acquire."},
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL,
     "store(address, value) -> None: write the word, release."},
    {"wait", (PyCFunction)(void (*)(void))wait_for, METH_FASTCALL,
     "wait(address, at_least, budget_ns) -> int: poll without the GIL, return the last value."},
    {"reader", (PyCFunction)(void (*)(void))make_reader, METH_FASTCALL,
     "reader(addresses, keep) -> () -> tuple: load the words, first to last."},
    {"setter", (PyCFunction)(void (*)(void))make_setter, METH_FASTCALL,
     "setter(groups, keep) -> (*values) -> None: store each value to all words of its group."},
    {"waiter", (PyCFunction)(void (*)(void))make_waiter, METH_FASTCALL,
     "waiter(address, budget_ns, keep) -> (at_least) -> int: as wait, for one word."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_atomics", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__atomics(void) { return PyModuleDef_Init(&definition); }
