#include <doctest/doctest.h>

#include "text_format.h"
#include "utf8.h"

using namespace pop::internal;

TEST_CASE("a message is one line and never cut within a character") {
    CHECK(one_line(" a \n b\t") == "a b");
    CHECK(one_line("123456789", 8) == "12345...");
    CHECK(one_line("1234\xC3\xA9"
                   "6789",
                   8) == "1234...");
    CHECK(message("here", "a", "b", "") == "here: expected a, found b");
    CHECK(message("here", "a", "b", "do c") == "here: expected a, found b; do c");
}

TEST_CASE("every field of a name pattern is filled in") {
    CHECK(layer_name("past.{layer}.key", 12) == "past.12.key");
    CHECK(layer_name("{layer}{layer}", 3) == "33");
    CHECK(layer_name("plain {lay", 3) == "plain {lay");
}

TEST_CASE("only whole, valid characters count as UTF-8") {
    const std::string whole = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
    CHECK(valid_utf8_prefix(whole) == whole.size());
    for (const auto size : {2U, 4U, 5U, 7U, 8U, 9U}) CHECK(valid_utf8_prefix(whole.substr(0, size)) < size);
    // overlong, a surrogate, beyond the last character, a stray continuation, a byte that never occurs
    for (const auto* bad : {"\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80", "\xFF"}) {
        CHECK(valid_utf8_prefix(bad) == 0);
    }
}

TEST_CASE("each longest part that can begin a character becomes one U+FFFD") {
    const std::string broken = "\xEF\xBF\xBD";
    CHECK(replace_broken("a\xC3\xA9") == "a\xC3\xA9");
    CHECK(replace_broken("\xE2\x82") == broken);
    CHECK(replace_broken("\xE2\x82z") == broken + "z");
    CHECK(replace_broken("\xF0\x9F\x98") == broken);
    CHECK(replace_broken("\xED\xA0\x80") == broken + broken + broken);  // a surrogate: no byte begins a character
    CHECK(replace_broken("\xF0\x80\x80") == broken + broken + broken);
    CHECK(replace_broken("\xC3\xC3\xA9") == broken + "\xC3\xA9");
    CHECK(ends_broken(replace_broken("a\xC3")));
    CHECK_FALSE(ends_broken("a"));
}
