// One answer: read the turn, then one token after another.
#pragma once

#include "choice.h"
#include "pop/model.h"
#include "sequence.h"

namespace pop::internal {

// Returns how many tokens of an answer stay in the sequence: those handed out, less those at the end that are only a
// part of a character whose rest was not handed out, and less those that reach into a stop string.
//
// num_cut: how many of the last tokens chosen reach into a stop string. has_text: whether tokens come with text;
// without it an empty one says nothing about characters.
std::size_t num_kept(const std::vector<Token>& handed_out, std::size_t num_chosen, std::size_t num_cut, bool has_text);

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

    Sequence& sequence_;
    const Cancellation::State& cancellation_;
    Answer& answer_;
    bool has_text_;
    Choice choice_;
    std::vector<Token> settled_;  // to be handed out
    bool has_begun_ = false;
    double decode_ms_ = 0.0;
    std::int64_t num_steps_ = 0;
};

}  // namespace pop::internal
