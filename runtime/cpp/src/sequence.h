// One growing sequence over one cache: turns are appended, never prefilled again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bound_graph.h"
#include "schedule.h"
#include "sessions.h"

namespace pop::internal {

// Tokens and their KV cache.
//
// The last token that `accept` took may not be in the cache yet: the next `step` or `append` feeds it, at full depth
// like every generated token.
class Sequence {
public:
    Sequence(const SessionPair& sessions, const Manifest& manifest) : sessions_(sessions), manifest_(manifest) {}

    const std::vector<std::int64_t>& token_ids() const { return token_ids_; }
    std::int64_t size() const { return static_cast<std::int64_t>(token_ids_.size()); }
    std::int64_t num_cached() const { return cache_ ? static_cast<std::int64_t>(cache_->depth.size()) : 0; }
    std::vector<Depth> depth() const { return cache_ ? cache_->depth : std::vector<Depth>(); }

    // Makes room for so many tokens in all. Throws BackendError: the system refuses the memory.
    void reserve(std::int64_t num_tokens);

    // Feeds the tokens of a turn, for which there has to be room, and returns the logits of the last one, [V].
    //
    // windows: none runs the whole turn full. chunk_tokens: longest stretch fed at once, at least 1.
    // Throws BackendError: a session fails or `options` are terminated; the sequence is then what it was.
    const std::vector<float>& append(const std::vector<std::int64_t>& ids, const std::optional<Windows>& windows,
                                     std::int64_t chunk_tokens, const Ort::RunOptions& options);

    // Takes a chosen token into the sequence, which has room for it; the one before it has to be in the cache.
    void accept(std::int64_t token) { token_ids_.push_back(token); }

    // Feeds the last token, if it is not in the cache yet, and returns the logits after it, [V]. Throws as `append`.
    const std::vector<float>& step(const Ort::RunOptions& options);

    // Forgets all from `position` on.
    void rewind(std::int64_t position);

private:
    // Returns the stretches of a turn, chunk by chunk: several in one only where they can be joined.
    std::vector<std::vector<Stretch>> plan(std::int64_t num_new, const std::optional<Windows>& windows,
                                           std::int64_t chunk_tokens) const;
    // Feeds the stretches of one chunk. ids: of the turn.
    void feed_chunk(const std::int64_t* ids, std::vector<Stretch> stretches, const Ort::RunOptions& options);
    void feed(const std::int64_t* ids, std::int64_t count, Stage stage, const Ort::RunOptions& options);
    // Takes new positions into the cache's record, once the run is over: after a failure the sequence is what it was.
    void count_in(std::int64_t count, Stage stage);

    const SessionPair& sessions_;
    const Manifest& manifest_;
    std::vector<std::int64_t> token_ids_;
    std::optional<KvCache> cache_;
    std::unique_ptr<BoundGraph> prefill_;
    std::unique_ptr<BoundGraph> decode_;
};

}  // namespace pop::internal
