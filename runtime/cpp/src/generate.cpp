#include "generate.h"

#include <algorithm>
#include <chrono>

#include "cancellation.h"

namespace pop::internal {

std::size_t num_kept(const std::vector<Token>& handed_out, std::size_t num_chosen, std::size_t num_cut, bool has_text) {
    auto kept = handed_out.size();
    if (has_text && kept < num_chosen) {  // perhaps left among the tokens of one character
        while (kept > 0 && handed_out[kept - 1].text.empty()) --kept;
    }
    return std::min(kept, num_chosen - num_cut);
}

Generation::Generation(Sequence& sequence, const Manifest& manifest, const ByteLevelDecoder* decoder,
                       const Cancellation& cancellation, std::int64_t limit_tokens, Answer& answer)
    : sequence_(sequence),
      cancellation_(cancellation.state()),
      answer_(answer),
      has_text_(decoder != nullptr),
      choice_(answer.settings, decoder, manifest.vocab_size, limit_tokens) {
    choice_.see(sequence.token_ids());
    choice_.see(answer.prompt_token_ids);
    answer_.stats.num_prompt_tokens = static_cast<std::int64_t>(answer.prompt_token_ids.size());
    answer_.stats.num_past_tokens = sequence.size();
}

void Generation::run(const OnToken& on_token) {
    try {
        while (!choice_.stop_reason() && !cancellation_.is_cancelled) {
            advance();
            hand_out(on_token);
        }
    } catch (const BackendError&) {
        finish();
        if (!cancellation_.is_cancelled) throw;  // a terminated run fails: that is no fault
        return;
    } catch (...) {
        finish();
        throw;
    }
    finish();
}

// Chooses one more token, and puts those whose text it settles in line.
void Generation::advance() {
    const auto start = std::chrono::steady_clock::now();
    const auto is_first = !has_begun_;
    const auto& logits = is_first ? read_turn() : sequence_.step(cancellation_.options);
    has_begun_ = true;
    const auto num_chosen = choice_.token_ids().size();
    settled_ = choice_.take(logits);
    if (choice_.token_ids().size() > num_chosen) sequence_.accept(choice_.token_ids().back());
    const auto elapsed = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (is_first) {
        answer_.stats.time_to_first_token_ms = elapsed;
    } else {
        decode_ms_ += elapsed;
        ++num_steps_;
    }
}

void Generation::hand_out(const OnToken& on_token) {
    for (auto& token : settled_) {
        if (cancellation_.is_cancelled) return;
        answer_.tokens.push_back(std::move(token));
        if (on_token) on_token(answer_.tokens.back());
    }
}

// Takes back what was chosen and not handed out, or reaches into a stop string, and says how it ended.
void Generation::finish() {
    auto& ids = answer_.token_ids;
    ids = choice_.token_ids();
    const auto num_chosen = ids.size();
    const bool is_whole = choice_.stop_reason() && num_chosen == answer_.tokens.size();
    answer_.stop_reason = is_whole ? *choice_.stop_reason() : StopReason::cancelled;
    ids.resize(std::min(num_chosen, answer_.tokens.size()));
    const auto& stops = choice_.stops();
    if (answer_.stop_reason == StopReason::stop) answer_.stop_string = *stops.matched();
    auto& stats = answer_.stats;
    if (has_begun_) {
        const auto kept = num_kept(answer_.tokens, num_chosen, stops.num_cut_tokens(), has_text_);
        const auto start = stats.num_past_tokens + stats.num_prompt_tokens;
        sequence_.rewind(std::min(start + static_cast<std::int64_t>(kept), sequence_.size()));
    }
    stats.num_new_tokens = static_cast<std::int64_t>(ids.size());
    if (num_steps_ > 0) stats.tokens_per_second = 1e3 * static_cast<double>(num_steps_) / decode_ms_;
}

// Feeds the prompt and returns the logits after it, [V].
const std::vector<float>& Generation::read_turn() {
    const auto& settings = answer_.settings;
    const auto& ids = answer_.prompt_token_ids;
    const auto start = sequence_.size();
    const auto& options = cancellation_.options;
    const std::vector<float>* logits = nullptr;
    if (ids.empty()) {
        logits = &sequence_.step(options);
    } else if (!settings.prompt_logprobs) {
        const auto windows = settings.prefill == Prefill::pop ? std::optional(settings.windows) : std::nullopt;
        logits = &sequence_.append(ids, windows, settings.prefill_chunk_tokens, options);
    } else {
        try {  // one at a time: the decode graph gives the last position's logits only
            for (const auto id : ids) {
                const auto score = logits == nullptr ? std::optional<double>()
                                                     : log_probabilities(*logits)[static_cast<std::size_t>(id)];
                answer_.prompt_logprobs.push_back(score);
                logits = &sequence_.append({id}, std::nullopt, 1, options);
            }
        } catch (...) {
            sequence_.rewind(start);
            throw;
        }
    }
    const auto depth = sequence_.depth();
    answer_.stats.num_pruned_tokens =
        std::count(depth.begin() + std::min(start, sequence_.num_cached()), depth.end(), Depth::pruned);
    return *logits;
}

}  // namespace pop::internal
