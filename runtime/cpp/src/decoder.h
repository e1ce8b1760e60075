// From token ids to bytes, for tokenizers of the byte-level kind (GPT-2, Llama 3, Qwen, SmolLM and many more).
//
// In these every token stands for bytes, one printable character for each, so that decoding is a table. Nothing is
// guessed about other kinds: their tokenizer.json is refused by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <unordered_map>

namespace pop::internal {

class ByteLevelDecoder {
public:
    // Returns the decoder of a tokenizer.json; none if it is of another kind.
    //
    // Throws ModelError: the file is missing or not a tokenizer.
    static std::optional<ByteLevelDecoder> open(const std::filesystem::path& path);

    // The bytes of a token; empty for special tokens and ids it does not know.
    const std::string& bytes(std::int64_t id) const;

private:
    std::unordered_map<std::int64_t, std::string> bytes_;  // of all but special tokens
};

}  // namespace pop::internal
