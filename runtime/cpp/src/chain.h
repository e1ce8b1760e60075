// Sessions that run one after another as if they were one: a graph, whole or in segments.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ort.h"

namespace pop::internal {

// An input or an output of a session; sizes that it leaves open are -1.
struct ValueInfo {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    std::vector<std::int64_t> shape;
};

// One session of a chain: a segment, or a whole graph, which hands nothing on.
struct Link {
    std::string graph;                      // file name
    std::optional<std::string> hidden_in;   // input for the hidden states of the link before; none reads none
    std::optional<std::string> hidden_out;  // output of its own; none hands on what it was given
    Ort::Session session{nullptr};
    std::map<std::string, ValueInfo> inputs;
    std::map<std::string, ValueInfo> outputs;
};

// The links of a stage in the order in which they run. A link of both stages is the same one in both chains.
using Chain = std::vector<const Link*>;

// Returns whether both chains hand on hidden states at the same places, so that a joined turn can go through them:
// each link of one stands beside one of the other, which is the same or reads and writes alike.
bool have_same_places(const Chain& prefill, const Chain& decode);

}  // namespace pop::internal
