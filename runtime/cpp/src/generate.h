// One answer: read the turn, then one token after another.
#pragma once

#include "choice.h"
#include "pop/model.h"
#include "sequence.h"

namespace pop::internal {

// One answer to a turn of a sequence, which has room for both.
class Generation {
public:
    // answer: its prompt and settings are filled in; the rest is filled in here. An empty prompt goes on where the
    // sequence is. decoder: for the text; none leaves it empty.
    Generation(Sequence& sequence, const Manifest& manifest, const ByteLevelDecoder* decoder,
               const Cancellation& cancellation, std::int64_t limit_tokens, Answer& answer);

    // Runs to the end, or until it is cancelled. Tokens go to `on_token` (may be empty) as their text is settled.
    //
    // However it ends, by an exception too, the sequence then holds what it held before if the prompt was still being
    // read, else the tokens that were handed out less those that reach into a stop string.
    //
    // Throws BackendError: a graph fails. What `on_token` throws.
    void run(const OnToken& on_token);

private:
    void advance();
    void hand_out(const OnToken& on_token);
    void finish();
    const std::vector<float>& read_turn();
    std::size_t num_kept() const;

    Sequence& sequence_;
    const Cancellation::State& cancellation_;
    Answer& answer_;
    Choice choice_;
    std::vector<Token> settled_;  // to be handed out
    std::size_t num_handed_out_ = 0;
    bool has_begun_ = false;
    double decode_ms_ = 0.0;
    std::int64_t num_steps_ = 0;
};

}  // namespace pop::internal
