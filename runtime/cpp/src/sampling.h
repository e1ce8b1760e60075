// From logits to the next token: the settings in force, the logit processors and the draw (docs/runtime.md).
//
// The random numbers are SplitMix64, so that one seed gives one text here and in Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json_file.h"
#include "pop/model.h"

namespace pop::internal {

// Returns the settings of generation_config.json, overridden by those options that are given.
//
// A temperature of 0 is greedy, a given temperature above 0 samples; else `do_sample` of the file decides. Without a
// seed one is drawn, so that the settings shown always reproduce the text.
//
// Throws UsageError: an option is out of its range. ModelError: a value of the file is.
SamplingSettings settings_in_force(const Json& generation_config, const GenerateOptions& options);

// Returns the names of settings that would change the text in transformers and that this runtime does not apply.
std::vector<std::string> unknown_settings(const Json& generation_config);

// Returns the logits that softmax turns into the distribution to draw from, [V]; removed tokens are -inf.
//
// seen: [V], the tokens of prompt and text so far. settings: without `do_sample` only the repetition penalty is
// applied, with it the highest score is 0.
std::vector<double> process_logits(const std::vector<float>& logits, const std::vector<bool>& seen,
                                   const SamplingSettings& settings);

// Returns the natural logarithms of the softmax of logits, [V].
std::vector<double> log_probabilities(const std::vector<float>& logits);

// Returns the ids of the `count` highest scores, highest first, the lowest id first among equals.
std::vector<std::int64_t> likeliest(const std::vector<double>& scores, std::int64_t count);

// Returns 64 random bits and moves the state on.
//
// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
std::uint64_t split_mix_64(std::uint64_t& state);

// Returns the token at which the running sum of the probabilities, in id order, passes `uniform` times the whole sum,
// or the last one with a probability above 0 if rounding leaves none.
//
// scores: [V], as `process_logits` gives them: the highest is 0. uniform: in [0, 1).
std::size_t drawn_token(std::vector<double> scores, double uniform);

// Chooses the tokens of one sequence; remembers which ids were seen and where its random numbers are.
class Sampler {
public:
    Sampler(const SamplingSettings& settings, std::int64_t vocab_size)
        : settings_(settings), seen_(static_cast<std::size_t>(vocab_size)), state_(settings.seed) {}

    void see(const std::vector<std::int64_t>& ids) {
        for (const auto id : ids) seen_[static_cast<std::size_t>(id)] = true;
    }

    // Returns the next token for logits [V], and counts it as seen. Throws BackendError: a logit is NaN or infinite.
    std::int64_t choose(const std::vector<float>& logits);

private:
    std::size_t draw(const std::vector<double>& scores);

    SamplingSettings settings_;
    std::vector<bool> seen_;
    std::uint64_t state_;
};

}  // namespace pop::internal
