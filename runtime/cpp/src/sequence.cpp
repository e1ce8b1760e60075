#include "sequence.h"

#include <algorithm>

#include "joined.h"

namespace pop::internal {

void Sequence::reserve(std::int64_t num_tokens) {
    if (cache_ && num_tokens <= cache_->capacity()) return;
    // A sequence that grows at least doubles, so that its tokens are copied once on average.
    const auto wanted = cache_ ? std::max(num_tokens, 2 * cache_->capacity()) : num_tokens;
    const auto capacity = std::min(wanted, manifest_.max_positions);
    auto cache = cache_ ? cache_->grown(manifest_, capacity) : KvCache(manifest_, capacity);
    auto prefill = std::make_unique<BoundGraph>(sessions_.prefill, manifest_, cache, false);
    auto decode = std::make_unique<BoundGraph>(sessions_.decode, manifest_, cache, true);
    prefill_ = std::move(prefill);
    decode_ = std::move(decode);
    cache_ = std::move(cache);
}

const std::vector<float>& Sequence::append(const std::vector<std::int64_t>& ids, const std::optional<Windows>& windows,
                                           std::int64_t chunk_tokens, const Ort::RunOptions& options) {
    const auto num_past = size();
    if (num_cached() < num_past) step(options);
    try {
        for (auto& stretches : plan(static_cast<std::int64_t>(ids.size()), windows, chunk_tokens)) {
            feed_chunk(ids.data(), std::move(stretches), options);
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

std::vector<std::vector<Stretch>> Sequence::plan(std::int64_t num_new, const std::optional<Windows>& windows,
                                                 std::int64_t chunk_tokens) const {
    if (sessions_.can_join) return plan_joined_turn(size(), num_new, windows, chunk_tokens);
    std::vector<std::vector<Stretch>> chunks;
    for (const auto& stretch : plan_turn(size(), num_new, windows, chunk_tokens)) chunks.push_back({stretch});
    return chunks;
}

void Sequence::feed_chunk(const std::int64_t* ids, std::vector<Stretch> stretches, const Ort::RunOptions& options) {
    const auto start = stretches.front().start;
    const auto count = stretches.back().stop - start;
    if (stretches.size() == 1) return feed(ids + start, count, stretches.front().stage, options);
    for (auto& stretch : stretches) stretch = {stretch.start - start, stretch.stop - start, stretch.stage};
    run_joined(*prefill_, *decode_, {ids + start, count, num_cached() + count}, stretches, options);
    for (const auto& stretch : stretches) count_in(stretch.stop - stretch.start, stretch.stage);
}

void Sequence::feed(const std::int64_t* ids, std::int64_t count, Stage stage, const Ort::RunOptions& options) {
    auto& graph = stage == Stage::prefill ? *prefill_ : *decode_;
    graph.run({ids, count, num_cached() + count}, options);
    count_in(count, stage);
}

void Sequence::count_in(std::int64_t count, Stage stage) {
    const auto depth = stage == Stage::prefill ? Depth::pruned : Depth::full;
    cache_->depth.insert(cache_->depth.end(), static_cast<std::size_t>(count), depth);
}

}  // namespace pop::internal
