#include "kv_cache.h"

#include <sys/mman.h>

#include <array>
#include <cstring>
#include <limits>

#include "graph_check.h"
#include "text_format.h"

namespace pop::internal {

namespace {

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

// Returns zeros in pages of their own. `calloc` writes them if it has freed memory to give, as it has after loading:
// int4 SmolLM2 with a quarter of a cache of 544 tokens in use takes 6 MB more.
std::unique_ptr<void, UnmapMemory> zeros(std::size_t num_bytes) {
    void* memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return {memory == MAP_FAILED ? nullptr : memory, {num_bytes}};
}

}  // namespace

void UnmapMemory::operator()(void* memory) const noexcept { ::munmap(memory, num_bytes); }

std::size_t element_bytes(ONNXTensorElementDataType type) {
    return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
}

KvCache::KvCache(const Manifest& manifest, std::int64_t capacity)
    : capacity_(capacity), type_(element_type(manifest.kv_dtype)) {
    const auto add = [&](std::size_t layer, const std::string& past, const std::string& present,
                         std::int64_t head_size) {
        const auto num_heads = manifest.kv_layers[layer].num_heads;
        const auto num_bytes =
            product({num_heads, capacity, head_size, static_cast<std::int64_t>(element_bytes(type_))});
        auto memory = zeros(num_bytes);
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

}  // namespace pop::internal
