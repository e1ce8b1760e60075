// Pieces of error messages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pop::internal {

// Returns a text for a message: one line, at most `limit` bytes, cut between characters.
std::string one_line(std::string_view text, std::size_t limit = 80);

// Returns "PLACE: expected EXPECTED, found FOUND; NEXT".
std::string message(std::string_view place, std::string_view expected, std::string_view found, std::string_view next);

// Returns the parts with `separator` between them.
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// Returns `pattern` with "{layer}" replaced by the number.
std::string layer_name(const std::string& pattern, std::size_t layer);

}  // namespace pop::internal
