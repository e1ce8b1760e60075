// Which token comes next, when the answer ends, and its text as it settles.
#pragma once

#include <optional>
#include <vector>

#include "sampling.h"
#include "text_stream.h"

namespace pop::internal {

// Takes logits and gives tokens, until an end token, a stop string or the limit; docs/runtime.md has the rules.
class Choice {
public:
    // decoder: for the text; none leaves it empty. limit_tokens: what there is room for, at least 1.
    Choice(const Settings& settings, const ByteLevelDecoder* decoder, std::int64_t vocab_size,
           std::int64_t limit_tokens)
        : settings_(settings),
          limit_tokens_(limit_tokens),
          sampler_(settings.sampling, vocab_size),
          characters_(decoder),
          stops_(settings.stop) {}

    // Counts tokens of earlier turns and of the prompt for the repetition penalty.
    void see(const std::vector<std::int64_t>& ids) { sampler_.see(ids); }

    // Chooses the next token from logits [V] and returns the tokens whose text is settled by it.
    //
    // Throws BackendError: a logit is NaN or infinite.
    std::vector<Token> take(const std::vector<float>& logits);

    const std::vector<std::int64_t>& token_ids() const { return token_ids_; }  // chosen so far, without the end token
    std::optional<StopReason> stop_reason() const { return stop_reason_; }
    const StopStrings& stops() const { return stops_; }

private:
    Token token_of(std::int64_t id, const std::vector<float>& logits) const;
    std::vector<Token> finish(StopReason reason);
    std::vector<Token> until_stop(std::vector<Token> tokens);

    const Settings& settings_;
    std::int64_t limit_tokens_;
    Sampler sampler_;
    TextStream characters_;
    StopStrings stops_;
    std::vector<std::int64_t> token_ids_;
    std::optional<StopReason> stop_reason_;
};

}  // namespace pop::internal
