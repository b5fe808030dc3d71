// The Python headers are those of the machine that builds. This stops a cross build where their pyconfig.h is wrong for
// the processor that is built for; all else in it is the same for every Linux of 64 bits and little endian.
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <ctime>

static_assert(SIZEOF_SHORT == sizeof(short) && SIZEOF_INT == sizeof(int) && SIZEOF_LONG == sizeof(long));
static_assert(SIZEOF_LONG_LONG == sizeof(long long) && SIZEOF_VOID_P == sizeof(void*));
static_assert(SIZEOF_SIZE_T == sizeof(std::size_t) && SIZEOF_UINTPTR_T == sizeof(std::uintptr_t));
static_assert(SIZEOF_FLOAT == sizeof(float) && SIZEOF_DOUBLE == sizeof(double) && SIZEOF__BOOL == sizeof(bool));
static_assert(SIZEOF_WCHAR_T == sizeof(wchar_t) && SIZEOF_TIME_T == sizeof(std::time_t));
static_assert(SIZEOF_PID_T == sizeof(pid_t) && SIZEOF_OFF_T == sizeof(off_t));
static_assert(ALIGNOF_LONG == alignof(long) && ALIGNOF_SIZE_T == alignof(std::size_t));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
#if defined(WORDS_BIGENDIAN) || defined(Py_DEBUG)
#error "pyconfig.h is of a big-endian machine, or of a debug build"
#endif
