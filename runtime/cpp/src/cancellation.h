#pragma once

#include <atomic>

#include "ort.h"
#include "pop/model.h"

namespace pop {

// The options of every run that a cancellation can end: terminating them is how ONNX Runtime stops within a run.
struct Cancellation::State {
    std::atomic<bool> is_cancelled{false};
    Ort::RunOptions options;
};

}  // namespace pop
