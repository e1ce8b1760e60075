// Prints memory and time of both graphs as the library opens them, as one JSON object: session_memory.py in C++.
//
//     session_memory BUNDLE [threads]
//
// Memory in MB is Pss after a prefill of 128 tokens and a step, less what the process had before: of the decode session
// alone and of the pair. Times in ms are CPU times of the process, minima over rounds. `make test-cpp` builds it;
// benchmarks/cpp_against_python.py runs it.

#include <algorithm>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>

#include "sequence.h"

using namespace pop;
using namespace pop::internal;

namespace {

constexpr std::int64_t kPrefillTokens = 512;

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

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 2) return 2;
    const std::filesystem::path folder = argv[1];
    const int threads = argc < 3 ? 1 : std::stoi(argv[2]);
    const auto manifest = read_manifest(folder);
    const auto env = make_env();
    const Ort::RunOptions options;
    const std::vector<std::int64_t> ids(kPrefillTokens, 5);
    const KvCache cache(manifest, kPrefillTokens + 32);
    const auto use = [&](BoundGraph& graph) { graph.run(ids.data(), 128, 128, options); };
    const auto before = pss_mb();

    SharedWeights weights(folder, manifest);
    auto settings = session_options(threads, true, true);
    const auto decode = weights.open(env, manifest.decode_graph, settings);
    weights.release_pages();
    BoundGraph full(decode, manifest, cache, manifest.decode_graph, true);
    const auto step = [&](std::int64_t total) {
        full.run(ids.data(), 1, total, options);
        full.logits();
    };
    use(full);
    step(129);
    const auto one = pss_mb() - before;

    settings = session_options(threads, false, true);
    const auto prefill = weights.open(env, manifest.prefill_graph, settings);
    weights.release_pages();
    BoundGraph pruned(prefill, manifest, cache, manifest.prefill_graph, false);
    use(pruned);
    step(129);
    std::cout << "{\"one_mb\": " << one << ", \"mb\": " << pss_mb() - before;

    const auto read = [&](BoundGraph& graph) { graph.run(ids.data(), ids.size(), kPrefillTokens, options); };
    std::cout << ", \"prefill\": " << least_ms(3, [&] { read(pruned); });
    std::cout << ", \"full\": " << least_ms(3, [&] { read(full); });
    read(pruned);
    std::int64_t total = kPrefillTokens;
    std::cout << ", \"step\": " << least_ms(16, [&] { step(++total); }) << "}\n";
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
