#include "arguments.h"

#include <CLI/CLI.hpp>
#include <map>

namespace {

constexpr const char* kExamples = R"(examples:
  pop_run out/smollm2 --ids 5,6,7                            token ids in, text out
  pop_run out/smollm2 --ids 5,6,7 --json                     one JSON object
  pop_run out/smollm2 --ids 5,6,7 --temperature 0.8 --top-p 0.95 --seed 7
  pop_run out/smollm2 --ids 5,6,7 --stats                    time to first token, tokens per second, settings
  pop_run out/smollm2 --ids 5,6,7 --prefill full             the exact model, to compare with

exit codes: 0 done, 2 usage, 3 bundle, 4 ONNX Runtime, 130 interrupted)";

}  // namespace

std::optional<Arguments> parse_arguments(int argc, char** argv) {
    Arguments arguments;
    auto& generate = arguments.generate;
    bool no_verify = false;
    const std::map<std::string, pop::Prefill> prefills{{"pop", pop::Prefill::pop}, {"full", pop::Prefill::full}};

    CLI::App app("Stream tokens from a bundle made by pop-export.", "pop_run");
    app.footer(kExamples);
    app.set_version_flag("--version", "pop_run " POP_VERSION, "print the version");
    app.add_option("dir", arguments.folder, "the bundle's folder")->required();
    auto* prompt = app.add_option("--prompt", arguments.prompt, "the prompt as text")->type_name("TEXT");
    auto* ids = app.add_option("--ids", arguments.ids, "the prompt as token ids")->type_name("N,N,...");
    ids->excludes(prompt);
    app.add_flag("--raw", arguments.raw, "do not apply the chat template");
    app.add_option("--system", arguments.system, "a system message before the prompt")->type_name("TEXT");
    app.add_option("--prefill-chunk-tokens", generate.prefill_chunk_tokens, "read so many at once (default 512)");
    auto* stop = app.add_option("--stop", "end before this text; repeat for several")
                     ->type_name("TEXT")
                     ->expected(1)
                     ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    auto* logprobs =
        app.add_option("--logprobs", generate.logprobs, "with --json: log-probabilities, of N likeliest too");
    auto* prompt_logprobs = app.add_flag("--prompt-logprobs", generate.prompt_logprobs,
                                         "with --json and --prefill full: the prompt tokens' too, slowly");
    app.add_option("--max-new-tokens", generate.max_new_tokens, "stop after so many tokens (default 256)");
    app.add_option("--prefill", generate.prefill, "pruned or exact reading of the prompt: pop or full (default pop)")
        ->transform(CLI::CheckedTransformer(prefills))
        ->type_name("HOW");
    app.add_option("--temperature", generate.temperature, "0 is greedy; default: generation_config.json");
    app.add_option("--top-p", generate.top_p, "keep the likeliest tokens up to this probability");
    app.add_option("--top-k", generate.top_k, "keep the N likeliest tokens; 0 is no limit");
    app.add_option("--min-p", generate.min_p, "drop tokens below this part of the likeliest one's probability");
    app.add_option("--repetition-penalty", generate.repetition_penalty, "above 1 makes seen tokens less likely");
    app.add_option("--seed", generate.seed, "same seed, same text");
    app.add_option("--sink-tokens", generate.sink_tokens, "first tokens read in full; default: the bundle's");
    app.add_option("--boundary-tokens", generate.boundary_tokens, "last tokens read in full; default: the bundle's");
    app.add_flag("--ignore-eos", generate.ignore_eos, "do not stop at an end token");
    app.add_option("--threads", arguments.load.threads, "threads (default: the cores this process may use)");
    app.add_option("--ep", arguments.load.ep, "execution provider: cpu; others are refused (default cpu)")
        ->type_name("EP");
    app.add_option("--device", arguments.load.device, "which device of it (default 0)");
    app.add_flag("--low-memory", arguments.load.low_memory,
                 "leave weights that are not quantised as they lie in the file");
    app.add_flag("--stats", arguments.stats, "print speed and the settings in force on stderr");
    auto* json = app.add_flag("--json", arguments.json, "print one JSON object instead of text");
    logprobs->needs(json);
    prompt_logprobs->needs(json);
    app.add_flag("--no-verify", no_verify, "do not compare the files' sha256 with the manifest");
    try {
        app.parse(argc, argv);
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
