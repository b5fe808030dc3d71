// What the drivers share: a check that ends the program and says where, and an end to programs that hang.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            std::fprintf(stderr, "%s:%d: %s is not so\n", __FILE__, __LINE__, #what); \
            std::abort();                                                             \
        }                                                                             \
    } while (false)

// Ends a program that hangs, by SIGALRM. Far more than any of them takes under a sanitizer on a busy machine.
inline void end_if_it_hangs() { alarm(540); }
