#include "sessions.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "graph_check.h"
#include "text_format.h"

namespace pop::internal {

namespace {

constexpr int threads_per_core = 16;  // the most that may be asked for, as in `pop_runtime.threads`

// When the threads of a session spin for work instead of waiting to be woken.
enum class Spin { never, during_runs, always };

// Returns the settings of a session, those of `pop_runtime.sessions`, which gives the measurements behind them:
// segments run one after another, so their threads spin while theirs runs. Of whole graphs, prefill threads do not
// spin, so that they cannot take cores from the decode steps that follow; decode threads do, since a step is short and
// waking a thread is not.
//
// packed: repack weights for faster kernels.
Ort::SessionOptions session_options(int threads, Spin spin, bool packed) {
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
    options.SetIntraOpNumThreads(threads);
    options.SetInterOpNumThreads(1);
    options.DisableMemPattern();  // kept per input shape, but the mask is longer at every step: never used again
    options.AddConfigEntry("session.use_env_allocators", "1");
    options.AddConfigEntry("session.intra_op.allow_spinning", spin == Spin::never ? "0" : "1");
    if (spin == Spin::during_runs) {
        options.AddConfigEntry("session.force_spinning_stop", "1");
        options.AddConfigEntry("session.intra_op.spin_duration_us", "1000");  // those of a session just opened, too
    }
    if (!packed) options.AddConfigEntry("session.disable_prepacking", "1");
    return options;
}

// Returns whether weights are stored in small integers: "int8-...", "int4-...".
bool is_quantized(const Manifest& manifest) { return manifest.precision.rfind("int", 0) == 0; }

SessionPair new_pair(const std::filesystem::path& folder, const Manifest& manifest, int threads) {
    return {std::make_unique<SharedWeights>(folder, manifest), threads, {}, {}, {}, false};
}

// Returns a link whose session is still to be opened.
Link closed_link(const std::string& graph, const std::optional<std::string>& hidden_in = {},
                 const std::optional<std::string>& hidden_out = {}) {
    Link link;
    link.graph = graph;
    link.hidden_in = hidden_in;
    link.hidden_out = hidden_out;
    return link;
}

// Opens the sessions of all links, each with its options. One is opened by a single thread, so as many at once as a
// session has threads.
void open_links(SessionPair& pair, const std::filesystem::path& folder, std::vector<Ort::SessionOptions> options) {
    for (std::size_t index = 0; index < pair.links.size(); ++index) {
        const auto& graph = pair.links[index].graph;
        std::error_code ignored;
        if (!std::filesystem::is_regular_file(folder / graph, ignored)) {
            throw ModelError(message((folder / graph).string(), "an ONNX graph", "none", "re-run pop-export"));
        }
        pair.weights->give(graph, options[index]);
    }
    std::atomic<std::size_t> num_begun{0};
    const auto open_some = [&] {
        for (auto index = num_begun++; index < pair.links.size(); index = num_begun++) {
            auto& link = pair.links[index];
            try {
                link.session = pair.weights->open(environment(), link.graph, options[index]);
            } catch (const Ort::Exception& error) {
                throw backend_error(link.graph, "a graph that ONNX Runtime loads", error);
            }
            link.inputs = values_of(link.session, true);
            link.outputs = values_of(link.session, false);
        }
    };
    std::vector<std::future<void>> openers;
    while (openers.size() < std::min(static_cast<std::size_t>(pair.threads), pair.links.size())) {
        openers.push_back(std::async(open_some));
    }
    for (auto& opener : openers) opener.get();
    pair.weights->release_pages();
}

void check_chains(const SessionPair& pair, const std::filesystem::path& folder, const Manifest& manifest) {
    check_chain(pair.decode, manifest, folder, manifest.decode_graph, true);
    check_chain(pair.prefill, manifest, folder, manifest.prefill_graph, false);
}

}  // namespace

BackendError backend_error(const std::string& place, const std::string& expected, const std::exception& error) {
    const auto next = "re-run pop-export, or change onnxruntime " + Ort::GetVersionString();
    return BackendError(message(place, expected, one_line(error.what(), 400), next));
}

const Ort::Env& environment() {
    // Made once and never let go: to register a pool again replaces the one there is, under sessions that are being
    // opened in other threads (ONNX Runtime 1.32).
    static const auto* const env = [] {
        auto* made = new Ort::Env(ORT_LOGGING_LEVEL_ERROR, "pop");
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        try {
            made->CreateAndRegisterAllocator(memory, Ort::ArenaCfg(0, -1, -1, -1));  // the defaults
        } catch (const Ort::Exception&) {
            // The environment is the same for all code of the process, and has a pool already.
        }
        return made;
    }();
    return *env;
}

int visible_cores() {
#if defined(__linux__)
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(CPU_COUNT(&cores), 1);
#endif
    return static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
}

SessionPair open_pair(const std::filesystem::path& folder, const Manifest& manifest, const LoadOptions& options) {
    if (options.threads && *options.threads < 1) {
        throw UsageError(message("threads", "at least 1", std::to_string(*options.threads),
                                 "leave it out to use the visible cores"));
    }
    const auto most = threads_per_core * visible_cores();
    if (options.threads && *options.threads > most) {
        throw UsageError(message(
            "threads",
            "at most " + std::to_string(most) + ", " + std::to_string(threads_per_core) + " for each visible core",
            std::to_string(*options.threads), "lower it or leave it out"));
    }
    const auto threads = options.threads.value_or(visible_cores());
    const bool leaves_unpacked = options.low_memory && !is_quantized(manifest);
    if (!manifest.segments.empty() && !leaves_unpacked) return open_segments(folder, manifest, threads);
    return open_graphs(folder, manifest, threads, options.low_memory);
}

SessionPair open_segments(const std::filesystem::path& folder, const Manifest& manifest, int threads) {
    auto pair = new_pair(folder, manifest, threads);
    std::vector<Ort::SessionOptions> options;
    for (const auto& segment : manifest.segments) {
        pair.links.push_back(closed_link(segment.graph, segment.hidden_in, segment.hidden_out));
        options.push_back(session_options(threads, Spin::during_runs, true));
    }
    open_links(pair, folder, std::move(options));
    for (std::size_t index = 0; index < pair.links.size(); ++index) {
        const auto& stages = manifest.segments[index].stages;
        const auto serves = [&](const char* stage) { return std::count(stages.begin(), stages.end(), stage) > 0; };
        if (serves("prefill")) pair.prefill.push_back(&pair.links[index]);
        if (serves("decode")) pair.decode.push_back(&pair.links[index]);
    }
    check_chains(pair, folder, manifest);
    pair.can_join = have_same_places(pair.prefill, pair.decode);
    return pair;
}

SessionPair open_graphs(const std::filesystem::path& folder, const Manifest& manifest, int threads, bool low_memory) {
    auto pair = new_pair(folder, manifest, threads);
    pair.links.push_back(closed_link(manifest.decode_graph));
    pair.links.push_back(closed_link(manifest.prefill_graph));
    std::vector<Ort::SessionOptions> options;
    // The fast kernels of quantised weights exist for packed weights alone: a step would take 40 times as long.
    options.push_back(session_options(threads, Spin::always, !low_memory || is_quantized(manifest)));
    options.push_back(session_options(threads, Spin::never, !low_memory));
    open_links(pair, folder, std::move(options));
    pair.decode = {&pair.links[0]};
    pair.prefill = {&pair.links[1]};
    check_chains(pair, folder, manifest);
    return pair;
}

}  // namespace pop::internal
