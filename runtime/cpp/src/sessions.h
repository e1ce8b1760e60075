// The two ONNX Runtime sessions of a bundle: how they are opened and what is checked before they are trusted.
#pragma once

#include <filesystem>
#include <memory>

#include "ort.h"
#include "pop/manifest.h"
#include "pop/model.h"
#include "weights.h"

namespace pop::internal {

// Both graphs of a bundle, loaded. May be used from several threads at once.
struct SessionPair {
    Ort::Env env;
    std::unique_ptr<SharedWeights> weights;  // outlives the sessions
    Ort::Session prefill{nullptr};
    Ort::Session decode{nullptr};
    int threads = 0;
};

// Returns how many cores this process may run on: a container or `taskset` can leave it fewer than there are.
int visible_cores();

// Returns both sessions of a bundle.
//
// Throws UsageError: fewer than one thread. ModelError: a graph is missing, or its inputs and outputs are not those of
// the manifest. BackendError: ONNX Runtime cannot load a graph.
SessionPair open_pair(const std::filesystem::path& folder, const Manifest& manifest, const LoadOptions& options);

// Returns the process's environment of ONNX Runtime, with one pool of memory for the sessions of this library: what a
// run needs in between is then there once, not once for each graph (SmolLM2 in int4: the pair takes 1.06 times the
// memory of one graph, not 1.10 times).
Ort::Env make_env();

// Returns the settings of a session, those of `pop_runtime.sessions`, which gives the measurements behind them: prefill
// threads do not spin, so that they cannot take cores from the decode steps that follow; decode threads do, since a
// step is short and waking a thread is not.
//
// packed: repack weights for faster kernels.
Ort::SessionOptions session_options(int threads, bool spin, bool packed);

// Returns the ONNX element type that "float32", "float16" or "bfloat16" stands for.
ONNXTensorElementDataType element_type(const std::string& dtype);

}  // namespace pop::internal
