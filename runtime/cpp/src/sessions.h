// The ONNX Runtime sessions of a bundle: how they are opened and what is checked before they are trusted.
#pragma once

#include <filesystem>
#include <memory>

#include "chain.h"
#include "pop/manifest.h"
#include "pop/model.h"
#include "weights.h"

namespace pop::internal {

// Both graphs of a bundle, loaded. May be used from several threads at once.
struct SessionPair {
    std::unique_ptr<SharedWeights> weights;  // outlives the sessions
    int threads = 0;
    std::vector<Link> links;  // of both stages; stay where they are, for the chains point to them
    Chain prefill;
    Chain decode;
    bool can_join = false;  // whether both stages of a turn's chunk can be fed at once (joined.h)
};

// Returns how many cores this process may run on: a container or `taskset` can leave it fewer than there are.
int visible_cores();

// Returns both graphs of a bundle: as chains of its segments, which hold the kept layers once, or whole if it has none.
// With `low_memory` weights that are not quantised are left as they lie in the file, whole graphs sharing all of them.
//
// Throws UsageError: fewer than one thread. ModelError: a graph is missing, or its inputs and outputs are not those of
// the manifest. BackendError: ONNX Runtime cannot load a graph.
SessionPair open_pair(const std::filesystem::path& folder, const Manifest& manifest, const LoadOptions& options);

// Returns both graphs as chains of segments, or whole. threads: of each session. Throws as `open_pair`.
SessionPair open_segments(const std::filesystem::path& folder, const Manifest& manifest, int threads);
SessionPair open_graphs(const std::filesystem::path& folder, const Manifest& manifest, int threads, bool low_memory);

// Returns the process's environment of ONNX Runtime, with one pool of memory for the sessions of this library: what a
// run needs in between is then there once, not once for each session. It is never let go.
const Ort::Env& environment();

}  // namespace pop::internal
