// The KV buffers that both graphs read and write in place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ort.h"
#include "pop/manifest.h"
#include "pop/model.h"

namespace pop::internal {

// Returns the bytes of one element of a float type.
std::size_t element_bytes(ONNXTensorElementDataType type);

struct UnmapMemory {
    std::size_t num_bytes = 0;
    void operator()(void* memory) const noexcept;
};

// K and V of every layer of one sequence, and for each position in use what wrote it.
//
// The memory is zeros (so no stray NaN can reach an attention kernel), in pages that the system hands out only when
// they are written.
class KvCache {
public:
    // One buffer, [1, H_kv, S_max, D].
    struct Buffer {
        std::string past_name;
        std::string present_name;
        std::int64_t num_heads;
        std::int64_t head_size;
        std::size_t num_bytes;
        std::unique_ptr<void, UnmapMemory> memory;
    };

    // Throws BackendError: the system refuses the memory (gives the bytes asked for).
    KvCache(const Manifest& manifest, std::int64_t capacity);

    // Returns a larger cache with the positions in use copied. Throws as the constructor.
    KvCache grown(const Manifest& manifest, std::int64_t capacity) const;

    // How many tokens fit: S_max.
    std::int64_t capacity() const { return capacity_; }
    const std::vector<Buffer>& buffers() const { return buffers_; }

    // Returns a value over the memory of a buffer.
    Ort::Value value(const Buffer& buffer) const;

    std::vector<Depth> depth;  // one for each token in the cache

private:
    std::int64_t capacity_;
    ONNXTensorElementDataType type_;
    std::vector<Buffer> buffers_;
};

}  // namespace pop::internal
