#include "pop/manifest.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <set>
#include <string_view>

#include "json_file.h"
#include "pop/error.h"
#include "text_format.h"

namespace pop {

namespace {

using internal::as_integer;
using internal::as_list;
using internal::as_object;
using internal::as_string;
using internal::Json;
using internal::message;

constexpr const char* kFormat = "pop-bundle";
constexpr std::int64_t kFormatVersion = 1;
constexpr const char* kRemedy = "re-run pop-export";

// The fields of one JSON object, each read into its member.
class Fields {
public:
    Fields(const Json& value, std::string place) : value_(as_object(value, place)), place_(std::move(place)) {}

    // Returns the value of a key that has to be there.
    const Json& operator[](const std::string& key) const {
        const auto found = value_.find(key);
        if (found == value_.end()) throw ModelError(message(place_, "the key '" + key + "'", "none", kRemedy));
        return *found;
    }
    bool has(const std::string& key) const { return value_.contains(key); }
    std::string place(const std::string& key) const { return place_ + ", " + key; }

    std::int64_t integer(const std::string& key) const { return as_integer((*this)[key], place(key)); }
    std::string string(const std::string& key) const { return as_string((*this)[key], place(key)); }
    std::vector<std::int64_t> integers(const std::string& key) const {
        std::vector<std::int64_t> numbers;
        for (const auto& item : as_list((*this)[key], place(key))) {
            numbers.push_back(as_integer(item, place(key) + "[" + std::to_string(numbers.size()) + "]"));
        }
        return numbers;
    }
    std::vector<std::string> strings(const std::string& key) const {
        std::vector<std::string> texts;
        for (const auto& item : as_list((*this)[key], place(key))) {
            texts.push_back(as_string(item, place(key) + "[" + std::to_string(texts.size()) + "]"));
        }
        return texts;
    }
    // The next four leave what they would set as it is if the key is missing.
    void integer_if_there(const std::string& key, std::int64_t& number) const {
        if (has(key)) number = integer(key);
    }
    void integers_if_there(const std::string& key, std::vector<std::int64_t>& numbers) const {
        if (has(key)) numbers = integers(key);
    }
    void string_if_there(const std::string& key, std::string& text) const {
        if (has(key)) text = string(key);
    }
    void name_if_there(const std::string& key, std::optional<std::string>& name) const {
        if (has(key)) name = optional_string(key);
    }
    std::optional<std::int64_t> optional_integer(const std::string& key) const {
        if ((*this)[key].is_null()) return std::nullopt;
        return integer(key);
    }
    std::optional<std::string> optional_string(const std::string& key) const {
        if ((*this)[key].is_null()) return std::nullopt;
        return string(key);
    }

private:
    const Json& value_;
    std::string place_;
};

// Returns whether a name, read as a POSIX or a Windows path, is a relative path without `..`.
bool stays_inside(const std::string& name) {
    if (name.find('\0') != std::string::npos) return false;  // the system would see another, shorter name
    if (name.empty() || name.front() == '/' || name.front() == '\\') return false;
    if (name.size() > 1 && name[1] == ':' && std::isalpha(static_cast<unsigned char>(name[0])) != 0) return false;
    bool has_part = false;
    for (std::size_t start = 0; start <= name.size();) {
        const auto stop = std::min(name.find_first_of("/\\", start), name.size());
        const auto part = std::string_view(name).substr(start, stop - start);
        if (part == "..") return false;
        has_part = has_part || (!part.empty() && part != ".");
        start = stop + 1;
    }
    return has_part;
}

// Returns whether a name has a place for a layer's number, and no other brace.
bool numbers_layers(const std::string& name) {
    const auto at = name.find("{layer}");
    return at != std::string::npos && std::count(name.begin(), name.end(), '{') == 1 &&
           std::count(name.begin(), name.end(), '}') == 1;
}

// Returns whether in each stage the first segment alone reads no hidden states.
bool is_chain(const std::vector<Segment>& segments) {
    std::map<std::string, int> num_read{{"prefill", 0}, {"decode", 0}};
    for (const auto& segment : segments) {
        for (const auto& stage : std::set<std::string>(segment.stages.begin(), segment.stages.end())) {
            const auto found = num_read.find(stage);
            if (found == num_read.end() || (found->second++ == 0) == segment.hidden_in.has_value()) return false;
        }
    }
    return segments.empty() || (num_read["prefill"] > 0 && num_read["decode"] > 0);
}

Manifest parse_manifest(const Json& content, const std::string& place) {
    const Fields fields(content, place);
    Manifest manifest;
    as_object(fields["model"], fields.place("model"));
    manifest.vocab_size = fields.integer("vocab_size");
    manifest.max_positions = fields.integer("max_positions");

    const Fields plan(fields["plan"], fields.place("plan"));
    manifest.plan.num_layers = plan.integer("num_layers");
    manifest.plan.skipped_layers = plan.integers("skipped_layers");
    manifest.plan.chosen_by = plan.string("chosen_by");
    plan.integers_if_there("refitted_layers", manifest.plan.refitted_layers);
    plan.integers_if_there("surrogate_layers", manifest.plan.surrogate_layers);

    const Fields windows(fields["windows"], fields.place("windows"));
    windows.integer_if_there("sink_tokens", manifest.windows.sink_tokens);
    windows.integer_if_there("boundary_tokens", manifest.windows.boundary_tokens);

    manifest.kv_dtype = fields.string("kv_dtype");
    for (const auto& item : as_list(fields["kv_layers"], fields.place("kv_layers"))) {
        const auto index = std::to_string(manifest.kv_layers.size());
        const Fields layer(item, fields.place("kv_layers") + "[" + index + "]");
        manifest.kv_layers.push_back(
            {layer.integer("num_heads"), layer.integer("key_head_size"), layer.integer("value_head_size")});
    }
    manifest.precision = fields.string("precision");
    manifest.eos_token_ids = fields.integers("eos_token_ids");
    manifest.bos_token_id = fields.optional_integer("bos_token_id");
    manifest.pad_token_id = fields.optional_integer("pad_token_id");
    manifest.tokenizer = fields.optional_string("tokenizer");
    manifest.chat_template = fields.optional_string("chat_template");
    manifest.generation_config = fields.optional_string("generation_config");
    fields.name_if_there("tokenizer_config", manifest.tokenizer_config);
    if (fields.has("tools")) {
        for (const auto& [tool, version] : as_object(fields["tools"], fields.place("tools")).items()) {
            as_string(version, fields.place("tools") + ", " + tool);
        }
    }
    if (fields.has("files")) {
        for (const auto& [name, item] : as_object(fields["files"], fields.place("files")).items()) {
            const Fields entry(item, fields.place("files") + ", " + name);
            manifest.files[name] = {entry.integer("bytes"), entry.string("sha256")};
        }
    }
    fields.string_if_there("prefill_graph", manifest.prefill_graph);
    fields.string_if_there("decode_graph", manifest.decode_graph);
    fields.string_if_there("weights", manifest.weights);
    fields.string_if_there("input_ids", manifest.input_ids);
    fields.string_if_there("attention_mask", manifest.attention_mask);
    fields.string_if_there("logits", manifest.logits);
    fields.string_if_there("past_key", manifest.past_key);
    fields.string_if_there("past_value", manifest.past_value);
    fields.string_if_there("present_key", manifest.present_key);
    fields.string_if_there("present_value", manifest.present_value);
    fields.string_if_there("dialect", manifest.dialect);
    if (fields.has("segments")) {
        for (const auto& item : as_list(fields["segments"], fields.place("segments"))) {
            const Fields segment(item, fields.place("segments") + "[" + std::to_string(manifest.segments.size()) + "]");
            manifest.segments.push_back({segment.string("graph"), segment.strings("stages"),
                                         segment.optional_string("hidden_in"), segment.optional_string("hidden_out")});
        }
    }
    return manifest;
}

// Checks what types cannot say: value ranges, counts that must agree, and that every path stays inside the folder.
void check_manifest(const Manifest& manifest, const std::string& place) {
    const auto refuse_unless = [&](bool holds, const char* key, const std::string& expected, const auto& found) {
        if (holds) return;
        throw ModelError(message(place + ", " + key, expected, internal::shown(Json(found)), kRemedy));
    };
    std::vector<std::string> outside;
    for (const auto& [name, entry] : manifest.files) {
        if (!stays_inside(name)) outside.push_back(name);
    }
    refuse_unless(outside.empty(), "files", "paths inside the folder", outside);

    std::vector<std::string> unlisted;
    for (const auto& segment : manifest.segments) {
        if (manifest.files.count(segment.graph) == 0) unlisted.push_back(segment.graph);
    }
    for (const std::optional<std::string>& name :
         {std::optional(manifest.prefill_graph), std::optional(manifest.decode_graph), std::optional(manifest.weights),
          manifest.tokenizer, manifest.tokenizer_config, manifest.chat_template, manifest.generation_config}) {
        if (name && manifest.files.count(*name) == 0) unlisted.push_back(*name);
    }
    const auto missing = "no entry for " + internal::join(unlisted, ", ");
    refuse_unless(unlisted.empty(), "files", "every file the manifest names", missing);

    std::vector<std::string> odd;
    for (const auto& pattern : {manifest.past_key, manifest.past_value, manifest.present_key, manifest.present_value}) {
        if (!numbers_layers(pattern)) odd.push_back(pattern);
    }
    refuse_unless(odd.empty(), "past_key, present_key, ...", "names with {layer} once and no other brace", odd);

    refuse_unless(is_chain(manifest.segments), "segments", "one that reads ids first in each stage", "another order");

    const auto& kind = manifest.kv_dtype;
    const bool known = kind == "float32" || kind == "float16" || kind == "bfloat16";
    refuse_unless(known, "kv_dtype", "one of float32, float16, bfloat16", kind);

    const auto& dialect = manifest.dialect;
    refuse_unless(dialect == "ort" || dialect == "standard", "dialect", "one of ort, standard", dialect);

    const auto& plan = manifest.plan;
    const auto num_layers = std::to_string(plan.num_layers);
    const bool agrees = static_cast<std::int64_t>(manifest.kv_layers.size()) == plan.num_layers;
    refuse_unless(agrees, "kv_layers", num_layers + " layers", manifest.kv_layers.size());
    const bool sized = plan.num_layers > 0 &&
                       std::all_of(manifest.kv_layers.begin(), manifest.kv_layers.end(), [](const KvLayer& layer) {
                           return layer.num_heads > 0 && layer.key_head_size > 0 && layer.value_head_size > 0;
                       });
    refuse_unless(sized, "kv_layers", "sizes of at least 1", "a smaller one");

    const auto& skipped = plan.skipped_layers;
    const bool ascending = std::adjacent_find(skipped.begin(), skipped.end(), std::greater_equal<>()) == skipped.end();
    const bool in_range = skipped.empty() || (skipped.front() >= 0 && skipped.back() < plan.num_layers);
    const auto layers = "ascending layers of 0.." + std::to_string(plan.num_layers - 1);
    refuse_unless(ascending && in_range, "plan.skipped_layers", layers, skipped);

    const auto& windows = manifest.windows;
    refuse_unless(windows.boundary_tokens >= 1, "windows.boundary_tokens", "at least 1", windows.boundary_tokens);
    refuse_unless(windows.sink_tokens >= 0, "windows.sink_tokens", "at least 0", windows.sink_tokens);
    refuse_unless(manifest.vocab_size >= 1, "vocab_size", "at least 1", manifest.vocab_size);
    refuse_unless(manifest.max_positions >= 2, "max_positions", "at least 2", manifest.max_positions);
}

}  // namespace

Manifest read_manifest(const std::filesystem::path& folder) {
    const auto make_one = " --out " + folder.string();
    std::error_code ignored;
    if (!std::filesystem::is_directory(folder, ignored)) {
        throw ModelError(message(folder.string(), "a bundle folder", "none", "make one with pop-export" + make_one));
    }
    const auto path = folder / "manifest.json";
    const auto place = path.string();
    if (!std::filesystem::is_regular_file(path, ignored)) {
        throw ModelError(message(place, "a bundle's manifest", "none", kRemedy + make_one));
    }
    const auto content = internal::read_json(path);
    const auto format = content.is_object() ? content.value("format", Json()) : content;
    if (format != kFormat) {
        const auto expected = "'" + std::string(kFormat) + "'";
        throw ModelError(
            message(place + ", format", expected, internal::shown(format), "give a folder made by pop-export"));
    }
    const auto version = as_integer(content.value("format_version", Json()), place + ", format_version");
    if (version > kFormatVersion) {
        throw ModelError(message(place + ", format_version", "at most " + std::to_string(kFormatVersion),
                                 std::to_string(version), "update the pop-export package"));
    }
    auto manifest = parse_manifest(content, place);
    check_manifest(manifest, place);
    return manifest;
}

}  // namespace pop
