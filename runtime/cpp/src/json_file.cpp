#include "json_file.h"

#include <fstream>
#include <iterator>

#include "pop/error.h"
#include "text_format.h"
#include "utf8.h"

namespace pop::internal {

namespace {

[[noreturn]] void refuse(const Json& value, const std::string& expected, const std::string& place) {
    throw ModelError(message(place, expected, shown(value), "re-run pop-export"));
}

}  // namespace

std::string read_text(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file.is_open() || file.bad()) {
        throw ModelError(message(path.string(), "a readable file", "none", "re-run pop-export or check its rights"));
    }
    const auto valid = valid_utf8_prefix(text);
    if (valid != text.size()) {
        const auto found = "a byte that is not at " + std::to_string(valid);
        throw ModelError(message(path.string(), "a UTF-8 text file", found, "re-run pop-export"));
    }
    return text;
}

Json read_json(const std::filesystem::path& path) {
    const auto text = read_text(path);
    try {
        if (text.compare(0, 3, "\xEF\xBB\xBF") == 0) throw std::invalid_argument("a byte order mark");
        return Json::parse(text);
    } catch (const std::exception& error) {
        throw ModelError(message(path.string(), "JSON", one_line(error.what(), 200), "re-run pop-export"));
    }
}

std::string shown(const Json& value) {
    // Invalid UTF-8 cannot occur (`read_text`), but a message must never throw.
    return one_line(value.is_string() ? value.get<std::string>()
                                      : value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::int64_t as_integer(const Json& value, const std::string& place) {
    const bool fits =
        value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX);
    if (!fits) refuse(value, "an integer", place);
    return value.get<std::int64_t>();
}

std::string as_string(const Json& value, const std::string& place) {
    if (!value.is_string()) refuse(value, "a string", place);
    return value.get<std::string>();
}

const Json& as_object(const Json& value, const std::string& place) {
    if (!value.is_object()) refuse(value, "an object", place);
    return value;
}

const Json& as_list(const Json& value, const std::string& place) {
    if (!value.is_array()) refuse(value, "a list", place);
    return value;
}

}  // namespace pop::internal
