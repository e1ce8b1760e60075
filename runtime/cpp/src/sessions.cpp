#include "sessions.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "text_format.h"

namespace pop::internal {

namespace {

constexpr std::int64_t kAny = -1;  // a size that a graph leaves open, or that is not checked

struct ValueInfo {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    std::vector<std::int64_t> shape;
};

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

// Returns the inputs or the outputs of a session by name.
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

// Checks that a graph has the inputs and outputs which the manifest promises, with the right types and sizes.
class GraphCheck {
public:
    GraphCheck(const Ort::Session& session, std::string place)
        : inputs_(values_of(session, true)), outputs_(values_of(session, false)), place_(std::move(place)) {}

    void input(const std::string& name, ONNXTensorElementDataType type, const std::vector<std::int64_t>& shape) const {
        check(inputs_, name, {type}, shape);
    }
    void output(const std::string& name, const std::vector<ONNXTensorElementDataType>& types,
                const std::vector<std::int64_t>& shape) const {
        check(outputs_, name, types, shape);
    }

private:
    void check(const std::map<std::string, ValueInfo>& values, const std::string& name,
               const std::vector<ONNXTensorElementDataType>& types, const std::vector<std::int64_t>& shape) const {
        const auto found = values.find(name);
        if (found == values.end()) {
            throw ModelError(message(place_, "the value '" + name + "' (manifest.json)", "none", "re-run pop-export"));
        }
        const auto& value = found->second;
        const auto place = place_ + ", " + name;
        if (std::find(types.begin(), types.end(), value.type) == types.end()) {
            std::vector<std::string> names;
            for (const auto type : types) names.push_back(type_name(type));
            throw ModelError(
                message(place, join(names, " or ") + " (manifest.json)", type_name(value.type), "re-run pop-export"));
        }
        const bool agrees = std::equal(
            shape.begin(), shape.end(), value.shape.begin(), value.shape.end(),
            [](std::int64_t wanted, std::int64_t size) { return wanted == kAny || size < 0 || size == wanted; });
        if (!agrees) {
            throw ModelError(message(place, "shape " + shape_text(shape) + " (manifest.json)", shape_text(value.shape),
                                     "re-run pop-export"));
        }
    }

    std::map<std::string, ValueInfo> inputs_;
    std::map<std::string, ValueInfo> outputs_;
    std::string place_;
};

void check_graph(const Ort::Session& session, const Manifest& manifest, const std::string& place, bool has_logits) {
    const GraphCheck graph(session, place);
    const auto kind = element_type(manifest.kv_dtype);
    for (const auto& name : {manifest.input_ids, manifest.attention_mask}) {
        graph.input(name, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {kAny, kAny});
    }
    for (std::size_t layer = 0; layer < manifest.kv_layers.size(); ++layer) {
        const auto& kv = manifest.kv_layers[layer];
        const std::vector<std::int64_t> key{kAny, kv.num_heads, kAny, kv.key_head_size};
        const std::vector<std::int64_t> value{kAny, kv.num_heads, kAny, kv.value_head_size};
        graph.input(layer_name(manifest.past_key, layer), kind, key);
        graph.input(layer_name(manifest.past_value, layer), kind, value);
        graph.output(layer_name(manifest.present_key, layer), {kind}, key);
        graph.output(layer_name(manifest.present_value, layer), {kind}, value);
    }
    if (has_logits) {
        graph.output(manifest.logits,
                     {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                      ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
                     {kAny, kAny, manifest.vocab_size});
    }
}

Ort::Session open_session(SessionPair& pair, const std::filesystem::path& folder, const std::string& graph,
                          Ort::SessionOptions options) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(folder / graph, ignored)) {
        throw ModelError(message((folder / graph).string(), "an ONNX graph", "none", "re-run pop-export"));
    }
    try {
        return pair.weights->open(pair.env, graph, options);
    } catch (const Ort::Exception& error) {
        throw backend_error(graph, "a graph that ONNX Runtime loads", error);
    }
}

}  // namespace

BackendError backend_error(const std::string& place, const std::string& expected, const std::exception& error) {
    const auto next = "re-run pop-export, or change onnxruntime " + Ort::GetVersionString();
    return BackendError(message(place, expected, one_line(error.what(), 400), next));
}

ONNXTensorElementDataType element_type(const std::string& dtype) {
    if (dtype == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    if (dtype == "bfloat16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

Ort::Env make_env() {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "pop");
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    try {
        env.CreateAndRegisterAllocator(memory, Ort::ArenaCfg(0, -1, -1, -1));  // the defaults
    } catch (const Ort::Exception&) {
        // The environment is the same for all models of the process, and has a pool already.
    }
    return env;
}

Ort::SessionOptions session_options(int threads, bool spin, bool packed) {
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
    options.SetIntraOpNumThreads(threads);
    options.SetInterOpNumThreads(1);
    options.DisableMemPattern();  // kept per input shape, but the mask is longer at every step: never used again
    options.AddConfigEntry("session.use_env_allocators", "1");
    options.AddConfigEntry("session.intra_op.allow_spinning", spin ? "1" : "0");
    if (!packed) options.AddConfigEntry("session.disable_prepacking", "1");
    return options;
}

int visible_cores() {
#if defined(__linux__)
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(CPU_COUNT(&cores), 1);
#endif
    return static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
}

SessionPair open_pair(const std::filesystem::path& folder, const Manifest& manifest, const LoadOptions& options) {
    if (options.threads && *options.threads < 1) {
        throw UsageError(message("threads", "at least 1", std::to_string(*options.threads),
                                 "leave it out to use the visible cores"));
    }
    SessionPair pair{make_env(), std::make_unique<SharedWeights>(folder, manifest)};
    pair.threads = options.threads.value_or(visible_cores());
    // The fast kernels of quantised weights exist for packed weights alone: a step would take 40 times as long.
    const bool quantised = manifest.precision.compare(0, 3, "int") == 0;
    pair.decode = open_session(pair, folder, manifest.decode_graph,
                               session_options(pair.threads, true, !options.low_memory || quantised));
    check_graph(pair.decode, manifest, (folder / manifest.decode_graph).string(), true);
    pair.prefill =
        open_session(pair, folder, manifest.prefill_graph, session_options(pair.threads, false, !options.low_memory));
    check_graph(pair.prefill, manifest, (folder / manifest.prefill_graph).string(), false);
    pair.weights->release_pages();
    return pair;
}

}  // namespace pop::internal
