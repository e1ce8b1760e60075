// The errors a user can meet, each with the exit code its command ends with (the same as in `pop_runtime.errors`).
//
// A message is one line that names the place, what was expected, what was found and the next step.
#pragma once

#include <stdexcept>
#include <string>

namespace pop {

// Base of every error that a user can cause or cure.
class Error : public std::runtime_error {
public:
    // What a command that ends with this error returns.
    int exit_code() const noexcept { return exit_code_; }

protected:
    Error(const std::string& message, int exit_code) : std::runtime_error(message), exit_code_(exit_code) {}

private:
    int exit_code_;
};

// An argument or a combination of them is wrong.
class UsageError : public Error {
public:
    explicit UsageError(const std::string& message) : Error(message, 2) {}
};

// A bundle is missing, damaged or of a kind that is not supported.
class ModelError : public Error {
public:
    explicit ModelError(const std::string& message) : Error(message, 3) {}
};

// ONNX Runtime failed, or the system refused memory.
class BackendError : public Error {
public:
    explicit BackendError(const std::string& message) : Error(message, 4) {}
};

// A quality or parity gate was not met. The library measures none: for programs that compare models with it.
class GateError : public Error {
public:
    explicit GateError(const std::string& message) : Error(message, 5) {}
};

}  // namespace pop
