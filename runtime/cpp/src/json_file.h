// JSON files of a bundle, read strictly: every value is checked for its type, and an error names its place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace pop::internal {

using Json = nlohmann::json;

// Returns the text of a bundle's file. Throws ModelError: it cannot be read, or is not UTF-8.
std::string read_text(const std::filesystem::path& path);

// Returns the content of a JSON file. Throws ModelError: it cannot be read, or is not JSON.
Json read_json(const std::filesystem::path& path);

// Returns a value for a message: one line, at most 80 characters.
std::string shown(const Json& value);

// Each returns the value if it is of the named type; a boolean is no integer. Throws ModelError after `place`.
std::int64_t as_integer(const Json& value, const std::string& place);
std::string as_string(const Json& value, const std::string& place);
const Json& as_object(const Json& value, const std::string& place);
const Json& as_list(const Json& value, const std::string& place);

}  // namespace pop::internal
