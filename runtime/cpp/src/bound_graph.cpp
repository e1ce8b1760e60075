#include "bound_graph.h"

#include <array>
#include <cstring>

namespace pop::internal {

namespace {

// Running a session changes nothing that another thread could see, but the API has no const form.
Ort::Session& session_of(const Link& link) {
    return const_cast<Ort::Session&>(link.session);  // NOLINT
}

Ort::MemoryInfo host_memory() { return Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault); }

// Returns `count` numbers as a value [1, count]. A run only reads them, but the API has no const form.
Ort::Value row_of(const Ort::MemoryInfo& memory, const std::int64_t* numbers, std::int64_t count) {
    const std::array<std::int64_t, 2> shape{1, count};
    auto* const data = const_cast<std::int64_t*>(numbers);  // NOLINT
    return Ort::Value::CreateTensor(memory, data, static_cast<std::size_t>(count), shape.data(), shape.size());
}

}  // namespace

HiddenStates::HiddenStates(const Link& link, std::int64_t num_tokens) {
    if (!link.hidden_out) return;
    const auto& kind = link.outputs.at(*link.hidden_out);
    type_ = kind.type;
    size_ = kind.shape.back();
    token_bytes_ = static_cast<std::size_t>(size_) * element_bytes(type_);
    memory_.reset(new char[static_cast<std::size_t>(num_tokens) * token_bytes_]);  // not set: a link writes it all
}

Ort::Value HiddenStates::rows(std::int64_t start, std::int64_t stop) const {
    if (!memory_) return Ort::Value(nullptr);
    const std::array<std::int64_t, 3> shape{1, stop - start, size_};
    const auto num_bytes = static_cast<std::size_t>(stop - start) * token_bytes_;
    return Ort::Value::CreateTensor(host_memory(), memory_.get() + static_cast<std::size_t>(start) * token_bytes_,
                                    num_bytes, shape.data(), shape.size(), type_);
}

void HiddenStates::copy_rows(const HiddenStates& from, std::int64_t start, std::int64_t stop) {
    const auto at = static_cast<std::size_t>(start) * token_bytes_;
    std::memcpy(memory_.get() + at, from.memory_.get() + at, static_cast<std::size_t>(stop - start) * token_bytes_);
}

BoundGraph::BoundGraph(const Chain& chain, const Manifest& manifest, const KvCache& cache, bool has_logits)
    : chain_(chain),
      ids_name_(manifest.input_ids),
      mask_name_(manifest.attention_mask),
      memory_(host_memory()),
      ones_(static_cast<std::size_t>(cache.capacity()), 1) {
    for (const auto* link : chain_) {
        auto& binding = bindings_.emplace_back(session_of(*link));
        for (const auto& buffer : cache.buffers()) {
            const auto value = cache.value(buffer);
            if (link->inputs.count(buffer.past_name) > 0) binding.BindInput(buffer.past_name.c_str(), value);
            if (link->outputs.count(buffer.present_name) > 0) binding.BindOutput(buffer.present_name.c_str(), value);
        }
    }
    if (has_logits) bind_logits(manifest);
}

void BoundGraph::bind_logits(const Manifest& manifest) {
    const auto size = static_cast<std::size_t>(manifest.vocab_size);
    const std::array<std::int64_t, 3> shape{1, 1, manifest.vocab_size};
    logits_.resize(size);
    for (std::size_t index = 0; index < chain_.size(); ++index) {
        const auto found = chain_[index]->outputs.find(manifest.logits);
        if (found == chain_[index]->outputs.end()) continue;
        logits_type_ = found->second.type;
        void* data = logits_.data();
        if (logits_type_ != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
            raw_half_.resize(size);
            data = raw_half_.data();
        }
        const auto num_bytes = size * element_bytes(logits_type_);
        bindings_[index].BindOutput(
            manifest.logits.c_str(),
            Ort::Value::CreateTensor(memory_, data, num_bytes, shape.data(), shape.size(), logits_type_));
    }
}

void BoundGraph::run(const Tokens& tokens, const Ort::RunOptions& options) {
    HiddenStates hidden;
    for (std::size_t index = 0; index < chain_.size(); ++index) {
        HiddenStates made(*chain_[index], tokens.count);
        run_link(index, tokens, hidden.rows(0, tokens.count), made.rows(0, tokens.count), options);
        if (made) hidden = std::move(made);
    }
}

void BoundGraph::run_link(std::size_t index, const Tokens& tokens, const Ort::Value& given, const Ort::Value& made,
                          const Ort::RunOptions& options) {
    const auto& link = *chain_[index];
    auto& binding = bindings_[index];
    try {
        if (link.inputs.count(ids_name_) > 0) {
            binding.BindInput(ids_name_.c_str(), row_of(memory_, tokens.ids, tokens.count));
        }
        if (link.inputs.count(mask_name_) > 0) {
            binding.BindInput(mask_name_.c_str(), row_of(memory_, ones_.data(), tokens.total));
        }
        if (link.hidden_in) binding.BindInput(link.hidden_in->c_str(), given);
        if (link.hidden_out) binding.BindOutput(link.hidden_out->c_str(), made);
        session_of(link).Run(options, binding);
    } catch (const Ort::Exception& error) {
        const auto expected =
            "a run over " + std::to_string(tokens.count) + " tokens, " + std::to_string(tokens.total) + " in all";
        throw backend_error(link.graph, expected, error);
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
