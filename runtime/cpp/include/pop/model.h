// A loaded bundle, what can be asked of it, and what it answers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pop/manifest.h"

namespace pop {

struct LoadOptions {
    std::optional<int> threads;  // of each session, at most 16 per core; none takes the cores this process may run on
    bool verify = true;          // compare the sha256 of every file with the manifest
    bool low_memory = false;     // leave weights that are not quantised as they lie in the file, for slower steps
    std::string ep = "cpu";      // execution provider, as for `pop-run`; all but the CPU's are refused
    int device = 0;              // which device of it
};

// How a prompt is read: `pop` leaves the planned layers out between the windows, `full` is the exact model.
enum class Prefill { pop, full };

// What a position of the KV cache was written by: the prefill graph or the decode graph.
enum class Depth : std::uint8_t { pruned = 1, full = 2 };

enum class StopReason {
    end,        // an end token, which is not part of the answer
    stop,       // a stop string: the text ends before it
    length,     // `max_new_tokens`, or no more room
    cancelled,  // `Cancellation::cancel`
};

// Stops generations: give a copy to `generate` and call `cancel` from any thread. It takes effect within a run of a
// graph. A token of this kind stays cancelled.
class Cancellation {
public:
    Cancellation();
    void cancel() const;
    bool is_cancelled() const;

    struct State;
    const State& state() const { return *state_; }

private:
    std::shared_ptr<State> state_;
};

// What decides an answer. Values left out come from the bundle's generation_config.json, then from the neutral value.
struct GenerateOptions {
    std::int64_t max_new_tokens = 256;
    Prefill prefill = Prefill::pop;
    std::optional<double> temperature;         // 0 is greedy, above 0 samples
    std::optional<std::int64_t> top_k;         // keep the k likeliest tokens; 0 is no limit
    std::optional<double> top_p;               // in (0, 1]: keep the likeliest tokens up to this probability
    std::optional<double> min_p;               // in [0, 1]: drop tokens below this part of the likeliest one's
    std::optional<double> repetition_penalty;  // above 1 makes seen tokens less likely
    std::optional<std::uint64_t> seed;         // same seed, same tokens, as in Python; none draws one
    std::optional<std::int64_t> sink_tokens;   // none takes the manifest's windows
    std::optional<std::int64_t> boundary_tokens;
    std::int64_t prefill_chunk_tokens = 512;       // longest piece read at once: memory and speed, not what is computed
    std::optional<std::vector<std::string>> stop;  // texts that end the answer; needs `Model::decodes_text`
    std::optional<std::int64_t> logprobs;          // log-probability of each token, and of so many likeliest ids
    bool prompt_logprobs = false;                  // the prompt's too, a step per token; needs Prefill::full
    bool ignore_eos = false;                       // go on at an end token, for measuring
    Cancellation cancellation;
};

// How the next token is chosen, defaults filled in.
struct SamplingSettings {
    bool do_sample = false;  // false: greedy, the highest logit
    double temperature = 1.0;
    std::int64_t top_k = 0;
    double top_p = 1.0;
    double min_p = 0.0;
    double repetition_penalty = 1.0;
    std::uint64_t seed = 0;
};

// Counts and times of an answer; the time spent in the caller's callback does not count.
struct Stats {
    std::int64_t num_prompt_tokens = 0;
    std::int64_t num_past_tokens = 0;    // of earlier turns
    std::int64_t num_pruned_tokens = 0;  // tokens of this turn's prompt that went through the pruned graph
    std::int64_t num_new_tokens = 0;
    std::optional<double> time_to_first_token_ms;
    std::optional<double> tokens_per_second;  // decode alone, after the first token; none before the second
};

// One generated token, as it is handed to the callback. Its text never ends within a character: while one is unfinished
// tokens are held back, and the text comes with the last of them. It is empty for special tokens.
struct Token {
    std::int64_t id = 0;
    std::string text;                                           // UTF-8
    std::optional<double> logprob;                              // nats, of the model's own distribution
    std::vector<std::pair<std::int64_t, double>> alternatives;  // likeliest ids and theirs, highest first
};
using OnToken = std::function<void(const Token&)>;

// Everything that decides an answer, defaults filled in.
struct Settings {
    Prefill prefill = Prefill::pop;
    Windows windows;
    std::int64_t prefill_chunk_tokens = 0;
    SamplingSettings sampling;
    std::int64_t max_new_tokens = 0;
    std::vector<std::int64_t> end_token_ids;  // ascending; none if end tokens are ignored
    std::vector<std::string> stop;
    std::optional<std::int64_t> logprobs;
    bool prompt_logprobs = false;
    int threads = 0;
};

struct Answer {
    std::vector<std::int64_t> prompt_token_ids;
    std::vector<std::int64_t> token_ids;  // without the end token
    std::vector<Token> tokens;            // the same, with their text
    StopReason stop_reason = StopReason::cancelled;
    std::string stop_string;                             // the one that ended it
    std::vector<std::optional<double>> prompt_logprobs;  // none for the first token; empty unless asked for
    Settings settings;
    Stats stats;

    std::string text() const;  // of all tokens, joined
};

class Conversation;

// Both graphs of a bundle over one copy of the weights; holds no sequence. Copies are cheap and share the sessions. All
// members may be called from several threads at once.
class Model {
public:
    // Returns the bundle in `folder`, ready to generate.
    //
    // Throws UsageError: fewer than one thread, an unknown provider. ModelError: the folder is not a whole, unaltered
    // bundle of a known format. BackendError: ONNX Runtime cannot load a graph, or the provider is not the CPU's.
    static Model load(const std::filesystem::path& folder, const LoadOptions& options = {});

    const std::filesystem::path& folder() const;
    const Manifest& manifest() const;

    // Whether tokens come with text: the bundle's tokenizer is of the byte-level kind. Others are not read.
    bool decodes_text() const;

    // Settings of generation_config.json that would change the text and that this runtime does not apply.
    const std::vector<std::string>& ignored_settings() const;

    // Returns the answer to a prompt of token ids. `on_token` is called in this thread for each token as it is chosen.
    //
    // Throws UsageError: an option out of range, no ids, an id outside the vocabulary or more than fit. ModelError:
    // generation_config.json is damaged. BackendError: a graph fails. What `on_token` throws passes through.
    Answer generate(const std::vector<std::int64_t>& prompt, const GenerateOptions& options = {},
                    const OnToken& on_token = {}) const;

    // Returns an empty conversation, which grows up to the model's positions.
    Conversation conversation() const;

    struct Impl;

private:
    explicit Model(std::shared_ptr<const Impl> impl);
    std::shared_ptr<const Impl> impl_;
};

// A sequence that keeps its KV cache between turns: nothing is read twice. One thread at a time.
class Conversation {
public:
    // Takes tokens of the next turn. They are read by the next `generate`; refused, they leave it as it was.
    //
    // Throws UsageError: no ids, an id outside the vocabulary, or no room for them and one token more.
    void append(const std::vector<std::int64_t>& ids);

    // Reads the turn that was appended and answers it. With nothing appended it goes on where it is.
    //
    // Cancelled while the turn is being read, the conversation is what it was, the turn pending; cancelled later, it
    // keeps the tokens handed out.
    //
    // Throws as `Model::generate`; UsageError too if the conversation is empty.
    Answer generate(const GenerateOptions& options = {}, const OnToken& on_token = {});

    // Forgets all from `position` on, and what was appended but not read.
    //
    // Throws UsageError: `position` is not within 0 and the number of tokens in `token_ids`.
    void rewind(std::int64_t position);

    // Returns the tokens read and generated so far, without those still to be read.
    std::vector<std::int64_t> token_ids() const;

    // Returns for each position in the KV cache what wrote it.
    std::vector<Depth> provenance() const;

    Conversation(Conversation&&) noexcept;
    Conversation& operator=(Conversation&&) noexcept;
    ~Conversation();

    struct Impl;

private:
    friend class Model;
    explicit Conversation(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace pop
