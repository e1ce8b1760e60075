#include <doctest/doctest.h>

#include <algorithm>

#include "schedule.h"

using pop::Windows;
using pop::internal::plan_joined_turn;
using pop::internal::plan_turn;
using pop::internal::Stage;
using pop::internal::Stretch;
using Stretches = std::vector<Stretch>;
using Chunks = std::vector<Stretches>;

constexpr auto kPrefill = Stage::prefill;
constexpr auto kDecode = Stage::decode;

TEST_CASE("sink and boundary run full, what lies between runs pruned") {
    CHECK(plan_turn(0, 20, Windows{4, 3}, 512) == Stretches{{0, 4, kDecode}, {4, 17, kPrefill}, {17, 20, kDecode}});
}

TEST_CASE("the sink counts from the start of the sequence") {
    CHECK(plan_turn(3, 20, Windows{4, 3}, 512) == Stretches{{0, 1, kDecode}, {1, 17, kPrefill}, {17, 20, kDecode}});
    CHECK(plan_turn(9, 20, Windows{4, 3}, 512) == Stretches{{0, 17, kPrefill}, {17, 20, kDecode}});
}

TEST_CASE("a turn that the windows cover runs full") {
    CHECK(plan_turn(0, 7, Windows{4, 3}, 512) == Stretches{{0, 7, kDecode}});
    CHECK(plan_turn(0, 1, Windows{0, 1}, 512) == Stretches{{0, 1, kDecode}});
    CHECK(plan_turn(0, 8, Windows{4, 3}, 512) == Stretches{{0, 4, kDecode}, {4, 5, kPrefill}, {5, 8, kDecode}});
}

TEST_CASE("without windows the whole turn runs full") {
    CHECK(plan_turn(0, 5, std::nullopt, 512) == Stretches{{0, 5, kDecode}});
}

TEST_CASE("a chunk tail of one token keeps its stage") {
    CHECK(plan_turn(0, 10, Windows{0, 1}, 4) ==
          Stretches{{0, 4, kPrefill}, {4, 8, kPrefill}, {8, 9, kPrefill}, {9, 10, kDecode}});
}

TEST_CASE("a joined turn is cut at multiples of the chunk and where the stage changes") {
    CHECK(plan_joined_turn(0, 12, Windows{2, 3}, 5) ==
          Chunks{{{0, 2, kDecode}, {2, 5, kPrefill}}, {{5, 9, kPrefill}, {9, 10, kDecode}}, {{10, 12, kDecode}}});
    CHECK(plan_joined_turn(0, 12, std::nullopt, 5) ==
          Chunks{{{0, 5, kDecode}}, {{5, 10, kDecode}}, {{10, 12, kDecode}}});
}

namespace {

// Returns the stage of every token; fails if stretches leave a gap.
std::vector<Stage> stages_of(const Stretches& stretches) {
    std::vector<Stage> stages;
    for (const auto& stretch : stretches) {
        REQUIRE(stretch.start == static_cast<std::int64_t>(stages.size()));
        REQUIRE(stretch.stop > stretch.start);
        stages.resize(static_cast<std::size_t>(stretch.stop), stretch.stage);
    }
    return stages;
}

// Checks that a joined turn sends every token through the graph of the plain one, in chunks of their place.
void compare_plans(std::int64_t num_past, std::int64_t num_new, const Windows& windows, std::int64_t chunk_tokens) {
    Stretches all;
    std::int64_t start = 0;
    for (const auto& chunk : plan_joined_turn(num_past, num_new, windows, chunk_tokens)) {
        REQUIRE(chunk.front().start == start);
        start = std::min(start + chunk_tokens, num_new);
        REQUIRE(chunk.back().stop == start);
        all.insert(all.end(), chunk.begin(), chunk.end());
    }
    REQUIRE(start == num_new);
    REQUIRE(stages_of(all) == stages_of(plan_turn(num_past, num_new, windows, chunk_tokens)));
}

}  // namespace

TEST_CASE("a joined turn sends every token through the graph of the plain one") {
    for (const std::int64_t num_past : {0, 2, 9}) {
        for (std::int64_t num_new = 1; num_new < 12; ++num_new) {
            for (std::int64_t sink = 0; sink < 4; ++sink) {
                for (std::int64_t boundary = 1; boundary < 5; ++boundary) {
                    for (const std::int64_t chunk_tokens : {1, 3, 50}) {
                        compare_plans(num_past, num_new, Windows{sink, boundary}, chunk_tokens);
                    }
                }
            }
        }
    }
}

TEST_CASE("the largest numbers do not overflow") {
    CHECK(plan_turn(0, 5, Windows{INT64_MAX, INT64_MAX}, INT64_MAX) == Stretches{{0, 5, kDecode}});
    CHECK(plan_turn(INT64_MAX, 5, Windows{0, 1}, INT64_MAX) == Stretches{{0, 4, kPrefill}, {4, 5, kDecode}});
    CHECK(plan_joined_turn(0, 5, Windows{1, 1}, INT64_MAX) ==
          Chunks{{{0, 1, kDecode}, {1, 4, kPrefill}, {4, 5, kDecode}}});
}
