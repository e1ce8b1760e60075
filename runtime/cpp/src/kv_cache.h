// The KV buffers that both graphs read and write in place, and a graph bound to them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ort.h"
#include "pop/manifest.h"
#include "pop/model.h"

namespace pop::internal {

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
        std::unique_ptr<void, decltype(&std::free)> memory;
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

// One session bound to one cache: the KV buffers once, per run only the small inputs.
class BoundGraph {
public:
    // name: the graph's file, for messages. has_logits: whether the graph gives logits.
    BoundGraph(const Ort::Session& session, const Manifest& manifest, const KvCache& cache, std::string name,
               bool has_logits);

    // Feeds new tokens and writes their K and V in place.
    //
    // ids: `count` of them, which take the positions before `total`. options: ends the run early if it is terminated.
    // Throws BackendError: ONNX Runtime fails, or was terminated.
    void run(const std::int64_t* ids, std::size_t count, std::int64_t total, const Ort::RunOptions& options);

    // The last run's logits, [V].
    const std::vector<float>& logits();

private:
    void bind_logits(const Manifest& manifest);

    Ort::Session& session_;
    std::string name_;
    std::string ids_name_;
    std::string mask_name_;
    Ort::MemoryInfo memory_;
    Ort::IoBinding binding_;
    std::vector<std::int64_t> ones_;       // the mask of all lengths
    std::vector<std::int64_t> ids_;        // bound: has to stay while it is
    std::size_t num_bound_ = 0;            // how many ids are bound
    std::vector<float> logits_;            // [V]
    std::vector<std::uint16_t> raw_half_;  // [V], if the graph gives 16 bits
    ONNXTensorElementDataType logits_type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};

}  // namespace pop::internal
