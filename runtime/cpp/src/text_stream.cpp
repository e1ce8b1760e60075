#include "text_stream.h"

#include <algorithm>

#include "utf8.h"

namespace pop::internal {

std::vector<Token> TextStream::push(Token token) {
    if (decoder_ != nullptr) bytes_ += decoder_->bytes(token.id);
    held_.push_back(std::move(token));
    return ends_broken(replace_broken(bytes_)) ? std::vector<Token>() : flush();
}

std::vector<Token> TextStream::flush() {
    if (!held_.empty()) held_.back().text = replace_broken(bytes_);
    bytes_.clear();
    return std::exchange(held_, {});
}

std::vector<Token> StopStrings::push(Token token) {
    held_.push_back(std::move(token));
    std::string text;
    for (const auto& held : held_) text += held.text;

    auto start = std::string::npos;
    for (const auto& string : strings_) {
        const auto found = text.find(string);
        if (found < start) {
            start = found;
            matched_ = &string;
        }
    }
    if (matched_ == nullptr) {
        auto settled = text.size() - open_end(text);
        const auto first_open = std::find_if(held_.begin(), held_.end(), [&](const Token& held) {
            if (held.text.size() > settled) return true;
            settled -= held.text.size();
            return false;
        });
        std::vector<Token> released(std::make_move_iterator(held_.begin()), std::make_move_iterator(first_open));
        held_.erase(held_.begin(), first_open);
        return released;
    }
    auto tokens = flush();
    for (auto& cut : tokens) {
        const auto size = cut.text.size();
        if (size > start || num_cut_tokens_ > 0) ++num_cut_tokens_;
        cut.text.resize(std::min(size, start));
        start -= cut.text.size();
    }
    return tokens;
}

std::vector<Token> StopStrings::flush() { return std::exchange(held_, {}); }

// Returns the length of the longest end of `text` that begins a stop string.
std::size_t StopStrings::open_end(const std::string& text) const {
    std::size_t longest = 0;
    for (const auto& string : strings_) {
        for (auto length = std::min(string.size() - 1, text.size()); length > longest; --length) {
            if (text.compare(text.size() - length, length, string, 0, length) == 0) longest = length;
        }
    }
    return longest;
}

}  // namespace pop::internal
