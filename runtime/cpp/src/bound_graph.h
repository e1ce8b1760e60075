// A graph, whole or in segments, bound to one cache: the KV buffers once, per run only the small inputs.
#pragma once

#include "chain.h"
#include "kv_cache.h"

namespace pop::internal {

// New tokens of a run: `count` ids, which take the positions before `total`.
struct Tokens {
    const std::int64_t* ids;
    std::int64_t count;
    std::int64_t total;
};

// Hidden states [1, S, E] between two links.
class HiddenStates {
public:
    // Of no tokens: nothing is read or made.
    HiddenStates() = default;

    // Room for what `link` makes of so many tokens; none if it makes none.
    HiddenStates(const Link& link, std::int64_t num_tokens);

    explicit operator bool() const { return memory_ != nullptr; }

    // Returns tokens start..stop as a value over this memory; an empty one if there is none.
    Ort::Value rows(std::int64_t start, std::int64_t stop) const;

    // Takes the rows of other hidden states of the same size.
    void copy_rows(const HiddenStates& from, std::int64_t start, std::int64_t stop);

private:
    ONNXTensorElementDataType type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    std::int64_t size_ = 0;        // E
    std::size_t token_bytes_ = 0;  // of E elements
    std::unique_ptr<char[]> memory_;
};

class BoundGraph {
public:
    // The chain and the cache's memory have to outlive it. has_logits: whether the graph gives logits.
    BoundGraph(const Chain& chain, const Manifest& manifest, const KvCache& cache, bool has_logits);

    // Feeds new tokens and writes their K and V in place.
    //
    // options: ends the run early if it is terminated.
    // Throws BackendError: ONNX Runtime fails, or was terminated.
    void run(const Tokens& tokens, const Ort::RunOptions& options);

    // Runs one link alone, on the hidden states it is given and into those it makes, each with a row for every token;
    // the rest as for `run`.
    void run_link(std::size_t index, const Tokens& tokens, const Ort::Value& given, const Ort::Value& made,
                  const Ort::RunOptions& options);

    const Chain& chain() const { return chain_; }

    // The last run's logits, [V].
    const std::vector<float>& logits();

private:
    void bind_logits(const Manifest& manifest);

    Chain chain_;
    std::string ids_name_;
    std::string mask_name_;
    Ort::MemoryInfo memory_;
    std::vector<Ort::IoBinding> bindings_;  // one for each link
    std::vector<std::int64_t> ones_;        // the mask of all lengths
    std::vector<float> logits_;             // [V]
    std::vector<std::uint16_t> raw_half_;   // [V], if the graph gives 16 bits
    ONNXTensorElementDataType logits_type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};

}  // namespace pop::internal
