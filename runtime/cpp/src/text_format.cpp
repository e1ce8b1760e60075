#include "text_format.h"

namespace pop::internal {

std::string one_line(std::string_view text, std::size_t limit) {
    std::string line;
    bool gap = false;
    for (const char c : text) {
        const bool space = c == ' ' || (c >= '\t' && c <= '\r');
        if (!space) {
            if (gap && !line.empty()) line += ' ';
            line += c;
        }
        gap = space;
    }
    if (line.size() <= limit) return line;
    std::size_t cut = limit - 3;
    while (cut > 0 && (static_cast<unsigned char>(line[cut]) & 0xC0U) == 0x80U) --cut;  // not within a character
    return line.substr(0, cut) + "...";
}

std::string message(std::string_view place, std::string_view expected, std::string_view found, std::string_view next) {
    std::string text(place);
    text.append(": expected ").append(expected).append(", found ").append(found);
    if (!next.empty()) text.append("; ").append(next);
    return text;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
    std::string text;
    for (const auto& part : parts) {
        if (!text.empty()) text += separator;
        text += part;
    }
    return text;
}

std::string layer_name(const std::string& pattern, std::size_t layer) {
    static constexpr std::string_view kField = "{layer}";
    const auto number = std::to_string(layer);
    std::string name;
    for (std::size_t at = 0; at < pattern.size();) {
        if (pattern.compare(at, kField.size(), kField) == 0) {
            name += number;
            at += kField.size();
        } else {
            name += pattern[at++];
        }
    }
    return name;
}

}  // namespace pop::internal
