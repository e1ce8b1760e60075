#include "graph_check.h"

#include <algorithm>

#include "text_format.h"

namespace pop::internal {

namespace {

constexpr std::int64_t kAny = -1;  // a size that a graph leaves open, or that is not checked

std::string type_name(ONNXTensorElementDataType type) {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return "float32";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return "float16";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return "bfloat16";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return "int64";
        default: return "element type " + std::to_string(type);
    }
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::vector<std::string> sizes;
    for (const auto size : shape) sizes.push_back(size < 0 ? "any" : std::to_string(size));
    return "[" + join(sizes, ", ") + "]";
}

const std::vector<ONNXTensorElementDataType> kFloats{
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};

// Checks one input or output; a size that the graph leaves open is accepted.
void check_value(const ValueInfo& value, const std::vector<ONNXTensorElementDataType>& types,
                 const std::vector<std::int64_t>& shape, const std::string& place) {
    if (std::find(types.begin(), types.end(), value.type) == types.end()) {
        std::vector<std::string> names;
        for (const auto type : types) names.push_back(type_name(type));
        throw ModelError(
            message(place, join(names, " or ") + " (manifest.json)", type_name(value.type), "re-run pop-export"));
    }
    const bool agrees =
        std::equal(shape.begin(), shape.end(), value.shape.begin(), value.shape.end(),
                   [](std::int64_t wanted, std::int64_t size) { return wanted == kAny || size < 0 || size == wanted; });
    if (!agrees) {
        throw ModelError(message(place, "shape " + shape_text(shape) + " (manifest.json)", shape_text(value.shape),
                                 "re-run pop-export"));
    }
}

// Checks what the links of a stage read and make together.
class ChainCheck {
public:
    ChainCheck(const Chain& chain, const std::filesystem::path& folder, const std::string& graph)
        : chain_(chain), folder_(folder), graph_(graph) {}

    void input(const std::string& name, ONNXTensorElementDataType type, const std::vector<std::int64_t>& shape) const {
        check(&Link::inputs, name, {type}, shape);
    }
    void output(const std::string& name, const std::vector<ONNXTensorElementDataType>& types,
                const std::vector<std::int64_t>& shape) const {
        check(&Link::outputs, name, types, shape);
    }
    // Checks that each link reads the hidden states, [B, S, E], that one before it makes.
    void hidden_states() const {
        const ValueInfo* made = nullptr;
        for (const auto* link : chain_) {
            const auto path = (folder_ / link->graph).string();
            if (link->hidden_in) {
                const auto& value = find(link->inputs, *link->hidden_in, path);
                if (made == nullptr) {
                    throw ModelError(message(path + ", " + *link->hidden_in, "hidden states of the segment before",
                                             "none", "re-run pop-export"));
                }
                check_value(value, {made->type}, {kAny, kAny, made->shape[2]}, path + ", " + *link->hidden_in);
            }
            if (!link->hidden_out) continue;
            made = &find(link->outputs, *link->hidden_out, path);
            check_value(*made, kFloats, {kAny, kAny, kAny}, path + ", " + *link->hidden_out);
            if (made->shape[2] < 1) {
                throw ModelError(message(path + ", " + *link->hidden_out, "hidden states of a fixed size",
                                         shape_text(made->shape), "re-run pop-export"));
            }
        }
    }

private:
    using Values = std::map<std::string, ValueInfo>;

    static const ValueInfo& find(const Values& values, const std::string& name, const std::string& place) {
        const auto found = values.find(name);
        if (found != values.end()) return found->second;
        throw ModelError(message(place, "the value '" + name + "' (manifest.json)", "none", "re-run pop-export"));
    }
    // Checks a value of every link that has it.
    void check(Values Link::* values, const std::string& name, const std::vector<ONNXTensorElementDataType>& types,
               const std::vector<std::int64_t>& shape) const {
        bool is_there = false;
        for (const auto* link : chain_) {
            const auto found = (link->*values).find(name);
            if (found == (link->*values).end()) continue;
            is_there = true;
            check_value(found->second, types, shape, (folder_ / link->graph).string() + ", " + name);
        }
        if (!is_there) find({}, name, (folder_ / graph_).string());
    }

    const Chain& chain_;
    const std::filesystem::path& folder_;
    const std::string& graph_;
};

}  // namespace

void check_chain(const Chain& chain, const Manifest& manifest, const std::filesystem::path& folder,
                 const std::string& graph, bool has_logits) {
    const ChainCheck check(chain, folder, graph);
    const auto kind = element_type(manifest.kv_dtype);
    for (const auto& name : {manifest.input_ids, manifest.attention_mask}) {
        check.input(name, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {kAny, kAny});
    }
    for (std::size_t layer = 0; layer < manifest.kv_layers.size(); ++layer) {
        const auto& kv = manifest.kv_layers[layer];
        const std::vector<std::int64_t> key{kAny, kv.num_heads, kAny, kv.key_head_size};
        const std::vector<std::int64_t> value{kAny, kv.num_heads, kAny, kv.value_head_size};
        check.input(layer_name(manifest.past_key, layer), kind, key);
        check.input(layer_name(manifest.past_value, layer), kind, value);
        check.output(layer_name(manifest.present_key, layer), {kind}, key);
        check.output(layer_name(manifest.present_value, layer), {kind}, value);
    }
    if (has_logits) check.output(manifest.logits, kFloats, {kAny, kAny, manifest.vocab_size});
    check.hidden_states();
}

ONNXTensorElementDataType element_type(const std::string& dtype) {
    if (dtype == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    if (dtype == "bfloat16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

std::map<std::string, ValueInfo> values_of(const Ort::Session& session, bool inputs) {
    const Ort::AllocatorWithDefaultOptions allocator;
    std::map<std::string, ValueInfo> values;
    const auto count = inputs ? session.GetInputCount() : session.GetOutputCount();
    for (std::size_t index = 0; index < count; ++index) {
        const auto name =
            inputs ? session.GetInputNameAllocated(index, allocator) : session.GetOutputNameAllocated(index, allocator);
        const auto type = inputs ? session.GetInputTypeInfo(index) : session.GetOutputTypeInfo(index);
        auto& value = values[name.get()];
        if (type.GetONNXType() != ONNX_TYPE_TENSOR) continue;
        const auto tensor = type.GetTensorTypeAndShapeInfo();
        value = {tensor.GetElementType(), tensor.GetShape()};
    }
    return values;
}

}  // namespace pop::internal
