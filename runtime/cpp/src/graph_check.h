// What is checked of graphs before they are trusted: that they are what the manifest says.
#pragma once

#include <filesystem>
#include <string>

#include "chain.h"
#include "pop/manifest.h"

namespace pop::internal {

// Returns the ONNX element type that "float32", "float16" or "bfloat16" stands for.
ONNXTensorElementDataType element_type(const std::string& dtype);

// Returns the inputs or the outputs of a session by name.
std::map<std::string, ValueInfo> values_of(const Ort::Session& session, bool inputs);

// Checks that the links of a stage have the inputs and outputs which the manifest promises, with the right types and
// sizes, and that each reads the hidden states that the one before makes.
//
// graph: the whole graph's file, for messages. has_logits: whether the stage gives logits.
// Throws ModelError: the first that is missing, or has another type or size.
void check_chain(const Chain& chain, const Manifest& manifest, const std::filesystem::path& folder,
                 const std::string& graph, bool has_logits);

}  // namespace pop::internal
