#include <doctest/doctest.h>

#include <algorithm>

#include "bundle.h"
#include "sequence.h"

using namespace pop;
using namespace pop::internal;
using Logits = std::vector<float>;

namespace {

constexpr Windows kWindows{2, 3};

SessionPair open(const char* precision = "float32", bool low_memory = false, int threads = 1) {
    auto manifest = read_manifest(bundle_folder());
    manifest.precision = precision;
    LoadOptions options;
    options.threads = threads;
    options.low_memory = low_memory;
    return open_pair(bundle_folder(), manifest, options);
}

Sequence sequence_over(const SessionPair& pair) {
    Sequence sequence(pair, bundle().manifest());
    sequence.reserve(64);
    return sequence;
}

Logits append(Sequence& sequence, std::size_t count, std::int64_t chunk_tokens = 512, std::uint64_t seed = 0) {
    return sequence.append(some_ids(count, seed), kWindows, chunk_tokens, Ort::RunOptions());
}

// Returns the message of the error of a turn of 20 tokens that is cancelled before it begins.
std::string message_of_cancelled(const SessionPair& pair) {
    auto sequence = sequence_over(pair);
    Ort::RunOptions options;
    options.SetTerminate();
    try {
        sequence.append(some_ids(20), kWindows, 512, options);
    } catch (const BackendError& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("segments are used but to leave weights that are not quantised in the file") {
    CHECK(open("fp32").links.size() == 5);
    CHECK(open("fp16").links.size() == 5);
    CHECK(open("int8-block32-symmetric").links.size() == 5);
    CHECK(open("int4-block32-gptq").links.size() == 5);
    CHECK(open("fp32", true).links.size() == 2);
    CHECK(open("int8-block32-symmetric", true).links.size() == 5);
    CHECK(open("int4-block32-gptq", true).links.size() == 5);
}

TEST_CASE("a kept segment is the same session in both chains, and several are opened at once") {
    const auto pair = open("fp32", false, 3);
    REQUIRE(pair.prefill.size() == 3);
    REQUIRE(pair.decode.size() == 3);
    CHECK(pair.prefill[0] == pair.decode[0]);
    CHECK(pair.prefill[1] != pair.decode[1]);
    CHECK(pair.can_join);
    CHECK_FALSE(open("fp32", true).can_join);
}

TEST_CASE("a joined turn gives what its stretches give one after another, and what the whole graphs give") {
    const auto segments = open();
    auto one_by_one = open();
    one_by_one.can_join = false;
    const auto graphs = open_graphs(bundle_folder(), bundle().manifest(), 1, false);
    for (const std::int64_t chunk_tokens : {5, 512}) {
        auto joined = sequence_over(segments);
        auto apart = sequence_over(one_by_one);
        auto whole = sequence_over(graphs);
        for (const std::size_t count : {21U, 1U, 9U}) {  // later turns have no sink
            const auto found = append(joined, count, chunk_tokens, count);
            for (auto* other : {&apart, &whole}) {
                const auto wanted = append(*other, count, chunk_tokens, count);
                for (std::size_t id = 0; id < found.size(); ++id) {
                    CHECK(found[id] == doctest::Approx(wanted[id]).epsilon(1e-4));
                }
                CHECK(joined.depth() == other->depth());
                other->accept(7);
            }
            joined.accept(7);
        }
    }
}

TEST_CASE("a kept segment reads a whole chunk at once where both stages are joined") {
    auto pair = open();
    CHECK(message_of_cancelled(pair).find("segment-0-kept.onnx: expected a run over 20 tokens, 20 in all") == 0);
    pair.can_join = false;
    CHECK(message_of_cancelled(pair).find("segment-0-kept.onnx: expected a run over 2 tokens, 2 in all") == 0);
}

TEST_CASE("a turn that fails half way through a joined chunk is undone") {
    auto pair = open();
    auto sequence = sequence_over(pair);
    auto fresh = sequence_over(pair);
    append(sequence, 8);
    append(fresh, 8);
    const auto is_full = [](const Link& link) { return link.graph == "segment-1-full.onnx"; };
    auto& size = std::find_if(pair.links.begin(), pair.links.end(), is_full)->outputs.at("hidden_2").shape.back();
    size /= 2;  // the kept segment has written its K and V when this one meets hidden states of a wrong size
    CHECK_THROWS_AS(append(sequence, 12, 512, 1), BackendError);
    size *= 2;
    CHECK(sequence.size() == 8);
    CHECK(sequence.num_cached() == 8);
    CHECK(sequence.depth() == fresh.depth());
    CHECK(append(sequence, 12, 512, 1) == append(fresh, 12, 512, 1));
    CHECK(sequence.step(Ort::RunOptions()) == fresh.step(Ort::RunOptions()));
}

TEST_CASE("chains that hand on hidden states at different places are not joined") {
    const ValueInfo hidden{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {-1, -1, 4}};
    const auto link = [&](const char* in, const char* out) {
        Link made;
        if (in != nullptr) made.hidden_in = in;
        if (out != nullptr) made.hidden_out = out;
        if (out != nullptr) made.outputs[out] = hidden;
        return made;
    };
    const auto first = link(nullptr, "a");
    const auto full = link("a", "b");
    const auto skipped = link("a", nullptr);
    const auto last = link("b", nullptr);
    const auto silent = link(nullptr, nullptr);
    CHECK(have_same_places({&first, &skipped, &last}, {&first, &full, &last}));
    CHECK(have_same_places({&silent}, {&silent}));
    CHECK_FALSE(have_same_places({&first, &last}, {&first, &full, &last}));
    CHECK_FALSE(have_same_places({&silent, &skipped, &last}, {&first, &full, &last}));
    CHECK_FALSE(have_same_places({&first, &skipped, &full}, {&first, &full, &last}));
    auto wider = link("a", "b");
    wider.outputs["b"].shape.back() = 8;
    CHECK_FALSE(have_same_places({&first, &wider, &last}, {&first, &full, &last}));
}
