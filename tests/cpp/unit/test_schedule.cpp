#include <doctest/doctest.h>

#include "schedule.h"

using pop::Windows;
using pop::internal::plan_turn;
using pop::internal::Stage;
using pop::internal::Stretch;
using Stretches = std::vector<Stretch>;

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

TEST_CASE("the largest numbers do not overflow") {
    CHECK(plan_turn(0, 5, Windows{INT64_MAX, INT64_MAX}, INT64_MAX) == Stretches{{0, 5, kDecode}});
    CHECK(plan_turn(INT64_MAX, 5, Windows{0, 1}, INT64_MAX) == Stretches{{0, 4, kPrefill}, {4, 5, kDecode}});
}
