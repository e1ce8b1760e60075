#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "text_stream.h"

using namespace pop;
using namespace pop::internal;

namespace {

// a, the two bytes of e acute, a special token, an added token whose characters stand for no bytes
ByteLevelDecoder decoder() {
    const auto path = std::filesystem::temp_directory_path() / "pop-tests-tokenizer.json";
    std::ofstream(path) << R"({"decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "\u00c3": 1, "\u00a9": 2, "\u0120b": 3}},
        "added_tokens": [{"id": 4, "content": "<end>", "special": true},
                         {"id": 5, "content": "\u65e5", "special": false}]})";
    return ByteLevelDecoder::open(path).value();
}

Token token_of(std::int64_t id, const std::string& text = "") {
    Token token;
    token.id = id;
    token.text = text;
    return token;
}

std::string texts(const std::vector<Token>& tokens) {
    std::string joined;
    for (const auto& token : tokens) joined += "[" + token.text + "]";
    return joined;
}

}  // namespace

TEST_CASE("each token stands for its bytes") {
    const auto bytes = decoder();
    CHECK(bytes.bytes(0) == "a");
    CHECK(bytes.bytes(1) == "\xC3");
    CHECK(bytes.bytes(3) == " b");
    CHECK(bytes.bytes(4).empty());
    CHECK(bytes.bytes(5) == "\xE6\x97\xA5");
    CHECK(bytes.bytes(99).empty());
    CHECK(bytes.bytes(-1).empty());
}

TEST_CASE("tokens are held back within a character and come with its text") {
    const auto bytes = decoder();
    TextStream stream(&bytes);
    CHECK(texts(stream.push(token_of(0))) == "[a]");
    CHECK(stream.push(token_of(1)).empty());
    CHECK(stream.push(token_of(4)).empty());
    CHECK(texts(stream.push(token_of(2))) == "[][][\xC3\xA9]");
    CHECK(texts(stream.push(token_of(4))) == "[]");
    CHECK(stream.push(token_of(1)).empty());
    CHECK(texts(stream.flush()) == "[\xEF\xBF\xBD]");
    CHECK(stream.flush().empty());
}

TEST_CASE("without a decoder every token comes at once, without text") {
    TextStream stream(nullptr);
    CHECK(texts(stream.push(token_of(1))) == "[]");
}

TEST_CASE("a stop string is found across tokens and cut") {
    StopStrings stops({"end", "nd!"});
    CHECK(texts(stops.push(token_of(0, "the "))) == "[the ]");
    CHECK(stops.push(token_of(1, "e")).empty());
    CHECK(stops.push(token_of(2, "n")).empty());
    CHECK(texts(stops.push(token_of(3, "x"))) == "[e][n][x]");
    CHECK(stops.push(token_of(4, "a e")).empty());
    CHECK(texts(stops.push(token_of(5, "nd! more"))) == "[a ][]");
    CHECK(*stops.matched() == "end");
    CHECK(stops.num_cut_tokens() == 2);
}

TEST_CASE("the first in the list counts if two begin at one place") {
    StopStrings stops({"abc", "ab"});
    CHECK(texts(stops.push(token_of(0, "xabc"))) == "[x]");
    CHECK(*stops.matched() == "abc");
}

TEST_CASE("what may begin a stop string is handed out at the end") {
    StopStrings stops({"aab"});
    CHECK(stops.push(token_of(0, "a")).empty());
    CHECK(stops.push(token_of(1, "a")).empty());
    CHECK(texts(stops.push(token_of(2, "a"))) == "[a]");
    CHECK(texts(stops.flush()) == "[a][a]");
    CHECK(stops.matched() == nullptr);
}
