#include "choice.h"

#include <algorithm>

namespace pop::internal {

std::vector<Token> Choice::take(const std::vector<float>& logits) {
    const auto chosen = sampler_.choose(logits);
    const auto& ends = settings_.end_token_ids;
    if (std::find(ends.begin(), ends.end(), chosen) != ends.end()) return finish(StopReason::end);
    token_ids_.push_back(chosen);
    auto settled = until_stop(characters_.push(token_of(chosen, logits)));
    if (stops_.matched() != nullptr) {
        stop_reason_ = StopReason::stop;
    } else if (static_cast<std::int64_t>(token_ids_.size()) == limit_tokens_) {
        for (auto& token : finish(StopReason::length)) settled.push_back(std::move(token));
    }
    return settled;
}

// Returns the token, without its text yet, with the log-probabilities that were asked for.
Token Choice::token_of(std::int64_t id, const std::vector<float>& logits) const {
    Token token;
    token.id = id;
    if (!settings_.logprobs) return token;
    const auto scores = log_probabilities(logits);
    token.logprob = scores[static_cast<std::size_t>(id)];
    for (const auto other : likeliest(scores, *settings_.logprobs)) {
        token.alternatives.emplace_back(other, scores[static_cast<std::size_t>(other)]);
    }
    return token;
}

// Ends the answer and returns what is still held; a stop string in its last text counts first.
std::vector<Token> Choice::finish(StopReason reason) {
    auto settled = until_stop(characters_.flush());
    stop_reason_ = stops_.matched() == nullptr ? reason : StopReason::stop;
    for (auto& token : stops_.flush()) settled.push_back(std::move(token));
    return settled;
}

std::vector<Token> Choice::until_stop(std::vector<Token> tokens) {
    std::vector<Token> settled;
    for (auto& token : tokens) {
        for (auto& passed : stops_.push(std::move(token))) settled.push_back(std::move(passed));
    }
    return settled;
}

}  // namespace pop::internal
