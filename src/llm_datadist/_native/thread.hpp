// Named threads that block signals: the interpreter's threads take them.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <thread>
#include <utility>

namespace datadist {

class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

template <typename Work>
std::thread quiet_thread(const std::string& name, Work work) {
    const SignalsBlocked blocked;  // a new thread inherits the mask
    std::thread thread(std::move(work));
    pthread_setname_np(thread.native_handle(), name.c_str());
    return thread;
}

}  // namespace datadist
