// Text as it settles: never within a character, never into a stop string.
#pragma once

#include <string>
#include <vector>

#include "decoder.h"
#include "pop/model.h"

namespace pop::internal {

// Gives tokens their text, holding them back while a character is unfinished. The texts joined are the text of all ids
// together.
class TextStream {
public:
    // decoder: none leaves all text empty.
    explicit TextStream(const ByteLevelDecoder* decoder) : decoder_(decoder) {}

    // Takes the next token, its text empty, and returns what is settled: all held, or none within a character.
    std::vector<Token> push(Token token);

    // Returns what is still held, at the end of the text: an unfinished character becomes U+FFFD.
    std::vector<Token> flush();

private:
    const ByteLevelDecoder* decoder_;
    std::string bytes_;        // of the held tokens
    std::vector<Token> held_;  // not handed out yet
};

// Lets tokens through until a stop string is complete, and holds back those whose text may begin one.
//
// Tokens that a match reaches into are handed out too, their text cut where the stop string begins: every token comes
// exactly once, and the texts joined end there.
class StopStrings {
public:
    // strings: none of them empty. The earliest match counts, the first in the list if two begin at one place.
    explicit StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

    // Takes the next token with its text and returns what is settled; after a match nothing more may be pushed.
    std::vector<Token> push(Token token);

    // Returns what is still held, at the end of the text.
    std::vector<Token> flush();

    // The stop string that was found; null if none.
    const std::string* matched() const { return matched_; }

    // How many of the last tokens reach into it or follow it.
    std::size_t num_cut_tokens() const { return num_cut_tokens_; }

private:
    std::size_t open_end(const std::string& text) const;

    std::vector<std::string> strings_;
    std::vector<Token> held_;
    const std::string* matched_ = nullptr;
    std::size_t num_cut_tokens_ = 0;
};

}  // namespace pop::internal
