// OpenSSL's libcrypto, loaded at run time: builds do not need it, only encrypted lanes do.
#pragma once

#include <dlfcn.h>

#include <cstddef>

#include "error.hpp"

namespace datadist {

constexpr const char* libcrypto_name = "libcrypto.so.3";

// Functions of OpenSSL 3. The first caller loads them; they are never unloaded.
class Libcrypto {
public:
    // Throws RuleError if it cannot be loaded; the next call tries again.
    static const Libcrypto& get() {
        static const Libcrypto loaded(libcrypto_name);
        return loaded;
    }

    explicit Libcrypto(const char* name) : name_(name), library_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
        if (library_ == nullptr) refuse_for(::dlerror());
        find(new_context, "EVP_CIPHER_CTX_new");
        find(free_context, "EVP_CIPHER_CTX_free");
        find(aes_256_gcm, "EVP_aes_256_gcm");
        find(init, "EVP_CipherInit_ex");
        find(update, "EVP_CipherUpdate");
        find(final, "EVP_CipherFinal_ex");
        find(control, "EVP_CIPHER_CTX_ctrl");
        find(clear_errors, "ERR_clear_error");
        find(version_text_, "OpenSSL_version");
    }

    Libcrypto(const Libcrypto&) = delete;
    Libcrypto& operator=(const Libcrypto&) = delete;

    using Bytes = const unsigned char*;

    // EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG
    static constexpr int get_tag = 0x10;
    static constexpr int set_tag = 0x11;

    void* (*new_context)() = nullptr;
    void (*free_context)(void* context) = nullptr;  // wipes the key
    const void* (*aes_256_gcm)() = nullptr;
    int (*init)(void* context, const void* cipher, void* engine, Bytes key, Bytes iv, int encrypts) = nullptr;
    int (*update)(void* context, unsigned char* out, int* out_bytes, Bytes in, int in_bytes) = nullptr;
    int (*final)(void* context, unsigned char* out, int* out_bytes) = nullptr;
    int (*control)(void* context, int what, int bytes, void* value) = nullptr;
    void (*clear_errors)() = nullptr;

    // As OpenSSL names itself: "OpenSSL 3.0.13 30 Jan 2024".
    const char* version() const { return version_text_(0); }

    // Path of the loaded file.
    const char* path() const {
        Dl_info info{};
        return ::dladdr(reinterpret_cast<void*>(new_context), &info) != 0 && info.dli_fname ? info.dli_fname : name_;
    }

private:
    template <typename Function>
    void find(Function& function, const char* symbol) {
        function = reinterpret_cast<Function>(::dlsym(library_, symbol));
        if (function == nullptr) refuse_for(::dlerror());
    }

    [[noreturn]] void refuse_for(const char* why) const {
        refuse("keys: encrypted lanes need OpenSSL 3, and ", name_, " cannot be used: ", why ? why : "unknown error");
    }

    const char* (*version_text_)(int what) = nullptr;
    const char* name_;
    void* library_;
};

}  // namespace datadist
