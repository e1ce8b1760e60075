#include "pop/model.h"

#include <algorithm>
#include <set>

#include "cancellation.h"
#include "decoder.h"
#include "generate.h"
#include "json_file.h"
#include "providers.h"
#include "sampling.h"
#include "sequence.h"
#include "sessions.h"
#include "text_format.h"
#include "utf8.h"

namespace pop {

using internal::message;

Cancellation::Cancellation() : state_(std::make_shared<State>()) {}

void Cancellation::cancel() const {
    state_->is_cancelled = true;
    state_->options.SetTerminate();
}

bool Cancellation::is_cancelled() const { return state_->is_cancelled; }

struct Model::Impl {
    std::filesystem::path folder;
    Manifest manifest;
    internal::Json generation_config;
    std::vector<std::string> ignored_settings;
    std::optional<internal::ByteLevelDecoder> decoder;
    internal::SessionPair sessions;

    void check_ids(const std::vector<std::int64_t>& ids) const;
    void check_room(std::int64_t num_tokens) const;
    Windows windows_of(const GenerateOptions& options) const;
    std::vector<std::string> stop_of(const GenerateOptions& options) const;
    Settings settings_of(const GenerateOptions& options) const;
    Answer generate(internal::Sequence& sequence, std::vector<std::int64_t> prompt, const GenerateOptions& options,
                    const OnToken& on_token) const;
};

// Throws UsageError unless there are ids and each has a row in the embedding.
void Model::Impl::check_ids(const std::vector<std::int64_t>& ids) const {
    if (ids.empty()) {
        throw UsageError(message("prompt", "at least one token", "none", "give some ids"));
    }
    for (std::size_t index = 0; index < ids.size(); ++index) {
        if (ids[index] >= 0 && ids[index] < manifest.vocab_size) continue;
        throw UsageError(message("prompt, token " + std::to_string(index),
                                 "an id of 0.." + std::to_string(manifest.vocab_size - 1), std::to_string(ids[index]),
                                 "check that the ids come from this model's tokenizer"));
    }
}

// Throws UsageError unless one token more than `num_tokens` fits.
void Model::Impl::check_room(std::int64_t num_tokens) const {
    const auto room = manifest.max_positions;
    if (num_tokens < room) return;
    throw UsageError(message("prompt", "fewer than " + std::to_string(room) + " tokens, so that one more fits",
                             std::to_string(num_tokens), "shorten it"));
}

namespace {

// Throws UsageError unless `number` is at least `least`.
void check_least(const char* name, std::int64_t number, std::int64_t least, const char* why = "") {
    if (number >= least) return;
    throw UsageError(message(name, "at least " + std::to_string(least) + why, std::to_string(number), "raise it"));
}

}  // namespace

// Returns the windows in force. Throws UsageError: out of range, or not covered by the bundle's fit.
Windows Model::Impl::windows_of(const GenerateOptions& options) const {
    const auto& own = manifest.windows;
    const Windows windows{options.sink_tokens.value_or(own.sink_tokens),
                          options.boundary_tokens.value_or(own.boundary_tokens)};
    check_least("sink_tokens", windows.sink_tokens, 0);
    check_least("boundary_tokens", windows.boundary_tokens, 1, " (the last token predicts the next)");
    const bool is_fitted = !manifest.plan.refitted_layers.empty() || !manifest.plan.surrogate_layers.empty();
    if (is_fitted && options.prefill == Prefill::pop && windows.sink_tokens < own.sink_tokens) {
        const auto expected =
            "at least " + std::to_string(own.sink_tokens) + " (the projections were fitted without the first tokens)";
        throw UsageError(message("sink_tokens", expected, std::to_string(windows.sink_tokens),
                                 "raise it, or read the prompt in full"));
    }
    return windows;
}

// Returns the stop strings in force; those of generation_config.json need a tokenizer to have any effect.
std::vector<std::string> Model::Impl::stop_of(const GenerateOptions& options) const {
    const std::string expected = "text that is not empty";
    if (options.stop) {
        if (!options.stop->empty() && !decoder) {
            throw UsageError(
                message("stop", "a byte-level tokenizer to match text with", "none", "end at ids instead"));
        }
        for (const auto& text : *options.stop) {
            if (text.empty()) throw UsageError(message("stop", expected, "''", "change it or leave it out"));
            if (const auto at = internal::valid_utf8_prefix(text); at != text.size()) {
                const auto found = "a byte that is not at " + std::to_string(at);
                throw UsageError(message("stop", "UTF-8 text", found, "change it or leave it out"));
            }
        }
        return *options.stop;
    }
    const auto stored = generation_config.value("stop_strings", internal::Json());
    if (stored.is_null() || !decoder) return {};
    std::vector<std::string> texts;
    for (const auto& text : stored.is_string() ? internal::Json::array({stored}) : stored) {
        if (!text.is_string() || text.get_ref<const std::string&>().empty()) {
            throw ModelError(message("generation_config.json, stop_strings", expected, internal::shown(stored),
                                     "change it or leave it out"));
        }
        texts.push_back(text.get<std::string>());
    }
    return texts;
}

// Returns everything that decides an answer, every default filled in and every range checked.
Settings Model::Impl::settings_of(const GenerateOptions& options) const {
    Settings settings;
    check_least("max_new_tokens", options.max_new_tokens, 1);
    check_least("prefill_chunk_tokens", options.prefill_chunk_tokens, 1);
    settings.max_new_tokens = options.max_new_tokens;
    settings.prefill_chunk_tokens = options.prefill_chunk_tokens;
    settings.prefill = options.prefill;
    settings.windows = windows_of(options);
    settings.logprobs = options.logprobs;
    if (const auto count = options.logprobs) {
        check_least("logprobs", *count, 0);
        if (*count > manifest.vocab_size) {
            const auto expected = "at most the vocabulary's " + std::to_string(manifest.vocab_size);
            throw UsageError(message("logprobs", expected, std::to_string(*count), "lower it"));
        }
    }
    settings.prompt_logprobs = options.prompt_logprobs;
    if (options.prompt_logprobs && options.prefill == Prefill::pop) {
        throw UsageError(message("prompt_logprobs", "prefill full", "pop",
                                 "the pruned graph has no head and its positions predict nothing; read in full"));
    }
    settings.sampling = internal::settings_in_force(generation_config, options);
    settings.stop = stop_of(options);
    if (!options.ignore_eos) {
        const std::set<std::int64_t> ends(manifest.eos_token_ids.begin(), manifest.eos_token_ids.end());
        settings.end_token_ids.assign(ends.begin(), ends.end());
    }
    settings.threads = sessions.threads;
    return settings;
}

Answer Model::Impl::generate(internal::Sequence& sequence, std::vector<std::int64_t> prompt,
                             const GenerateOptions& options, const OnToken& on_token) const {
    const auto total = sequence.size() + static_cast<std::int64_t>(prompt.size());
    check_room(total);
    Answer answer;
    answer.settings = settings_of(options);
    answer.prompt_token_ids = std::move(prompt);
    const auto limit = std::min(options.max_new_tokens, manifest.max_positions - total);
    sequence.reserve(total + limit);
    internal::Generation generation(sequence, manifest, decoder ? &*decoder : nullptr, options.cancellation, limit,
                                    answer);
    generation.run(on_token);
    return answer;
}

std::string Answer::text() const {
    std::string text;
    for (const auto& token : tokens) text += token.text;
    return text;
}

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::load(const std::filesystem::path& folder, const LoadOptions& options) {
    internal::require_provider(options.ep, options.device);
    auto manifest = read_manifest(folder);
    if (options.verify) verify_files(folder, manifest);
    auto config = internal::Json::object();
    if (manifest.generation_config) {
        const auto path = folder / *manifest.generation_config;
        config = internal::read_json(path);
        if (!config.is_object()) {
            throw ModelError(message(path.string(), "a JSON object", internal::shown(config), "re-run pop-export"));
        }
    }
    auto ignored = internal::unknown_settings(config);
    std::optional<internal::ByteLevelDecoder> decoder;
    if (manifest.tokenizer) decoder = internal::ByteLevelDecoder::open(folder / *manifest.tokenizer);
    const auto stop_strings = config.value("stop_strings", internal::Json());
    const bool has_stop_strings = !stop_strings.empty() && stop_strings != "";
    if (has_stop_strings && !decoder) ignored.emplace_back("stop_strings");
    auto sessions = internal::open_pair(folder, manifest, options);
    return Model(std::make_shared<const Impl>(Impl{folder, std::move(manifest), std::move(config), std::move(ignored),
                                                   std::move(decoder), std::move(sessions)}));
}

const std::filesystem::path& Model::folder() const { return impl_->folder; }
const Manifest& Model::manifest() const { return impl_->manifest; }
bool Model::decodes_text() const { return impl_->decoder.has_value(); }
const std::vector<std::string>& Model::ignored_settings() const { return impl_->ignored_settings; }

Answer Model::generate(const std::vector<std::int64_t>& prompt, const GenerateOptions& options,
                       const OnToken& on_token) const {
    impl_->check_ids(prompt);
    internal::Sequence sequence(impl_->sessions, impl_->manifest);
    return impl_->generate(sequence, prompt, options, on_token);
}

struct Conversation::Impl {
    std::shared_ptr<const Model::Impl> model;
    internal::Sequence sequence;
    std::vector<std::int64_t> pending;
};

Conversation Model::conversation() const {
    return Conversation(std::unique_ptr<Conversation::Impl>(
        new Conversation::Impl{impl_, internal::Sequence(impl_->sessions, impl_->manifest), {}}));
}

Conversation::Conversation(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Conversation::Conversation(Conversation&&) noexcept = default;
Conversation& Conversation::operator=(Conversation&&) noexcept = default;
Conversation::~Conversation() = default;

void Conversation::append(const std::vector<std::int64_t>& ids) {
    impl_->model->check_ids(ids);
    const auto num_new = impl_->pending.size() + ids.size();
    impl_->model->check_room(impl_->sequence.size() + static_cast<std::int64_t>(num_new));
    impl_->pending.insert(impl_->pending.end(), ids.begin(), ids.end());
}

Answer Conversation::generate(const GenerateOptions& options, const OnToken& on_token) {
    auto& [model, sequence, pending] = *impl_;
    if (pending.empty() && sequence.size() == 0) {
        throw UsageError(message("conversation", "at least one token", "none", "append some ids"));
    }
    // The turn is pending until it is in the sequence, which is what it was if reading it fails or is cancelled.
    const auto size_after_turn = sequence.size() + static_cast<std::int64_t>(pending.size());
    const auto forget_if_read = [&, &sequence = sequence, &pending = pending] {
        if (sequence.size() >= size_after_turn) pending.clear();
    };
    try {
        auto answer = model->generate(sequence, pending, options, on_token);
        forget_if_read();
        return answer;
    } catch (...) {
        forget_if_read();
        throw;
    }
}

void Conversation::rewind(std::int64_t position) {
    auto& [model, sequence, pending] = *impl_;
    if (position < 0 || position > sequence.size()) {
        const auto expected = "a position of 0.." + std::to_string(sequence.size());
        throw UsageError(message("rewind", expected, std::to_string(position), "give a position of the sequence"));
    }
    sequence.rewind(position);
    pending.clear();
}

std::vector<std::int64_t> Conversation::token_ids() const { return impl_->sequence.token_ids(); }

std::vector<Depth> Conversation::provenance() const { return impl_->sequence.depth(); }

}  // namespace pop
