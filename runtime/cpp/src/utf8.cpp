#include "utf8.h"

namespace pop::internal {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Part {
    std::size_t length;  // at least 1
    bool is_whole;       // a valid character, or else the longest part that can begin one
};

// Returns the part at the start of a non-empty text.
Part first_part(std::string_view text) {
    const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
    const auto first = byte(0);
    if (first < 0x80) return {1, true};
    if (first < 0xC2 || first > 0xF4) return {1, false};
    const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    // The second byte rules out overlong forms, surrogates and what lies beyond the last character.
    const unsigned char lowest = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const unsigned char highest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    for (std::size_t index = 1; index < length; ++index) {
        if (index == text.size()) return {index, false};
        const bool fits = index == 1 ? byte(1) >= lowest && byte(1) <= highest : (byte(index) & 0xC0U) == 0x80U;
        if (!fits) return {index, false};
    }
    return {length, true};
}

}  // namespace

std::size_t valid_utf8_prefix(std::string_view text) {
    std::size_t at = 0;
    while (at < text.size()) {
        const auto part = first_part(text.substr(at));
        if (!part.is_whole) break;
        at += part.length;
    }
    return at;
}

std::string replace_broken(std::string_view bytes) {
    std::string text;
    while (!bytes.empty()) {
        const auto part = first_part(bytes);
        text += part.is_whole ? bytes.substr(0, part.length) : kReplacement;
        bytes.remove_prefix(part.length);
    }
    return text;
}

bool ends_broken(std::string_view text) {
    return text.size() >= kReplacement.size() && text.substr(text.size() - kReplacement.size()) == kReplacement;
}

}  // namespace pop::internal
