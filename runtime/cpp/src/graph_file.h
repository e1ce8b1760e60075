// What the library has to know of an ONNX file that ONNX Runtime does not tell: where its weights lie.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pop::internal {

// An initializer of a graph whose bytes lie in another file.
struct ExternalTensor {
    std::string name;
    std::int32_t data_type = 0;  // TensorProto.DataType
    std::vector<std::int64_t> dims;
    std::string location;  // the file, relative to the graph's folder
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
};

// Returns the external initializers of the main graph, in the order of the file.
//
// It reads the six fields it needs of the protobuf wire format, whose numbers are fixed for good (onnx.proto), rather
// than bring in protobuf and a generated reader for them.
//
// model: bytes of a ModelProto.
// place: the file, for messages.
// Throws ModelError: the bytes are not that, or an external tensor lacks location or length.
std::vector<ExternalTensor> external_tensors(std::string_view model, const std::string& place);

}  // namespace pop::internal
