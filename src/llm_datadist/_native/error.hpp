// The one exception the native part raises about its arguments, and the text it carries.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace datadist {

// An argument breaks a rule; nothing has happened. Becomes llm_datadist.errors.ParamError.
struct RuleError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    throw RuleError(text(parts...));
}

}  // namespace datadist
