// ONNX Runtime's C++ API, with its own warnings off, and its errors as ours.
#pragma once

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wpedantic"
#endif
#include <onnxruntime_cxx_api.h>
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#include <string>

#include "pop/error.h"

namespace pop::internal {

// Returns an error of ONNX Runtime as one line.
BackendError backend_error(const std::string& place, const std::string& expected, const std::exception& error);

}  // namespace pop::internal
