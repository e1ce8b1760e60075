// Just enough UTF-8 to never hand out half a character.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pop::internal {

// Returns how many bytes at the start of `text` are whole, valid characters (no surrogates, no overlong forms).
std::size_t valid_utf8_prefix(std::string_view text);

// Returns `bytes` as UTF-8: U+FFFD for each longest part that can begin a character and does not become one, as the
// Unicode standard recommends and the tokenizers library does.
std::string replace_broken(std::string_view bytes);

// Returns whether `text` ends with U+FFFD, which is what an unfinished character decodes to.
bool ends_broken(std::string_view text);

}  // namespace pop::internal
