// Exceptions for arguments that break a rule and for lanes that break, and their text.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace datadist {

// An argument or a state breaks a rule. Becomes llm_datadist.errors.ParamError.
struct RuleError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The peer or the network broke a lane, which is dropped.
struct LaneError : std::runtime_error {
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

template <typename... Parts>
[[noreturn]] void break_lane(const Parts&... parts) {
    throw LaneError(text(parts...));
}

}  // namespace datadist
