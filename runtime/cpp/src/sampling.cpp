#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "pop/error.h"
#include "text_format.h"

namespace pop::internal {

namespace {

constexpr double kRemoved = -std::numeric_limits<double>::infinity();
constexpr double kHighest = std::numeric_limits<double>::max();

// The range of each setting, in words and as a rule.
struct Range {
    const char* name;
    const char* expected;
    bool (*holds)(double);
};
constexpr Range kTemperature{"temperature", "a number of at least 0", [](double x) { return x >= 0; }};
constexpr Range kTopK{"top_k", "a whole number of at least 0 (0: no limit)", [](double x) { return x >= 0; }};
constexpr Range kTopP{"top_p", "a number above 0 and at most 1", [](double x) { return x > 0 && x <= 1; }};
constexpr Range kMinP{"min_p", "a number from 0 to 1", [](double x) { return x >= 0 && x <= 1; }};
constexpr Range kPenalty{"repetition_penalty", "a number above 0", [](double x) { return x > 0; }};

std::string complaint(const std::string& place, const Range& range, const std::string& found) {
    return message(place, range.expected, found, "change it or leave it out");
}

// Throws UsageError unless an option that is given is in its range.
template <typename Number>
void check(const std::optional<Number>& option, const Range& range) {
    if (!option) return;
    const auto value = static_cast<double>(*option);
    if (!std::isfinite(value) || !range.holds(value)) {
        throw UsageError(complaint(range.name, range, Json(*option).dump()));
    }
}

// Returns the option if it is given, else the file's value, else `neutral`. Throws ModelError: the file's value.
template <typename Number>
Number merged(const Json& config, const std::optional<Number>& option, const Range& range, Number neutral) {
    const auto stored = config.find(range.name);
    if (stored == config.end() || stored->is_null()) return option.value_or(neutral);
    const bool kind = std::is_integral_v<Number> ? stored->is_number_integer() : stored->is_number();
    if (!kind || !std::isfinite(stored->template get<double>()) || !range.holds(stored->template get<double>())) {
        throw ModelError(complaint(std::string("generation_config.json, ") + range.name, range, shown(*stored)));
    }
    return option.value_or(stored->template get<Number>());
}

// Removes the scores below the k-th highest; ties with it stay.
void keep_top_k(std::vector<double>& scores, std::int64_t k) {
    if (k <= 0 || static_cast<std::size_t>(k) >= scores.size()) return;
    auto sorted = scores;
    const auto kth = sorted.begin() + (k - 1);
    std::nth_element(sorted.begin(), kth, sorted.end(), std::greater<>());
    for (auto& score : scores) {
        if (score < *kth) score = kRemoved;
    }
}

// Removes the least likely tokens while their probabilities add up to at most 1 - top_p; the likeliest stays.
void keep_top_p(std::vector<double>& scores, double top_p) {
    if (top_p >= 1.0) return;
    std::vector<std::size_t> ascending;
    for (std::size_t id = 0; id < scores.size(); ++id) {
        if (scores[id] != kRemoved) ascending.push_back(id);  // removed ones have no probability
    }
    std::stable_sort(ascending.begin(), ascending.end(),
                     [&](std::size_t a, std::size_t b) { return scores[a] < scores[b]; });
    const auto total = std::accumulate(ascending.begin(), ascending.end(), 0.0,
                                       [&](double sum, std::size_t id) { return sum + std::exp(scores[id]); });
    double running = 0.0;
    for (std::size_t rank = 0; rank + 1 < ascending.size(); ++rank) {
        auto& score = scores[ascending[rank]];
        running += std::exp(score) / total;
        if (running > 1.0 - top_p) break;
        score = kRemoved;
    }
}

}  // namespace

SamplingSettings settings_in_force(const Json& generation_config, const GenerateOptions& options) {
    // All options first, so that a wrong one is told of even where the file is wrong too.
    check(options.temperature, kTemperature);
    check(options.top_k, kTopK);
    check(options.top_p, kTopP);
    check(options.min_p, kMinP);
    check(options.repetition_penalty, kPenalty);
    SamplingSettings settings;
    const auto heat = merged(generation_config, options.temperature, kTemperature, 1.0);
    settings.temperature = heat > 0 ? heat : 1.0;
    settings.top_k = merged<std::int64_t>(generation_config, options.top_k, kTopK, 0);
    settings.top_p = merged(generation_config, options.top_p, kTopP, 1.0);
    settings.min_p = merged(generation_config, options.min_p, kMinP, 0.0);
    settings.repetition_penalty = merged(generation_config, options.repetition_penalty, kPenalty, 1.0);
    const auto do_sample = generation_config.value("do_sample", Json());
    if (!do_sample.is_null() && !do_sample.is_boolean()) {
        throw ModelError(
            message("generation_config.json, do_sample", "true or false", shown(do_sample), "mend the file"));
    }
    settings.do_sample = heat > 0 && (options.temperature || (do_sample.is_boolean() && do_sample.get<bool>()));
    settings.seed = options.seed.value_or(settings.do_sample ? std::random_device()() : 0);
    return settings;
}

std::vector<std::string> unknown_settings(const Json& generation_config) {
    // With the value of each that changes nothing; null, false, [] and {} change nothing either.
    // clang-format off
    static const std::vector<std::pair<const char*, Json>> kUnknown{
        {"num_beams", 1}, {"typical_p", 1}, {"top_h", 0}, {"epsilon_cutoff", 0}, {"eta_cutoff", 0}, {"min_length", 0},
        {"min_new_tokens", 0}, {"no_repeat_ngram_size", 0}, {"penalty_alpha", 0}, {"guidance_scale", 1},
        {"suppress_tokens", nullptr}, {"begin_suppress_tokens", nullptr}, {"bad_words_ids", nullptr},
        {"sequence_bias", nullptr}, {"forced_bos_token_id", nullptr}, {"forced_eos_token_id", nullptr},
        {"exponential_decay_length_penalty", nullptr}};
    // clang-format on
    std::vector<std::string> names;
    for (const auto& [name, neutral] : kUnknown) {
        const auto found = generation_config.find(name);
        if (found == generation_config.end()) continue;
        const bool is_empty = found->is_null() || (found->is_structured() && found->empty());
        if (!is_empty && *found != neutral && *found != Json(false)) names.emplace_back(name);
    }
    return names;
}

std::vector<double> process_logits(const std::vector<float>& logits, const std::vector<bool>& seen,
                                   const SamplingSettings& settings) {
    std::vector<double> scores(logits.begin(), logits.end());
    if (const auto penalty = settings.repetition_penalty; penalty != 1.0) {
        for (std::size_t id = 0; id < scores.size(); ++id) {
            if (seen[id]) scores[id] = scores[id] < 0 ? scores[id] * penalty : scores[id] / penalty;
            // An extreme penalty makes them infinite, and the highest less itself would be NaN.
            scores[id] = std::clamp(scores[id], -kHighest, kHighest);
        }
    }
    if (!settings.do_sample) return scores;
    const auto highest = *std::max_element(scores.begin(), scores.end());
    // Shifted first: a tiny temperature cannot overflow.
    for (auto& score : scores) score = (score - highest) / settings.temperature;
    keep_top_k(scores, settings.top_k);
    keep_top_p(scores, settings.top_p);
    if (settings.min_p > 0) {
        const auto lowest = std::min(std::log(settings.min_p), 0.0);  // the highest score is 0
        for (auto& score : scores) {
            if (score < lowest) score = kRemoved;
        }
    }
    return scores;
}

std::vector<double> log_probabilities(const std::vector<float>& logits) {
    std::vector<double> scores(logits.begin(), logits.end());
    const auto highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (const auto score : scores) sum += std::exp(score - highest);
    const auto shift = highest + std::log(sum);
    for (auto& score : scores) score -= shift;
    return scores;
}

std::vector<std::int64_t> likeliest(const std::vector<double>& scores, std::int64_t count) {
    std::vector<std::int64_t> ids(scores.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto score = [&](std::int64_t id) { return scores[static_cast<std::size_t>(id)]; };
    std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](std::int64_t a, std::int64_t b) {
        return score(a) > score(b) || (score(a) == score(b) && a < b);
    });
    ids.resize(static_cast<std::size_t>(count));
    return ids;
}

std::uint64_t split_mix_64(std::uint64_t& state) {
    state += 0x9E3779B97F4A7C15U;
    auto bits = (state ^ (state >> 30U)) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
    return bits ^ (bits >> 31U);
}

std::size_t drawn_token(std::vector<double> scores, double uniform) {
    double running = 0.0;
    for (auto& score : scores) score = running += std::exp(score);
    auto found = std::upper_bound(scores.begin(), scores.end(), uniform * running);
    if (found == scores.end()) found = std::lower_bound(scores.begin(), scores.end(), running);  // the last of a chance
    return static_cast<std::size_t>(found - scores.begin());
}

std::int64_t Sampler::choose(const std::vector<float>& logits) {
    std::size_t token = 0;
    bool has_nan = false;
    for (std::size_t id = 0; id < logits.size(); ++id) {
        has_nan = has_nan || std::isnan(logits[id]);
        if (logits[id] > logits[token]) token = id;
    }
    if (has_nan || !std::isfinite(logits[token])) {
        throw BackendError(message("decode graph, logits", "finite numbers", "NaN or infinity", "re-run pop-export"));
    }
    if (settings_.do_sample || settings_.repetition_penalty != 1.0) {
        const auto scores = process_logits(logits, seen_, settings_);
        token = settings_.do_sample
                    ? draw(scores)
                    : static_cast<std::size_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
    }
    seen_[token] = true;
    return static_cast<std::int64_t>(token);
}

std::size_t Sampler::draw(const std::vector<double>& scores) {
    const auto uniform = static_cast<double>(split_mix_64(state_) >> 11U) * 0x1p-53;  // [0, 1)
    return drawn_token(scores, uniform);
}

}  // namespace pop::internal
