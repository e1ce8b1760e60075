#include "sequence.h"

#include <algorithm>

namespace pop::internal {

void Sequence::reserve(std::int64_t num_tokens) {
    if (cache_ && num_tokens <= cache_->capacity()) return;
    // A sequence that grows at least doubles, so that its tokens are copied once on average.
    const auto wanted = cache_ ? std::max(num_tokens, 2 * cache_->capacity()) : num_tokens;
    const auto capacity = std::min(wanted, manifest_.max_positions);
    auto cache = cache_ ? cache_->grown(manifest_, capacity) : KvCache(manifest_, capacity);
    auto prefill = std::make_unique<BoundGraph>(sessions_.prefill, manifest_, cache, manifest_.prefill_graph, false);
    auto decode = std::make_unique<BoundGraph>(sessions_.decode, manifest_, cache, manifest_.decode_graph, true);
    prefill_ = std::move(prefill);
    decode_ = std::move(decode);
    cache_ = std::move(cache);
}

const std::vector<float>& Sequence::append(const std::vector<std::int64_t>& ids, const std::optional<Windows>& windows,
                                           std::int64_t chunk_tokens, const Ort::RunOptions& options) {
    const auto num_past = size();
    if (num_cached() < num_past) step(options);
    const auto stretches = plan_turn(num_past, static_cast<std::int64_t>(ids.size()), windows, chunk_tokens);
    try {
        for (const auto& stretch : stretches) {
            feed(ids.data() + stretch.start, stretch.stop - stretch.start, stretch.stage, options);
        }
    } catch (...) {
        cache_->depth.resize(static_cast<std::size_t>(num_past));
        throw;
    }
    token_ids_.insert(token_ids_.end(), ids.begin(), ids.end());
    return decode_->logits();
}

const std::vector<float>& Sequence::step(const Ort::RunOptions& options) {
    if (num_cached() == size()) cache_->depth.pop_back();  // its logits are gone: the same K and V are written again
    feed(&token_ids_.back(), 1, Stage::decode, options);
    return decode_->logits();
}

void Sequence::rewind(std::int64_t position) {
    token_ids_.resize(static_cast<std::size_t>(position));
    if (num_cached() > position) cache_->depth.resize(static_cast<std::size_t>(position));
}

void Sequence::feed(const std::int64_t* ids, std::int64_t count, Stage stage, const Ort::RunOptions& options) {
    auto& graph = stage == Stage::prefill ? *prefill_ : *decode_;
    const auto stop = num_cached() + count;
    graph.run(ids, static_cast<std::size_t>(count), stop, options);
    // Tokens count only once the run is over: after a failure the sequence is what it was.
    cache_->depth.resize(static_cast<std::size_t>(stop), stage == Stage::prefill ? Depth::pruned : Depth::full);
}

}  // namespace pop::internal
