#include <doctest/doctest.h>

#include "bundle.h"

using namespace pop;
using Ids = std::vector<std::int64_t>;

namespace {

GenerateOptions options_for(std::int64_t max_new_tokens, Prefill prefill = Prefill::pop) {
    GenerateOptions options;
    options.max_new_tokens = max_new_tokens;
    options.ignore_eos = true;
    options.prefill = prefill;
    return options;
}

Ids joined(Ids first, const Ids& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

}  // namespace

TEST_CASE("turns of a conversation give the tokens of one long prompt in full mode") {
    auto conversation = bundle().conversation();
    Ids all;
    for (std::uint64_t turn = 0; turn < 5; ++turn) {
        const auto ids = some_ids(5, turn);
        conversation.append(ids);
        all = joined(all, ids);
        const auto answer = conversation.generate(options_for(4, Prefill::full));
        CHECK(answer.token_ids == bundle().generate(all, options_for(4, Prefill::full)).token_ids);
        all = joined(all, answer.token_ids);
        CHECK(conversation.token_ids() == all);
    }
}

TEST_CASE("each position says what wrote it") {
    auto conversation = bundle().conversation();
    conversation.append(some_ids(2));
    conversation.append(some_ids(2, 1));
    auto options = options_for(3);
    options.sink_tokens = 1;
    const auto answer = conversation.generate(options);
    CHECK(answer.stats.num_pruned_tokens == 2);
    CHECK(answer.stats.num_prompt_tokens == 4);
    const auto f = Depth::full;
    const auto p = Depth::pruned;
    CHECK(conversation.provenance() == std::vector<Depth>{f, p, p, f, f, f});  // the last new token is not fed yet
    conversation.append(some_ids(3, 2));
    CHECK(conversation.generate(options_for(1)).stats.num_past_tokens == 7);
    CHECK(conversation.provenance() == std::vector<Depth>{f, p, p, f, f, f, f, p, p, f});
}

TEST_CASE("after a rewind all goes on as if the rest had never been") {
    auto conversation = bundle().conversation();
    conversation.append(some_ids(10));
    const auto first = conversation.generate(options_for(6)).token_ids;
    conversation.append(some_ids(4, 1));
    conversation.generate(options_for(6));
    conversation.rewind(10);
    CHECK(conversation.token_ids() == some_ids(10));
    CHECK(conversation.generate(options_for(6)).token_ids == first);  // the last prompt token is fed again
    conversation.rewind(13);
    CHECK(conversation.generate(options_for(3)).token_ids == Ids(first.begin() + 3, first.end()));
    CHECK_THROWS_AS(conversation.rewind(-1), UsageError);
}

TEST_CASE("a rewind forgets what is pending, which is no part of the sequence") {
    auto conversation = bundle().conversation();
    conversation.append(some_ids(4));
    CHECK(conversation.token_ids().empty());
    conversation.generate(options_for(2));
    const auto ids = conversation.token_ids();
    conversation.append(some_ids(3, 1));
    CHECK(conversation.token_ids() == ids);
    CHECK_THROWS_AS(conversation.rewind(7), UsageError);
    conversation.rewind(6);
    CHECK(conversation.token_ids() == ids);
    CHECK(conversation.generate(options_for(1)).stats.num_prompt_tokens == 0);
    conversation.append(some_ids(3, 1));
    conversation.rewind(0);
    CHECK_THROWS_AS(conversation.generate(), UsageError);
}

TEST_CASE("what does not fit is refused and leaves the conversation usable") {
    auto conversation = bundle().conversation();
    CHECK_THROWS_AS(conversation.generate(), UsageError);
    CHECK_THROWS_AS(conversation.append({}), UsageError);
    CHECK_THROWS_AS(conversation.append({300}), UsageError);
    CHECK_THROWS_AS(conversation.append({-1}), UsageError);
    CHECK_THROWS_AS(conversation.append(some_ids(64)), UsageError);
    conversation.append(some_ids(63));
    const auto answer = conversation.generate(options_for(9));
    CHECK(answer.token_ids.size() == 1);
    CHECK(answer.stop_reason == StopReason::length);
    CHECK_THROWS_AS(conversation.append({5}), UsageError);
    CHECK_THROWS_AS(conversation.generate(options_for(1)), UsageError);
    conversation.rewind(5);
    CHECK(conversation.generate(options_for(2)).token_ids.size() == 2);
}

TEST_CASE("options out of range are refused before any work") {
    auto conversation = bundle().conversation();
    conversation.append(some_ids(3));
    auto options = options_for(0);
    CHECK_THROWS_AS(conversation.generate(options), UsageError);
    options = options_for(1);
    options.boundary_tokens = 0;
    CHECK_THROWS_AS(conversation.generate(options), UsageError);
    options = options_for(1);
    options.sink_tokens = -1;
    CHECK_THROWS_AS(conversation.generate(options), UsageError);
    CHECK(conversation.provenance().empty());
    CHECK(conversation.generate(options_for(1)).token_ids.size() == 1);
}

TEST_CASE("an end token ends the answer and is no part of it") {
    const auto whole = bundle().generate(some_ids(10), options_for(20)).token_ids;
    auto conversation = bundle().conversation();
    conversation.append(some_ids(10));
    auto options = options_for(20);
    options.ignore_eos = false;
    const auto answer = conversation.generate(options);
    const auto end = std::find(whole.begin(), whole.end(), 257);
    CHECK(answer.token_ids == Ids(whole.begin(), end));
    CHECK((answer.stop_reason == StopReason::end) == (end != whole.end()));
    CHECK(conversation.token_ids().size() == 10 + answer.token_ids.size());
}

TEST_CASE("an exception of the callback passes through and the conversation goes on") {
    auto conversation = bundle().conversation();
    conversation.append(some_ids(10));
    const auto throwing = [](const Token&) { throw std::runtime_error("enough"); };
    CHECK_THROWS_WITH(conversation.generate(options_for(5), throwing), "enough");
    const auto whole = bundle().generate(some_ids(10), options_for(5)).token_ids;
    CHECK(conversation.token_ids().back() == whole[0]);
    CHECK(conversation.generate(options_for(4)).token_ids == Ids(whole.begin() + 1, whole.end()));
}
