#include <doctest/doctest.h>

#include "bundle.h"
#include "graph_file.h"
#include "json_file.h"
#include "sampling.h"

using namespace pop::internal;

namespace {

std::string bytes_of(const char* name) {
    std::string bytes;
    auto* const file = std::fopen((bundle_folder() / name).c_str(), "rb");
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) bytes += static_cast<char>(c);
    std::fclose(file);
    return bytes;
}

}  // namespace

TEST_CASE("the external weights of a graph are found with name, type, shape and place") {
    const auto tensors = external_tensors(bytes_of("decode.onnx"), "decode.onnx");
    CHECK(tensors.size() == 3 + 6 * 3);  // embedding, positions, head; six matrices a layer
    bool found = false;
    for (const auto& tensor : tensors) {
        CHECK(tensor.location == "weights.bin");
        CHECK(tensor.data_type == 1);
        CHECK(static_cast<std::int64_t>(tensor.length) == 4 * tensor.dims.at(0) * tensor.dims.at(1));
        CHECK(tensor.offset % 4096 == 0);
        found = found || (tensor.name == "embed" && tensor.dims == std::vector<std::int64_t>{300, 32});
    }
    CHECK(found);
    CHECK(external_tensors(bytes_of("prefill.onnx"), "prefill.onnx").size() < tensors.size());
}

TEST_CASE("a cut graph file is refused") {
    const auto whole = bytes_of("decode.onnx");
    CHECK_THROWS_AS(external_tensors(whole.substr(0, whole.size() / 2), "decode.onnx"), pop::ModelError);
    CHECK(external_tensors("", "empty").empty());
}

TEST_CASE("10,000 damaged graph files are read or refused") {
    const auto whole = bytes_of("decode.onnx");
    std::uint64_t state = 5;
    int num_refused = 0;
    for (int round = 0; round < 10000; ++round) {
        auto damaged = whole;
        for (auto left = 1 + split_mix_64(state) % 8; left > 0; --left) {
            damaged[split_mix_64(state) % damaged.size()] = static_cast<char>(split_mix_64(state));
        }
        if (split_mix_64(state) % 4 == 0) damaged.resize(split_mix_64(state) % damaged.size());
        try {
            external_tensors(damaged, "decode.onnx");
        } catch (const pop::ModelError&) {
            ++num_refused;
        }
    }
    CHECK(num_refused > 2000);
}
