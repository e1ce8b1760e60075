#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "bundle.h"
#include "generate.h"

using namespace pop;
using namespace pop::internal;
using Ids = std::vector<std::int64_t>;

namespace {

// Returns the text of a token: two letters, another pair for each.
std::string text_of(std::int64_t id) { return {static_cast<char>('a' + id / 26), static_cast<char>('a' + id % 26)}; }

ByteLevelDecoder decoder_of_pairs() {
    auto vocab = Json::object();
    for (std::int64_t id = 0; id < bundle().manifest().vocab_size; ++id) vocab[text_of(id)] = id;
    const auto path = std::filesystem::temp_directory_path() / "pop-tests-pairs.json";
    std::ofstream(path) << Json{{"decoder", {{"type", "ByteLevel"}}}, {"model", {{"type", "BPE"}, {"vocab", vocab}}}};
    return ByteLevelDecoder::open(path).value();
}

std::vector<Token> tokens_of(const std::vector<std::string>& texts) {
    std::vector<Token> tokens(texts.size());
    for (std::size_t index = 0; index < texts.size(); ++index) tokens[index].text = texts[index];
    return tokens;
}

// Returns the answer to ten tokens, cancelled after `num_tokens`, and the ids of the answer that the sequence keeps.
struct Left {
    Answer answer;
    Ids kept;
};
Left answer_left_after(std::size_t num_tokens, const std::vector<std::string>& stop) {
    const auto& manifest = bundle().manifest();
    const auto pair = open_graphs(bundle_folder(), manifest, 1, false);
    Sequence sequence(pair, manifest);
    sequence.reserve(20);
    Left left;
    left.answer.prompt_token_ids = some_ids(10);
    left.answer.settings.windows = {0, 1};
    left.answer.settings.prefill_chunk_tokens = 512;
    left.answer.settings.stop = stop;
    left.answer.settings.sampling.do_sample = true;  // greedy tokens repeat
    const auto decoder = decoder_of_pairs();
    const Cancellation cancellation;
    Generation generation(sequence, manifest, &decoder, cancellation, 10, left.answer);
    std::size_t num_seen = 0;
    generation.run([&](const Token&) {
        if (++num_seen == num_tokens) cancellation.cancel();
    });
    const auto& ids = sequence.token_ids();
    left.kept = {ids.begin() + 10, ids.end()};
    return left;
}

}  // namespace

TEST_CASE("an answer left within a stop string keeps what comes before it") {
    // The token that it begins in stayed in the sequence, and it was named though it ended nothing.
    const auto whole = answer_left_after(0, {}).answer.token_ids;
    CHECK(std::set(whole.begin(), whole.begin() + 5).size() == 5);
    const auto stop = text_of(whole[3]).substr(1) + text_of(whole[4]);
    const auto found = answer_left_after(0, {stop});
    CHECK(found.answer.stop_reason == StopReason::stop);
    CHECK(found.answer.stop_string == stop);
    CHECK(found.answer.token_ids == Ids(whole.begin(), whole.begin() + 5));
    CHECK(found.kept == Ids(whole.begin(), whole.begin() + 3));

    const auto left = answer_left_after(4, {stop});
    CHECK(left.answer.stop_reason == StopReason::cancelled);
    CHECK(left.answer.stop_string.empty());
    CHECK(left.answer.token_ids == Ids(whole.begin(), whole.begin() + 4));
    CHECK(left.answer.text() == found.answer.text());
    CHECK(left.kept == found.kept);
    CHECK(answer_left_after(2, {stop}).kept == Ids(whole.begin(), whole.begin() + 2));
}

TEST_CASE("what stays are the tokens handed out, less a part of a character and what reaches into a stop string") {
    CHECK(num_kept({}, 0, 0, true) == 0);
    CHECK(num_kept(tokens_of({"a", "b", "c"}), 3, 0, true) == 3);
    CHECK(num_kept(tokens_of({"a", "", ""}), 3, 0, true) == 3);  // all there are: special tokens
    CHECK(num_kept(tokens_of({"a", "", ""}), 4, 0, true) == 1);  // two bytes of three
    CHECK(num_kept(tokens_of({"a", "b", "c"}), 3, 2, true) == 1);
    CHECK(num_kept(tokens_of({"a", "b"}), 4, 3, true) == 1);  // left within the stop string
    CHECK(num_kept(tokens_of({"a", "b"}), 4, 1, true) == 2);
    CHECK(num_kept(tokens_of({"a", ""}), 4, 2, true) == 1);
}

TEST_CASE("where tokens have no text an empty one is no part of a character") {
    // All that was handed out left the sequence if another thread cancelled just after a token was chosen.
    CHECK(num_kept(tokens_of({"", ""}), 3, 0, false) == 2);
}
