// The interpreter's lock, wanted back by a thread that may be ended while it waits.
//
// When the interpreter exits, it ends such a thread, before Python 3.14 with pthread_exit(), which unwinds the stack. The
// C++ frames between here and the interpreter do not allow that: they end the process by a signal. Such a thread stays
// where it is until the process has ended.
//
// In C, where a cleanup handler is a place to jump to: in C++ it would be caught by the C++ library, and that of a wheel,
// linked statically with an unwinder of its own, cannot read the frames of the system's.
#include <Python.h>

#include <pthread.h>
#include <unistd.h>

static void stay_for_ever(void* unused) {
    (void)unused;
    for (;;) pause();
}

void datadist_take_gil_back(PyThreadState* state) {
    pthread_cleanup_push(stay_for_ever, NULL);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}
