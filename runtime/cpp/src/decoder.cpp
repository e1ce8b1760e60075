#include "decoder.h"

#include <array>

#include "json_file.h"

namespace pop::internal {

namespace {

// Returns for each code point below 324 the byte it stands for, or -1: printable Latin-1 stands for itself, the other
// bytes, in order, for 256 and up.
std::array<int, 324> byte_of_code_point() {
    std::array<int, 324> bytes{};
    bytes.fill(-1);
    std::size_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
        const bool is_printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        bytes[is_printable ? static_cast<std::size_t>(byte) : next++] = byte;
    }
    return bytes;
}

// Returns the bytes that a token's characters stand for; those of the token itself if one stands for none.
std::string decoded(const std::string& token) {
    static const auto kBytes = byte_of_code_point();
    std::string bytes;
    for (std::size_t at = 0; at < token.size();) {
        const auto first = static_cast<unsigned char>(token[at]);
        std::size_t code = first;
        if (first >= 0x80) {
            if (first >= 0xE0 || at + 1 == token.size()) return token;  // beyond the table
            code = ((first & 0x1FU) << 6U) | (static_cast<unsigned char>(token[at + 1]) & 0x3FU);
        }
        if (code >= kBytes.size() || kBytes[code] < 0) return token;
        bytes += static_cast<char>(kBytes[code]);
        at += first < 0x80 ? 1 : 2;
    }
    return bytes;
}

}  // namespace

std::optional<ByteLevelDecoder> ByteLevelDecoder::open(const std::filesystem::path& path) {
    const auto place = path.string();
    const auto content = read_json(path);
    as_object(content, place);
    const auto kind_of = [&](const char* key) {
        const auto part = content.value(key, Json());
        return part.is_object() ? part.value("type", Json()) : Json();
    };
    if (kind_of("decoder") != "ByteLevel" || kind_of("model") != "BPE") return std::nullopt;

    ByteLevelDecoder decoder;
    const auto vocabulary = content["model"].value("vocab", Json());
    for (const auto& [token, id] : as_object(vocabulary, place + ", model.vocab").items()) {
        decoder.bytes_[as_integer(id, place + ", model.vocab")] = decoded(token);
    }
    const auto added = content.value("added_tokens", Json::array());
    for (const auto& token : as_list(added, place + ", added_tokens")) {
        as_object(token, place + ", added_tokens");
        const auto id = as_integer(token.value("id", Json()), place + ", added_tokens, id");
        const auto text = as_string(token.value("content", Json()), place + ", added_tokens, content");
        decoder.bytes_[id] = token.value("special", Json()) == Json(true) ? "" : decoded(text);
    }
    return decoder;
}

const std::string& ByteLevelDecoder::bytes(std::int64_t id) const {
    static const std::string kNone;
    const auto found = bytes_.find(id);
    return found == bytes_.end() ? kNone : found->second;
}

}  // namespace pop::internal
