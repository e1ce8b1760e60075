// `manifest.json`: the contract between an export and everything that runs it. docs/bundle.md describes each field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace pop {

// Shape of one layer's K and V buffers, which are [B, num_heads, S_max, head_size] each.
struct KvLayer {
    std::int64_t num_heads = 0;
    std::int64_t key_head_size = 0;
    std::int64_t value_head_size = 0;
};

// Which layers the prefill graph leaves out, and how the choice was made.
struct Plan {
    std::int64_t num_layers = 0;
    std::vector<std::int64_t> skipped_layers;  // ascending
    std::string chosen_by;                     // "gates", "search" or "user"
    std::vector<std::int64_t> refitted_layers;
    std::vector<std::int64_t> surrogate_layers;
};

// How many tokens at the start of a sequence and at the end of each turn run at full depth.
struct Windows {
    std::int64_t sink_tokens = 0;
    std::int64_t boundary_tokens = 1;  // at least 1: the last prompt token predicts the first new one
};

// A part of one or both graphs as a graph of its own, over the same weights.
struct Segment {
    std::string graph;                // file name
    std::vector<std::string> stages;  // "prefill", "decode" or both
    std::optional<std::string> hidden_in;
    std::optional<std::string> hidden_out;
};

// Size and sha256 (lower-case hex) of one file of the bundle.
struct FileEntry {
    std::int64_t bytes = 0;
    std::string sha256;
};

// Everything a runtime has to know about a bundle.
struct Manifest {
    std::int64_t vocab_size = 0;     // rows of the head: the last axis of `logits`
    std::int64_t max_positions = 0;  // longest sequence, prompt and new tokens together
    Plan plan;
    Windows windows;
    std::string kv_dtype;  // "float32", "float16" or "bfloat16"
    std::vector<KvLayer> kv_layers;
    std::string precision;  // of the weights, as "fp32" or "int4-block32-gptq"
    std::vector<std::int64_t> eos_token_ids;
    std::optional<std::int64_t> bos_token_id;
    std::optional<std::int64_t> pad_token_id;
    std::optional<std::string> tokenizer;  // file names, as are the next three
    std::optional<std::string> chat_template;
    std::optional<std::string> generation_config;
    std::optional<std::string> tokenizer_config;
    std::map<std::string, FileEntry> files;  // by name, relative to the folder
    std::string prefill_graph = "prefill.onnx";
    std::string decode_graph = "decode.onnx";
    std::string weights = "weights.bin";
    std::string input_ids = "input_ids";
    std::string attention_mask = "attention_mask";
    std::string logits = "logits";
    std::string past_key = "past_key_values.{layer}.key";  // "{layer}" stands for the number
    std::string past_value = "past_key_values.{layer}.value";
    std::string present_key = "present.{layer}.key";
    std::string present_value = "present.{layer}.value";
    std::string dialect = "ort";    // of the graphs' operators: "ort" or "standard"
    std::vector<Segment> segments;  // both graphs again, in the order in which they run
};

// Returns the manifest of the bundle in `folder`. Keys it does not know are let through, so that a bundle of a later
// minor version still reads.
//
// Throws ModelError: no folder, no manifest, not JSON, another format or a newer version, a key that is missing or of
// the wrong type, values that contradict each other, or a path that leaves the folder.
Manifest read_manifest(const std::filesystem::path& folder);

// Compares size and sha256 of every file that the manifest lists.
//
// Throws ModelError: the first file that is missing, of another size, altered or unreadable.
void verify_files(const std::filesystem::path& folder, const Manifest& manifest);

}  // namespace pop
