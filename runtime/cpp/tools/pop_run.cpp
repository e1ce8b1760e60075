// `pop_run`: stream an answer from a bundle, with the flags and the JSON of the Python command `pop-run`.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "arguments.h"

namespace {

using Json = nlohmann::ordered_json;

// Cancels on Ctrl-C, within a run of a graph too; the second time, or before there is anything to cancel, it ends at
// once. Waiting for the signal in a thread is the way to do more than a handler may.
class Interrupts {
public:
    explicit Interrupts(const pop::Cancellation& cancellation) {
        sigset_t signals;
        sigemptyset(&signals);
        sigaddset(&signals, SIGINT);
        pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // the threads of the sessions inherit it
        std::thread([this, signals, cancellation] {
            int signal = 0;
            sigwait(&signals, &signal);
            if (!can_cancel_) _exit(130);
            cancellation.cancel();
            sigwait(&signals, &signal);
            _exit(130);
        }).detach();
    }
    void begin_to_cancel() { can_cancel_ = true; }

private:
    std::atomic<bool> can_cancel_{false};
};

const char* name_of(pop::StopReason reason) {
    switch (reason) {
        case pop::StopReason::end: return "end";
        case pop::StopReason::stop: return "stop";
        case pop::StopReason::length: return "length";
        case pop::StopReason::cancelled: return "cancelled";
    }
    return "";
}

const char* name_of(pop::Prefill prefill) { return prefill == pop::Prefill::pop ? "pop" : "full"; }

// Returns the ids of a text such as "5,6,7" or "5 6 7", with any white space.
std::vector<std::int64_t> parse_ids(const std::string& text) {
    const auto separates = [](char c) { return c == ',' || c == ' ' || (c >= '\t' && c <= '\r'); };
    std::vector<std::int64_t> ids;
    const auto* at = text.data();
    const auto* const stop = at + text.size();
    while (true) {
        at = std::find_if_not(at, stop, separates);
        if (at == stop) return ids;
        const auto [end, failed] = std::from_chars(at, stop, ids.emplace_back());
        if (failed != std::errc() || (end != stop && !separates(*end))) {
            throw pop::UsageError("--ids: expected whole numbers such as 5,6,7, found '" + text + "'");
        }
        at = end;
    }
}

// Refuses flags that contradict each other or would have no effect, as pop-run does.
void check_flags(const Arguments& arguments) {
    const auto refuse = [](const std::string& message) { throw pop::UsageError(message + "; leave one out"); };
    if (arguments.ids && arguments.system) refuse("--system: expected a prompt for the chat template, found --ids");
    if (arguments.ids && arguments.raw) refuse("--raw: expected a prompt of text, found --ids");
    const auto& options = arguments.generate;
    if (options.prefill == pop::Prefill::pop) return;
    const std::string no_windows = ": expected --prefill pop, found full, which has no windows";
    if (options.sink_tokens) refuse("--sink-tokens" + no_windows);
    if (options.boundary_tokens) refuse("--boundary-tokens" + no_windows);
}

std::vector<std::int64_t> prompt_of(const Arguments& arguments) {
    if (arguments.ids) return parse_ids(*arguments.ids);
    throw pop::UsageError(
        "prompt: expected --ids, found none; no C++ library gives the tokenizer's ids, get those of a text with "
        "pop-run --json");
}

template <typename Value>
Json or_null(const std::optional<Value>& value) {
    return value ? Json(*value) : Json();
}

// Returns the settings in force, with the names of `pop-run --json`.
Json json_of(const pop::Settings& settings) {
    const auto& sampling = settings.sampling;
    return {{"prefill", name_of(settings.prefill)},
            {"sink_tokens", settings.windows.sink_tokens},
            {"boundary_tokens", settings.windows.boundary_tokens},
            {"prefill_chunk_tokens", settings.prefill_chunk_tokens},
            {"do_sample", sampling.do_sample},
            {"temperature", sampling.temperature},
            {"top_k", sampling.top_k},
            {"top_p", sampling.top_p},
            {"repetition_penalty", sampling.repetition_penalty},
            {"seed", sampling.seed},
            {"min_p", sampling.min_p},
            {"max_new_tokens", settings.max_new_tokens},
            {"end_token_ids", settings.end_token_ids},
            {"stop", settings.stop},
            {"logprobs", or_null(settings.logprobs)},
            {"prompt_logprobs", settings.prompt_logprobs},
            {"threads", settings.threads}};
}

// Returns log-probability and alternatives of each new token; null unless asked for.
Json logprobs_of(const pop::Answer& answer) {
    if (!answer.settings.logprobs) return nullptr;
    auto rows = Json::array();
    for (const auto& token : answer.tokens) {
        rows.push_back({{"id", token.id}, {"logprob", or_null(token.logprob)}, {"likeliest", token.alternatives}});
    }
    return rows;
}

Json prompt_logprobs_of(const pop::Answer& answer) {
    if (!answer.settings.prompt_logprobs) return nullptr;
    auto row = Json::array();
    for (const auto& score : answer.prompt_logprobs) row.push_back(or_null(score));
    return row;
}

// Returns what --json prints; `text` is null without a tokenizer that is read.
Json result_of(const pop::Model& model, const pop::LoadOptions& load, const pop::Answer& answer) {
    const auto& stats = answer.stats;
    const auto& windows = answer.settings.windows;
    return {{"prompt_token_ids", answer.prompt_token_ids},
            {"new_token_ids", answer.token_ids},
            {"text", model.decodes_text() ? Json(answer.text()) : Json()},
            {"stop_reason", name_of(answer.stop_reason)},
            {"stop_string", answer.stop_string.empty() ? Json() : Json(answer.stop_string)},
            {"logprobs", logprobs_of(answer)},
            {"prompt_logprobs", prompt_logprobs_of(answer)},
            {"time_to_first_token_ms", or_null(stats.time_to_first_token_ms)},
            {"tokens_per_second", or_null(stats.tokens_per_second)},
            {"num_prompt_tokens", stats.num_prompt_tokens},
            {"num_past_tokens", stats.num_past_tokens},
            {"num_rewound_tokens", 0},  // a single turn never is
            {"num_pruned_tokens", stats.num_pruned_tokens},
            {"num_new_tokens", stats.num_new_tokens},
            {"prefill", name_of(answer.settings.prefill)},
            {"windows", {{"sink_tokens", windows.sink_tokens}, {"boundary_tokens", windows.boundary_tokens}}},
            {"settings", json_of(answer.settings)},
            {"ignored_settings", model.ignored_settings()},
            {"ep", load.ep},
            {"device", load.device}};
}

// Returns what --stats prints.
std::string stats_text(const pop::Answer& answer) {
    const auto& stats = answer.stats;
    std::ostringstream text;
    text.setf(std::ios::fixed);
    text.precision(1);
    const auto put = [&](const std::optional<double>& number, const char* unit) {
        if (number) {
            text << *number << unit;
        } else {
            text << "-";
        }
    };
    text << "time to first token  ";
    put(stats.time_to_first_token_ms, " ms");
    text << " (" << stats.num_prompt_tokens << " prompt tokens, " << stats.num_pruned_tokens
         << " through the pruned graph)\n"
         << "decode               ";
    put(stats.tokens_per_second, " tokens/s");
    text << " (" << stats.num_new_tokens << " new tokens, stopped by " << name_of(answer.stop_reason) << ")\n"
         << "settings            ";
    const auto settings = json_of(answer.settings);
    for (const auto& [name, value] : settings.items()) {
        text << ' ' << name << '=' << (value.is_string() ? value.get<std::string>() : value.dump());
    }
    return text.str();
}

// Prints what was asked for and will have no effect.
void print_notes(const pop::Model& model, const Arguments& arguments, const pop::SamplingSettings& sampling) {
    const auto note = [](const std::string& text) { std::cerr << "pop_run: note: " << text << '\n'; };
    for (const auto& name : model.ignored_settings()) {
        note("generation_config.json sets " + name + ", which pop_run does not apply");
    }
    if (sampling.do_sample) return;
    const auto& options = arguments.generate;
    const std::string why = " has no effect on greedy choice; give --temperature above 0";
    if (options.top_p) note("--top-p" + why);
    if (options.top_k) note("--top-k" + why);
    if (options.min_p) note("--min-p" + why);
    if (options.seed) note("--seed" + why);
}

// Throws if anything printed so far did not reach stdout: on a full disk, say, the answer is lost.
void flush_output() {
    if (std::cout.flush()) return;
    throw std::runtime_error(std::string("stdout: cannot write: ") + std::strerror(errno));
}

// Lets a closed stdout swallow what is printed, as in Python: a file opened later would take its number.
void cover_closed_output() {
    if (fcntl(STDOUT_FILENO, F_GETFD) >= 0) return;
    const int nowhere = open("/dev/null", O_WRONLY);
    if (nowhere >= 0 && nowhere != STDOUT_FILENO) dup2(nowhere, STDOUT_FILENO);
}

int run(const Arguments& arguments) {
    static Interrupts interrupts(arguments.generate.cancellation);  // outlives its thread
    check_flags(arguments);
    const auto prompt = prompt_of(arguments);
    const auto model = pop::Model::load(arguments.folder, arguments.load);
    interrupts.begin_to_cancel();
    const char* gap = "";
    const auto answer = model.generate(prompt, arguments.generate, [&](const pop::Token& token) {
        if (arguments.json) return;
        if (model.decodes_text()) {
            std::cout << token.text;
        } else {
            std::cout << gap << token.id;
            gap = ",";
        }
        flush_output();
    });
    print_notes(model, arguments, answer.settings.sampling);
    std::cout << (arguments.json ? result_of(model, arguments.load, answer).dump() : "") << '\n';
    flush_output();
    if (arguments.stats) std::cerr << stats_text(answer) << '\n';
    return answer.stop_reason == pop::StopReason::cancelled ? 130 : 0;
}

// Prints an error as one line, whatever a message repeats of the command line, and returns its exit code.
int fail(std::string message, int exit_code) {
    std::replace(message.begin(), message.end(), '\n', ' ');
    std::cerr << "pop_run: error: " << message << '\n';
    return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        cover_closed_output();
        const auto arguments = parse_arguments(argc, argv);
        if (arguments) return run(*arguments);
        flush_output();  // of --help
        return 0;
    } catch (const pop::Error& error) {
        return fail(error.what(), error.exit_code());
    } catch (const std::exception& error) {
        return fail(error.what(), 1);
    }
}
