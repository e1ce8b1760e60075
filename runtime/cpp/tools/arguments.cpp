#include "arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace {

constexpr const char* kExamples = R"(examples:
  pop_run out/smollm2 --ids 5,6,7                            token ids in, text out
  pop_run out/smollm2 --ids 5,6,7 --json                     one JSON object
  pop_run out/smollm2 --ids 5,6,7 --temperature 0.8 --top-p 0.95 --seed 7
  pop_run out/smollm2 --ids 5,6,7 --stats                    time to first token, tokens per second, settings
  pop_run out/smollm2 --ids 5,6,7 --prefill full             the exact model, to compare with

exit codes: 0 done, 1 stdout cannot be written, 2 usage, 3 bundle, 4 ONNX Runtime, 130 interrupted)";

// Refuses the value of a flag.
[[noreturn]] void refuse(const std::string& flag, const std::string& expected, const std::string& found) {
    throw pop::UsageError(flag + ": expected " + expected + ", found '" + found + "'; change it or leave it out");
}

// Returns the text of a number without what int() and float() of Python allow beside it: white space around it, a plus
// sign before it, underscores between digits.
std::string bare_number(std::string_view text) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    constexpr std::string_view kSpace = " \t\n\v\f\r";
    text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
    text = text.substr(0, text.find_last_not_of(kSpace) + 1);
    if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
    std::string bare;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const bool within = at > 0 && at + 1 < text.size() && is_digit(text[at - 1]) && is_digit(text[at + 1]);
        if (text[at] != '_' || !within) bare += text[at];
    }
    return bare;
}

// Returns the number that a text is to Python's int(), or throws UsageError.
template <typename Integer>
Integer parse_number(const std::string& flag, const std::string& text, Integer /*kind*/) {
    using Limits = std::numeric_limits<Integer>;
    const auto bare = bare_number(text);
    const bool is_negative = !bare.empty() && bare[0] == '-';
    const auto* const stop = bare.data() + bare.size();
    std::uint64_t size = 0;
    const auto [end, failed] = std::from_chars(bare.data() + is_negative, stop, size);  // takes no sign, no prefix
    const auto highest = static_cast<std::uint64_t>(Limits::max());
    const auto limit = !is_negative ? highest : Limits::is_signed ? highest + 1 : 0;
    if (failed != std::errc() || end != stop || size > limit) {
        refuse(flag, "a whole number of " + std::to_string(Limits::min()) + ".." + std::to_string(Limits::max()), text);
    }
    return static_cast<Integer>(is_negative ? 0 - size : size);
}

// Returns the number that a text is to Python's float(), or throws UsageError. Too large a one is infinite, too small a
// one 0, as there.
double parse_number(const std::string& flag, const std::string& text, double /*kind*/) {
    const auto bare = bare_number(text);
    char* end = nullptr;
    const auto number = std::strtod(bare.c_str(), &end);
    const bool is_foreign = bare.find_first_of("xX(") != std::string::npos;  // 0x1p3, nan(1): to strtod alone
    if (bare.empty() || is_foreign || end != bare.c_str() + bare.size()) refuse(flag, "a number", text);
    return number;
}

template <typename Value>
Value value_in(const Value&);
template <typename Value>
Value value_in(const std::optional<Value>&);

// Adds a flag that takes a number. All that are given have to be numbers, the last counts.
//
// CLI11's own conversion takes an empty text for none, a leading zero for octal, and 0x3, 0b11 and 1'0 too.
template <typename Variable>
CLI::Option* add_number(CLI::App& app, const std::string& flag, Variable& variable, const std::string& help) {
    using Value = decltype(value_in(variable));
    const auto take = [flag, &variable](const CLI::results_t& texts) {
        for (const auto& text : texts) variable = parse_number(flag, text, Value());
        return true;
    };
    return app.add_option(flag, take, help)
        ->type_name(std::is_floating_point_v<Value> ? "X" : "N")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

// Adds an option that takes a text as it is, the last one given.
template <typename Variable>
CLI::Option* add_text(CLI::App& app, const std::string& name, Variable& variable, const std::string& help) {
    const auto take = [&variable](const CLI::results_t& texts) {
        variable = texts.front();
        return true;
    };
    return app.add_option(name, take, help)->type_name("TEXT")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

// Returns the arguments with --flag=value as two: CLI11 would take what follows `--flag=` for its value, and read
// --json=0 as no --json. Throws UsageError: a value for a flag that takes none, or a flag where a value has to be.
std::vector<std::string> split_arguments(const CLI::App& app, int argc, char** argv) {
    std::vector<std::string> arguments;
    std::string waiting;  // the flag before, if it takes a value
    for (int index = 1; index < argc; ++index) {
        const std::string argument = argv[index];
        const auto equals = argument.find('=');
        const auto flag = argument.substr(0, equals);
        const auto* const option = flag.rfind("--", 0) == 0 ? app.get_option_no_throw(flag) : nullptr;
        const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
        if (option != nullptr && !waiting.empty()) refuse(waiting, "a value", argument);
        waiting = takes_value && equals == std::string::npos ? flag : "";
        if (option == nullptr || equals == std::string::npos) {
            arguments.push_back(argument);
        } else if (takes_value) {
            arguments.insert(arguments.end(), {flag, argument.substr(equals + 1)});
        } else {
            refuse(flag, "no value", argument.substr(equals + 1));
        }
    }
    return arguments;
}

}  // namespace

std::optional<Arguments> parse_arguments(int argc, char** argv) {
    Arguments arguments;
    auto& generate = arguments.generate;
    bool no_verify = false;
    const auto take_prefill = [&](const CLI::results_t& names) {
        for (const auto& name : names) {
            if (name != "pop" && name != "full") refuse("--prefill", "pop or full", name);
            generate.prefill = name == "pop" ? pop::Prefill::pop : pop::Prefill::full;
        }
        return true;
    };

    CLI::App app("Stream tokens from a bundle made by pop-export.", "pop_run");
    app.footer(kExamples);
    app.set_version_flag("--version", "pop_run " POP_VERSION, "print the version");
    add_text(app, "dir", arguments.folder, "the bundle's folder")->required();
    auto* prompt = add_text(app, "--prompt", arguments.prompt, "the prompt as text");
    auto* ids = add_text(app, "--ids", arguments.ids, "the prompt as token ids")->type_name("N,N,...");
    ids->excludes(prompt);
    app.add_flag("--raw", arguments.raw, "do not apply the chat template");
    add_text(app, "--system", arguments.system, "a system message before the prompt");
    add_number(app, "--prefill-chunk-tokens", generate.prefill_chunk_tokens, "read so many at once (default 512)");
    auto* stop = app.add_option("--stop", "end before this text; repeat for several")
                     ->type_name("TEXT")
                     ->expected(1)
                     ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    auto* logprobs =
        add_number(app, "--logprobs", generate.logprobs, "with --json: log-probabilities, of N likeliest too");
    auto* prompt_logprobs = app.add_flag("--prompt-logprobs", generate.prompt_logprobs,
                                         "with --json and --prefill full: the prompt tokens' too, slowly");
    add_number(app, "--max-new-tokens", generate.max_new_tokens, "stop after so many tokens (default 256)");
    app.add_option("--prefill", take_prefill, "pruned or exact reading of the prompt: pop or full (default pop)")
        ->type_name("HOW")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add_number(app, "--temperature", generate.temperature, "0 is greedy; default: generation_config.json");
    add_number(app, "--top-p", generate.top_p, "keep the likeliest tokens up to this probability");
    add_number(app, "--top-k", generate.top_k, "keep the N likeliest tokens; 0 is no limit");
    add_number(app, "--min-p", generate.min_p, "drop tokens below this part of the likeliest one's probability");
    add_number(app, "--repetition-penalty", generate.repetition_penalty, "above 1 makes seen tokens less likely");
    add_number(app, "--seed", generate.seed, "same seed, same text");
    add_number(app, "--sink-tokens", generate.sink_tokens, "first tokens read in full; default: the bundle's");
    add_number(app, "--boundary-tokens", generate.boundary_tokens, "last tokens read in full; default: the bundle's");
    app.add_flag("--ignore-eos", generate.ignore_eos, "do not stop at an end token");
    add_number(app, "--threads", arguments.load.threads, "threads (default: the cores this process may use)");
    add_text(app, "--ep", arguments.load.ep, "execution provider: cpu; others are refused (default cpu)")
        ->type_name("EP");
    add_number(app, "--device", arguments.load.device, "which device of it (default 0)");
    app.add_flag("--low-memory", arguments.load.low_memory,
                 "leave weights that are not quantised as they lie in the file");
    app.add_flag("--stats", arguments.stats, "print speed and the settings in force on stderr");
    auto* json = app.add_flag("--json", arguments.json, "print one JSON object instead of text");
    logprobs->needs(json);
    prompt_logprobs->needs(json);
    app.add_flag("--no-verify", no_verify, "do not compare the files' sha256 with the manifest");
    auto given = split_arguments(app, argc, argv);
    std::reverse(given.begin(), given.end());  // CLI11 takes them from the end
    try {
        app.parse(given);
    } catch (const CLI::Success& told) {  // help or version
        app.exit(told);
        return std::nullopt;
    } catch (const CLI::ParseError& error) {
        throw pop::UsageError(std::string(error.what()) + "; see pop_run --help");
    }
    arguments.load.verify = !no_verify;
    // The texts as they were given: converted ones take {} for an empty list, which CLI11 writes as {} and %%.
    if (stop->count() > 0) generate.stop = stop->results();
    return arguments;
}
