#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "pop/error.h"
#include "sampling.h"

using namespace pop;
using namespace pop::internal;

namespace {

constexpr double kGone = -std::numeric_limits<double>::infinity();

SamplingSettings sampled() {
    SamplingSettings settings;
    settings.do_sample = true;
    return settings;
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
    std::vector<float> logits;
    for (const auto p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
    return logits;
}

std::vector<bool> kept(const std::vector<double>& scores) {
    std::vector<bool> found;
    for (const auto score : scores) found.push_back(score != kGone);
    return found;
}

const std::vector<bool> kNone(4, false);

}  // namespace

TEST_CASE("SplitMix64 gives the published numbers") {
    std::uint64_t state = 1234567;
    CHECK(split_mix_64(state) == 6457827717110365317U);
    CHECK(split_mix_64(state) == 3203168211198807973U);
    CHECK(split_mix_64(state) == 9817491932198370423U);
}

TEST_CASE("greedy takes the first highest logit") {
    Sampler sampler(SamplingSettings(), 4);
    CHECK(sampler.choose({1.0F, 3.0F, 3.0F, 2.0F}) == 1);
}

TEST_CASE("logits that are not finite are an error") {
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    const auto infinity = std::numeric_limits<float>::infinity();
    for (const auto& logits : {std::vector<float>{nan, 1, 2, 3},
                               {1, 2, 3, nan},
                               {0, infinity, 1, 2},
                               {-infinity, -infinity, -infinity, -infinity}}) {
        Sampler sampler(SamplingSettings(), 4);
        CHECK_THROWS_AS(sampler.choose(logits), BackendError);
    }
}

TEST_CASE("the penalty makes each seen token less likely, once, whatever its sign") {
    SamplingSettings settings;
    settings.repetition_penalty = 2.0;
    CHECK(process_logits({3, -1, 2, -2}, {true, true, false, false}, settings) == std::vector<double>{1.5, -2, 2, -2});
    Sampler sampler(settings, 4);
    sampler.see({0, 0});
    CHECK(sampler.choose({3, -1, 2, -2}) == 2);
    CHECK(sampler.choose({3, 1, 2, -2}) == 0);  // 1.5, 1, 1 (seen now), -2
}

TEST_CASE("top-k keeps ties with the k-th") {
    auto settings = sampled();
    settings.top_k = 2;
    CHECK(kept(process_logits({1, 3, 2, 2}, kNone, settings)) == std::vector<bool>{false, true, true, true});
    settings.top_k = 4;
    CHECK(kept(process_logits({1, 3, 2, 2}, kNone, settings)) == std::vector<bool>(4, true));
}

TEST_CASE("top-p removes the least likely while they add up to at most what is left") {
    auto settings = sampled();
    const auto logits = logits_of({0.1, 0.5, 0.15, 0.25});
    settings.top_p = 0.7;  // 0.1 + 0.15 <= 0.3, with 0.25 more it is not
    CHECK(kept(process_logits(logits, kNone, settings)) == std::vector<bool>{false, true, false, true});
    settings.top_p = 1e-9;
    CHECK(kept(process_logits(logits, kNone, settings)) == std::vector<bool>{false, true, false, false});
}

TEST_CASE("min-p compares with the likeliest, which stays") {
    auto settings = sampled();
    settings.min_p = 0.4;
    const auto logits = logits_of({0.1, 0.5, 0.15, 0.25});
    CHECK(kept(process_logits(logits, kNone, settings)) == std::vector<bool>{false, true, false, true});
    settings.min_p = 1.0;
    CHECK(kept(process_logits(logits, kNone, settings)) == std::vector<bool>{false, true, false, false});
}

TEST_CASE("a tiny temperature does not overflow") {
    auto settings = sampled();
    settings.temperature = 1e-300;
    Sampler sampler(settings, 4);
    CHECK(sampler.choose({1, 3, 2, 2}) == 1);
}

TEST_CASE("an extreme penalty leaves scores finite and draws within the vocabulary") {
    // 5 / 1e-310 was infinite, infinity - infinity NaN, and the token drawn was V
    constexpr double kHighest = std::numeric_limits<double>::max();
    SamplingSettings settings;
    settings.repetition_penalty = 1e-310;
    const std::vector<bool> seen{true, true, false, true};
    const auto scores = process_logits({5, 6, 1, -1}, seen, settings);
    CHECK(scores == std::vector<double>{kHighest, kHighest, 1, -1e-310});
    settings.repetition_penalty = 1e308;
    CHECK(process_logits({-5, -6, 1, -7}, seen, settings) == std::vector<double>{-kHighest, -kHighest, 1, -kHighest});
    for (const auto penalty : {1e-310, 1e308}) {
        for (const auto sign : {-1.0F, 1.0F}) {
            auto drawn = sampled();
            drawn.repetition_penalty = penalty;
            drawn.top_k = 3;
            drawn.top_p = 0.9;
            drawn.min_p = 0.1;
            Sampler sampler(drawn, 4);
            sampler.see({0, 1, 2, 3});
            for (int draw = 0; draw < 10; ++draw) CHECK(sampler.choose({5 * sign, 6 * sign, sign, 7 * sign}) < 4);
        }
    }
}

TEST_CASE("a draw beyond the sum takes the last token of a probability above 0") {
    CHECK(drawn_token({kGone, 0, -1, kGone}, 0.0) == 1);
    CHECK(drawn_token({kGone, 0, -1, kGone}, 0.99) == 2);
    CHECK(drawn_token({kGone, 0, -1, kGone}, 1.0) == 2);  // was 4
    CHECK(drawn_token({kGone, 0, -1, -800}, 1.0) == 2);
}

TEST_CASE("draws follow the probabilities") {
    auto settings = sampled();
    settings.seed = 1;
    Sampler sampler(settings, 4);
    const std::vector<double> wanted{0.5, 0.2, 0.0, 0.3};
    std::vector<double> found(4);
    for (int draw = 0; draw < 20000; ++draw) {
        found[static_cast<std::size_t>(sampler.choose(logits_of(wanted)))] += 1.0 / 20000;
    }
    CHECK(found[2] == 0.0);
    for (std::size_t id = 0; id < 4; ++id) CHECK(std::abs(found[id] - wanted[id]) < 0.0175);  // 5 standard deviations
}

TEST_CASE("settings come from the file unless they are given") {
    const auto file = Json::parse(R"({"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": null})");
    GenerateOptions options;
    auto settings = settings_in_force(file, options);
    CHECK(settings.do_sample);
    CHECK(settings.temperature == 0.7);
    CHECK(settings.top_k == 20);
    CHECK(settings.top_p == 1.0);
    options.temperature = 0.0;
    options.top_k = 0;
    settings = settings_in_force(file, options);
    CHECK_FALSE(settings.do_sample);
    CHECK(settings.top_k == 0);
    options.temperature = 0.5;
    CHECK(settings_in_force(Json::object(), options).do_sample);
    CHECK_FALSE(settings_in_force(Json::object(), GenerateOptions()).do_sample);
}

TEST_CASE("values out of range are refused, as usage if given and as model if stored") {
    GenerateOptions options;
    options.top_p = 1.5;
    CHECK_THROWS_WITH_AS(settings_in_force(Json::object(), options),
                         "top_p: expected a number above 0 and at most 1, found 1.5; change it or leave it out",
                         UsageError);
    options.top_p = std::numeric_limits<double>::quiet_NaN();
    CHECK_THROWS_AS(settings_in_force(Json::object(), options), UsageError);
    for (const auto* text :
         {R"({"temperature": -1})", R"({"temperature": "hot"})", R"({"top_k": 2.5})", R"({"top_k": true})",
          R"({"min_p": 2})", R"({"repetition_penalty": 0})", R"({"do_sample": 1})"}) {
        CHECK_THROWS_AS(settings_in_force(Json::parse(text), GenerateOptions()), ModelError);
    }
}

TEST_CASE("a drawn seed is shown and differs") {
    GenerateOptions options;
    options.temperature = 1.0;
    CHECK(settings_in_force(Json::object(), options).seed != settings_in_force(Json::object(), options).seed);
}

TEST_CASE("settings that are not applied are listed, neutral ones are not") {
    const auto file = Json::parse(
        R"({"num_beams": 4, "typical_p": 1.0, "suppress_tokens": [], "bad_words_ids": [[1]], "min_length": false})");
    CHECK(unknown_settings(file) == std::vector<std::string>{"num_beams", "bad_words_ids"});
}
