#include <doctest/doctest.h>

#include <fstream>
#include <random>

#include "bundle.h"
#include "json_file.h"
#include "sampling.h"

namespace fs = std::filesystem;
using namespace pop;
using internal::Json;

namespace {

// A copy of the bundle's files in a folder of its own, which ends with it.
struct Copy {
    fs::path folder = fs::temp_directory_path() / ("pop-tests-" + std::to_string(std::random_device()()));
    Copy() { fs::copy(bundle_folder(), folder); }
    ~Copy() { fs::remove_all(folder); }
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    Json manifest() const { return internal::read_json(folder / "manifest.json"); }
    void write(const std::string& text) const { std::ofstream(folder / "manifest.json", std::ios::binary) << text; }
};

std::string refusal(const fs::path& folder) {
    try {
        verify_files(folder, read_manifest(folder));
    } catch (const ModelError& error) {
        CHECK(error.exit_code() == 3);
        return error.what();
    }
    return "";
}

Json segment(const char* graph, const Json& stages, const Json& hidden_in) {
    return {{"graph", graph}, {"stages", stages}, {"hidden_in", hidden_in}, {"hidden_out", nullptr}};
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a whole bundle is read and verified") {
    CHECK(refusal(bundle_folder()).empty());
    const auto manifest = read_manifest(bundle_folder());
    CHECK(manifest.vocab_size == 300);
    CHECK(manifest.plan.skipped_layers == std::vector<std::int64_t>{1, 2});
    CHECK(manifest.kv_layers.at(2).value_head_size == 16);
    CHECK(manifest.eos_token_ids == std::vector<std::int64_t>{257});
    CHECK_FALSE(manifest.tokenizer);
}

TEST_CASE("segments that are a chain are let through") {
    const Copy copy;
    auto content = copy.manifest();
    content["segments"] = {segment("prefill.onnx", {"prefill", "decode"}, nullptr),
                           segment("decode.onnx", {"decode"}, "hidden"), segment("decode.onnx", {"prefill"}, "hidden")};
    copy.write(content.dump());
    CHECK(refusal(copy.folder).empty());
    CHECK(read_manifest(copy.folder).segments.at(1).hidden_in == "hidden");
}

TEST_CASE("every key is checked") {
    const auto both = segment("decode.onnx", {"decode", "prefill"}, nullptr);
    // What is changed (null removes the key), and what the refusal says.
    const std::pair<Json, std::string> cases[] = {
        {{{"/format", "other"}}, "format: expected 'pop-bundle', found other"},
        {{{"/format_version", 2}}, "format_version: expected at most 1, found 2"},
        {{{"/format_version", "1"}}, "format_version: expected an integer, found 1"},
        {{{"/vocab_size", nullptr}}, "expected the key 'vocab_size', found none"},
        {{{"/vocab_size", true}}, "vocab_size: expected an integer, found true"},
        {{{"/vocab_size", 1e30}}, "vocab_size: expected an integer"},
        {{{"/vocab_size", 0}}, "vocab_size: expected at least 1, found 0"},
        {{{"/max_positions", 1}}, "max_positions: expected at least 2"},
        {{{"/plan/skipped_layers", {2, 1}}}, "plan.skipped_layers: expected ascending layers of 0..2, found [2,1]"},
        {{{"/plan/skipped_layers", {1, 1}}}, "plan.skipped_layers"},
        {{{"/plan/skipped_layers", {3}}}, "plan.skipped_layers"},
        {{{"/plan/num_layers", 4}}, "kv_layers: expected 4 layers, found 3"},
        {{{"/kv_layers/1/num_heads", 0}}, "kv_layers: expected sizes of at least 1"},
        {{{"/kv_layers/1/num_heads", "2"}}, "kv_layers[1], num_heads: expected an integer"},
        {{{"/kv_dtype", "float64"}}, "kv_dtype: expected one of float32, float16, bfloat16, found float64"},
        {{{"/segments", {segment("x.onnx", {"decode"}, nullptr)}}}, "found no entry for x.onnx"},
        {{{"/segments", {segment("decode.onnx", {"decode"}, nullptr)}}}, "segments: expected one that reads ids first"},
        {{{"/segments", {segment("decode.onnx", {"decode", "prefill"}, "hidden")}}}, "segments: expected one"},
        {{{"/segments", {segment("decode.onnx", {"decode", "other"}, nullptr)}}}, "segments: expected one"},
        {{{"/segments", {both, both}}}, "segments: expected one that reads ids first"},
        {{{"/segments", {{{"graph", "decode.onnx"}}}}}, "segments[0]: expected the key 'stages', found none"},
        {{{"/segments", {segment("decode.onnx", {1}, nullptr)}}}, "segments[0], stages[0]: expected a string"},
        {{{"/dialect", "other"}}, "dialect: expected one of ort, standard, found other"},
        {{{"/past_key", "past"}}, "expected names with {layer} once and no other brace, found [\"past\"]"},
        {{{"/present_value", "{layer}{x}"}}, "expected names with {layer} once"},
        {{{"/windows/boundary_tokens", 0}}, "windows.boundary_tokens: expected at least 1"},
        {{{"/windows/sink_tokens", -1}}, "windows.sink_tokens: expected at least 0"},
        {{{"/windows", {1, 2}}}, "windows: expected an object"},
        {{{"/tokenizer", "tokenizer.json"}}, "files: expected every file the manifest names, found no entry for token"},
        {{{"/decode_graph", "../decode.onnx"}}, "found no entry for ../decode.onnx"},
        {{{"/tools", {{"torch", 2}}}}, "tools, torch: expected a string"},
        {{{"/eos_token_ids", {1, "2"}}}, "eos_token_ids[1]: expected an integer"},
    };
    const Copy copy;
    const auto whole = copy.manifest();
    for (const auto& [changes, expected] : cases) {
        auto content = whole;
        for (const auto& [pointer, value] : changes.items()) {
            if (value.is_null()) {
                content.erase(pointer.substr(1));
            } else {
                content[Json::json_pointer(pointer)] = value;
            }
        }
        copy.write(content.dump());
        const auto found = refusal(copy.folder);
        CHECK_MESSAGE(mentions(found, expected), found);
        CHECK(found.find('\n') == std::string::npos);
    }
}

TEST_CASE("a path that leaves the folder is refused") {
    const Copy copy;
    const auto whole = copy.manifest();
    const std::vector<std::string> names{
        "../x", "a/../../x", "/etc/passwd",
        "\\x",  "..\\x",     "a\\..\\x",
        "C:x",  "c:\\x",     "",
        ".",    "./",        std::string("decode.onnx\0x", 13)};  // which the system would read as decode.onnx
    for (const auto& name : names) {
        auto content = whole;
        content["files"][name] = content["files"]["decode.onnx"];
        copy.write(content.dump());
        CHECK_MESSAGE(mentions(refusal(copy.folder), "files: expected paths inside the folder"), name);
    }
    auto content = whole;
    fs::create_directory(copy.folder / "a..b");
    fs::copy(copy.folder / "decode.onnx", copy.folder / "a..b" / "..c");
    content["files"]["a..b/..c"] = content["files"]["decode.onnx"];
    copy.write(content.dump());
    CHECK(refusal(copy.folder).empty());
}

TEST_CASE("missing and altered files are named") {
    const Copy copy;
    const auto weights = copy.folder / "weights.bin";
    {
        std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(1000);
        file.put('x');
    }
    CHECK(mentions(refusal(copy.folder), "(altered)"));
    fs::resize_file(weights, fs::file_size(weights) - 1);
    CHECK(mentions(refusal(copy.folder), "bytes, found"));
    fs::remove(weights);
    CHECK(mentions(refusal(copy.folder), "weights.bin: expected a file of"));
    fs::create_directory(weights);
    CHECK(mentions(refusal(copy.folder), "weights.bin: expected a file of"));
    fs::remove(copy.folder / "manifest.json");
    CHECK(mentions(refusal(copy.folder), "expected a bundle's manifest, found none"));
    CHECK(mentions(refusal(copy.folder / "none"), "expected a bundle folder, found none"));
}

TEST_CASE("what is not JSON is refused") {
    const Copy copy;
    for (const auto& text : {std::string(), std::string("{"), std::string("[1,]"), std::string("\xEF\xBB\xBF{}"),
                             std::string("{\"a\": \"\xFF\"}"), std::string(100000, '['), std::string("null")}) {
        copy.write(text);
        CHECK_FALSE(refusal(copy.folder).empty());
    }
}

TEST_CASE("10,000 damaged manifests are read or refused") {
    const Copy copy;
    const auto whole = copy.manifest().dump();
    std::uint64_t state = 3;
    int num_refused = 0;
    for (int round = 0; round < 10000; ++round) {
        auto damaged = whole;
        for (auto left = 1 + internal::split_mix_64(state) % 4; left > 0; --left) {
            const auto at = internal::split_mix_64(state) % damaged.size();
            switch (internal::split_mix_64(state) % 3) {
                case 0: damaged[at] = static_cast<char>(internal::split_mix_64(state)); break;
                case 1: damaged.erase(at, 1 + internal::split_mix_64(state) % 20); break;
                default: damaged.insert(at, damaged.substr(internal::split_mix_64(state) % damaged.size(), 20));
            }
        }
        copy.write(damaged);
        try {
            read_manifest(copy.folder);
        } catch (const ModelError&) {
            ++num_refused;
        }
    }
    CHECK(num_refused > 5000);
}
