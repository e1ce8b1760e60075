#include <doctest/doctest.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "bundle.h"

using namespace pop;

TEST_CASE("a cancelled generation ends with the tokens handed out") {
    GenerateOptions options;
    options.ignore_eos = true;
    const auto whole = bundle().generate(some_ids(10), options);
    std::vector<std::int64_t> seen;
    const auto answer = bundle().generate(some_ids(10), options, [&](const Token& token) {
        seen.push_back(token.id);
        if (seen.size() == 5) options.cancellation.cancel();
    });
    CHECK(answer.stop_reason == StopReason::cancelled);
    CHECK(answer.token_ids == seen);
    CHECK(seen == std::vector<std::int64_t>(whole.token_ids.begin(), whole.token_ids.begin() + 5));
}

TEST_CASE("another thread can cancel, before or while it runs") {
    for (int round = 0; round < 50; ++round) {
        GenerateOptions options;
        options.ignore_eos = true;
        std::thread other([cancellation = options.cancellation, round] {
            std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
            cancellation.cancel();
        });
        const auto answer = bundle().generate(some_ids(10), options);
        other.join();
        if (answer.stop_reason != StopReason::cancelled) CHECK(answer.token_ids.size() == 54);
        CHECK(options.cancellation.is_cancelled());
        CHECK(bundle().generate(some_ids(10), options).token_ids.empty());
    }
}

TEST_CASE("cancelled while its turn is read, a conversation is what it was and the turn is pending") {
    GenerateOptions options;
    options.max_new_tokens = 3;
    options.ignore_eos = true;
    const auto begin = [&] {
        auto conversation = bundle().conversation();
        conversation.append(some_ids(10));
        conversation.generate(options);
        conversation.append(some_ids(6, 2));
        return conversation;
    };
    auto conversation = begin();
    const auto depth = conversation.provenance();
    const auto ids = conversation.token_ids();
    GenerateOptions cancelled = options;
    cancelled.cancellation = Cancellation();
    cancelled.cancellation.cancel();
    const auto answer = conversation.generate(cancelled);
    CHECK(answer.stop_reason == StopReason::cancelled);
    CHECK(answer.token_ids.empty());
    CHECK(conversation.provenance() == depth);
    CHECK(conversation.token_ids() == ids);
    CHECK(conversation.generate(options).token_ids == begin().generate(options).token_ids);
    CHECK(conversation.token_ids().size() == ids.size() + 6 + 3);
}

TEST_CASE("a turn that is cancelled half way is read again in full") {
    GenerateOptions options;
    options.max_new_tokens = 1;
    options.sink_tokens = 2;
    options.boundary_tokens = 3;
    SUBCASE("of many chunks") { options.prefill_chunk_tokens = 1; }
    SUBCASE("of chunks with tokens of both stages") { options.prefill_chunk_tokens = 24; }
    const auto whole = bundle().generate(some_ids(50), options).token_ids;
    for (int round = 0; round < 30; ++round) {
        auto conversation = bundle().conversation();
        conversation.append(some_ids(50));
        GenerateOptions cancelled = options;
        cancelled.cancellation = Cancellation();
        std::thread other([cancellation = cancelled.cancellation, round] {
            std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
            cancellation.cancel();
        });
        const auto answer = conversation.generate(cancelled);
        other.join();
        if (answer.stop_reason != StopReason::cancelled) continue;
        if (answer.stats.time_to_first_token_ms) continue;  // the turn was read
        CHECK(conversation.provenance().empty());
        CHECK(conversation.generate(options).token_ids == whole);
    }
}

TEST_CASE("1,000 cancelled generations leave no memory behind") {
    const auto resident_kb = [] {
        std::ifstream status("/proc/self/status");
        for (std::string word; status >> word;) {
            if (word == "VmRSS:") {
                long kb = 0;
                status >> kb;
                return kb;
            }
        }
        return 0L;
    };
    const auto round = [] {
        GenerateOptions options;
        options.ignore_eos = true;
        bundle().generate(some_ids(30), options, [&](const Token&) { options.cancellation.cancel(); });
    };
    for (int warm_up = 0; warm_up < 100; ++warm_up) round();
    const auto before = resident_kb();
    for (int count = 0; count < 1000; ++count) round();
    CHECK(resident_kb() - before < 2048);  // one cache alone is 48 kB
}
