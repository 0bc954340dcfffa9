/* gemmlink.transport._atomics: the core's three operations for Python, on integer addresses.
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

static PyObject *wait_for(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t *word;
    int64_t at_least, budget;
    if (!expect("wait", 3, count) || !(word = word_at(args[0])) || !as_int64(args[1], &at_least) ||
        !as_int64(args[2], &budget))
        return NULL;
    if (budget < 0)
        budget = 0;
    int64_t started = gemmlink_now();
    int64_t until = budget > INT64_MAX - started ? INT64_MAX : started + budget;
    for (;;) {
        int64_t now = gemmlink_now();
        int64_t value;
        Py_BEGIN_ALLOW_THREADS;
        value = gemmlink_wait(word, at_least, started, until - now > SLICE ? now + SLICE : until);
        Py_END_ALLOW_THREADS;
        if (value >= at_least || now >= until)
            return PyLong_FromLongLong(value);
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
}

static PyMethodDef methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_FASTCALL,
     "load(address) -> int: read the word, acquire."},
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL,
     "store(address, value) -> None: write the word, release."},
    {"wait", (PyCFunction)(void (*)(void))wait_for, METH_FASTCALL,
     "wait(address, at_least, budget_ns) -> int: poll without the GIL, return the last value."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_atomics", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__atomics(void) { return PyModuleDef_Init(&definition); }
