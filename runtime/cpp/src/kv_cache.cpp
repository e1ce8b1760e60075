#include "kv_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "sessions.h"
#include "text_format.h"

namespace pop::internal {

namespace {

std::size_t element_bytes(ONNXTensorElementDataType type) {
    return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
}

// Returns the product, or the largest number if it does not fit, which no system grants.
std::size_t product(std::initializer_list<std::int64_t> factors) {
    std::size_t total = 1;
    for (const auto factor : factors) {
        const auto size = static_cast<std::size_t>(factor);
        if (size != 0 && total > std::numeric_limits<std::size_t>::max() / size) {
            return std::numeric_limits<std::size_t>::max();
        }
        total *= size;
    }
    return total;
}

}  // namespace

KvCache::KvCache(const Manifest& manifest, std::int64_t capacity)
    : capacity_(capacity), type_(element_type(manifest.kv_dtype)) {
    const auto add = [&](std::size_t layer, const std::string& past, const std::string& present,
                         std::int64_t head_size) {
        const auto num_heads = manifest.kv_layers[layer].num_heads;
        const auto num_bytes =
            product({num_heads, capacity, head_size, static_cast<std::int64_t>(element_bytes(type_))});
        std::unique_ptr<void, decltype(&std::free)> memory(std::calloc(num_bytes, 1), &std::free);
        if (!memory) {
            throw BackendError(message(
                "KV cache", std::to_string(num_bytes) + " bytes a layer for " + std::to_string(capacity) + " tokens",
                "less", "ask for fewer tokens"));
        }
        buffers_.push_back(
            {layer_name(past, layer), layer_name(present, layer), num_heads, head_size, num_bytes, std::move(memory)});
    };
    for (std::size_t layer = 0; layer < manifest.kv_layers.size(); ++layer) {
        add(layer, manifest.past_key, manifest.present_key, manifest.kv_layers[layer].key_head_size);
        add(layer, manifest.past_value, manifest.present_value, manifest.kv_layers[layer].value_head_size);
    }
}

KvCache KvCache::grown(const Manifest& manifest, std::int64_t capacity) const {
    KvCache larger(manifest, capacity);
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
        const auto& buffer = buffers_[index];
        const auto token_bytes = static_cast<std::size_t>(buffer.head_size) * element_bytes(type_);
        const auto* from = static_cast<const char*>(buffer.memory.get());
        auto* to = static_cast<char*>(larger.buffers_[index].memory.get());
        for (std::int64_t head = 0; head < buffer.num_heads; ++head) {
            std::memcpy(to, from, depth.size() * token_bytes);
            from += static_cast<std::size_t>(capacity_) * token_bytes;
            to += static_cast<std::size_t>(capacity) * token_bytes;
        }
    }
    larger.depth = depth;
    return larger;
}

Ort::Value KvCache::value(const Buffer& buffer) const {
    const std::array<std::int64_t, 4> shape{1, buffer.num_heads, capacity_, buffer.head_size};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    return Ort::Value::CreateTensor(memory, buffer.memory.get(), buffer.num_bytes, shape.data(), shape.size(), type_);
}

BoundGraph::BoundGraph(const Ort::Session& session, const Manifest& manifest, const KvCache& cache, std::string name,
                       bool has_logits)
    : session_(const_cast<Ort::Session&>(session)),  // NOLINT: running changes nothing, but the API has no const form
      name_(std::move(name)),
      ids_name_(manifest.input_ids),
      mask_name_(manifest.attention_mask),
      memory_(Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault)),
      binding_(session_),
      ones_(static_cast<std::size_t>(cache.capacity()), 1) {
    for (const auto& buffer : cache.buffers()) {
        const auto value = cache.value(buffer);
        binding_.BindInput(buffer.past_name.c_str(), value);
        binding_.BindOutput(buffer.present_name.c_str(), value);
    }
    if (has_logits) bind_logits(manifest);
}

void BoundGraph::bind_logits(const Manifest& manifest) {
    const Ort::AllocatorWithDefaultOptions allocator;
    for (std::size_t index = 0; index < session_.GetOutputCount(); ++index) {
        if (manifest.logits == session_.GetOutputNameAllocated(index, allocator).get()) {
            logits_type_ = session_.GetOutputTypeInfo(index).GetTensorTypeAndShapeInfo().GetElementType();
        }
    }
    const auto size = static_cast<std::size_t>(manifest.vocab_size);
    const std::array<std::int64_t, 3> shape{1, 1, manifest.vocab_size};
    logits_.resize(size);
    void* data = logits_.data();
    if (logits_type_ != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
        raw_half_.resize(size);
        data = raw_half_.data();
    }
    const auto num_bytes = size * element_bytes(logits_type_);
    const auto value = Ort::Value::CreateTensor(memory_, data, num_bytes, shape.data(), shape.size(), logits_type_);
    binding_.BindOutput(manifest.logits.c_str(), value);
}

void BoundGraph::run(const std::int64_t* ids, std::size_t count, std::int64_t total, const Ort::RunOptions& options) {
    try {
        if (num_bound_ == count) {
            std::copy(ids, ids + count, ids_.begin());
        } else {
            ids_.assign(ids, ids + count);
            const std::array<std::int64_t, 2> shape{1, static_cast<std::int64_t>(count)};
            num_bound_ = 0;
            binding_.BindInput(ids_name_.c_str(),
                               Ort::Value::CreateTensor(memory_, ids_.data(), count, shape.data(), shape.size()));
            num_bound_ = count;
        }
        const std::array<std::int64_t, 2> shape{1, total};
        binding_.BindInput(mask_name_.c_str(),
                           Ort::Value::CreateTensor(memory_, ones_.data(), static_cast<std::size_t>(total),
                                                    shape.data(), shape.size()));
        session_.Run(options, binding_);
    } catch (const Ort::Exception& error) {
        const auto expected = "a run over " + std::to_string(count) + " tokens, " + std::to_string(total) + " in all";
        throw backend_error(name_, expected, error);
    }
}

const std::vector<float>& BoundGraph::logits() {
    for (std::size_t index = 0; index < raw_half_.size(); ++index) {
        const auto bits = raw_half_[index];
        logits_[index] = logits_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
                             ? Ort::Float16_t::FromBits(bits).ToFloat()
                             : Ort::BFloat16_t::FromBits(bits).ToFloat();
    }
    return logits_;
}

}  // namespace pop::internal
