// Prints memory and time of the sessions of a bundle as one JSON object: session_memory.py in C++, with its cases.
//
//     session_memory BUNDLE "decode graph alone" | "two graphs" | "two graphs, low memory" | "segments" [threads]
//
// Memory in MB is Pss after a prefill of 128 tokens and a step, less what the process had before. Loading is wall time;
// the other times are CPU times of the process, minima over rounds: of 512 tokens through each graph, of a whole turn
// of 128 and of 1024 tokens with the bundle's windows, and of a step. `make test-cpp` builds it;
// benchmarks/cpp_against_python.py runs it.

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>

#include "sequence.h"

using namespace pop;
using namespace pop::internal;

namespace {

constexpr std::int64_t kPrefillTokens = 512;
constexpr std::int64_t kChunkTokens = 512;  // the default of GenerateOptions

double pss_mb() {
    std::ifstream rows("/proc/self/smaps_rollup");
    for (std::string word; rows >> word;) {
        double kb = 0;
        if (word == "Pss:" && rows >> kb) return kb * 1024 / 1e6;
    }
    return 0;
}

// Returns the least CPU time of several calls.
double least_ms(int rounds, const std::function<void()>& action) {
    auto least = 1e300;
    for (int round = 0; round < rounds; ++round) {
        const auto start = std::clock();
        action();
        least = std::min(least, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
    }
    return least;
}

SessionPair open_case(const std::string& name, const std::filesystem::path& folder, Manifest manifest, int threads) {
    if (name == "segments") return open_segments(folder, manifest, threads);
    if (name == "decode graph alone") {  // as both graphs
        manifest.segments = {{manifest.decode_graph, {"prefill", "decode"}, {}, {}}};
        return open_segments(folder, manifest, threads);
    }
    if (name == "two graphs" || name == "two graphs, low memory") {
        return open_graphs(folder, manifest, threads, name != "two graphs");
    }
    throw UsageError(name + ": expected a case of session_memory.cpp");
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 3) return 2;
    const std::filesystem::path folder = argv[1];
    const auto manifest = read_manifest(folder);
    const Ort::RunOptions options;
    const std::vector<std::int64_t> ids(1024, 5);
    environment();  // what ONNX Runtime takes for itself counts for nobody
    const auto before = pss_mb();
    const auto started = std::chrono::steady_clock::now();
    const auto pair = open_case(argv[2], folder, manifest, argc < 4 ? 1 : std::stoi(argv[3]));
    const std::chrono::duration<double, std::milli> load = std::chrono::steady_clock::now() - started;
    {
        const KvCache cache(manifest, kPrefillTokens + 32);
        BoundGraph pruned(pair.prefill, manifest, cache, false);
        BoundGraph full(pair.decode, manifest, cache, true);
        const auto read = [&](BoundGraph& graph, std::int64_t count) {
            graph.run({ids.data(), count, count}, options);
        };
        const auto step = [&](std::int64_t total) {
            full.run({ids.data(), 1, total}, options);
            full.logits();
        };
        for (auto* graph : {&full, &pruned}) {
            read(*graph, 128);
            step(129);
        }
        std::cout << "{\"mb\": " << pss_mb() - before << ", \"load\": " << load.count();
        std::cout << ", \"prefill\": " << least_ms(3, [&] { read(pruned, kPrefillTokens); });
        std::cout << ", \"full\": " << least_ms(3, [&] { read(full, kPrefillTokens); });
        read(pruned, kPrefillTokens);
        std::int64_t total = kPrefillTokens;
        std::cout << ", \"step\": " << least_ms(16, [&] { step(++total); });
    }
    Sequence sequence(pair, manifest);
    sequence.reserve(1024);
    for (const int count : {128, 1024}) {
        const auto turn = [&] {
            sequence.rewind(0);
            sequence.append({ids.begin(), ids.begin() + count}, manifest.windows, kChunkTokens, options);
        };
        std::cout << ", \"turn_" << count << "\": " << least_ms(3, turn);
    }
    std::cout << "}\n";
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
