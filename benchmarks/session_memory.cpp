// Prints the memory of the decode session alone and of the pair, as the library opens them, as one JSON object in MB.
//
//     session_memory BUNDLE [packed|unpacked]
//
// Memory is Pss after a prefill of 128 tokens and a step, what the process had before taken off: the measure of
// session_memory.py. `make test-cpp` builds it; benchmarks/cpp_against_python.py runs it.

#include <fstream>
#include <iostream>

#include "sequence.h"

using namespace pop;
using namespace pop::internal;

namespace {

double pss_mb() {
    std::ifstream rows("/proc/self/smaps_rollup");
    for (std::string word; rows >> word;) {
        double kb = 0;
        if (word == "Pss:" && rows >> kb) return kb / 1024;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 2) return 2;
    const std::filesystem::path folder = argv[1];
    const bool packed = argc < 3 || std::string(argv[2]) == "packed";
    const auto manifest = read_manifest(folder);
    const auto env = make_env();
    const Ort::RunOptions options;
    const std::vector<std::int64_t> ids(128, 5);

    const auto before = pss_mb();
    SharedWeights weights(folder, manifest);
    const KvCache cache(manifest, 160);
    const auto use = [&](BoundGraph& graph) {
        graph.run(ids.data(), ids.size(), 128, options);
        graph.run(ids.data(), 1, 129, options);
    };
    auto settings = session_options(1, true, packed);
    const auto decode = weights.open(env, manifest.decode_graph, settings);
    weights.release_pages();
    BoundGraph full(decode, manifest, cache, manifest.decode_graph, true);
    use(full);
    const auto one = pss_mb() - before;

    settings = session_options(1, false, packed);
    const auto prefill = weights.open(env, manifest.prefill_graph, settings);
    weights.release_pages();
    BoundGraph pruned(prefill, manifest, cache, manifest.prefill_graph, false);
    use(pruned);
    use(full);
    const auto pair = pss_mb() - before;
    std::cout << "{\"one_mb\": " << one << ", \"pair_mb\": " << pair << "}\n";
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
