#include "graph_file.h"

#include <charconv>

#include "pop/error.h"
#include "text_format.h"

namespace pop::internal {

namespace {

// Walks over the fields of one protobuf message.
class WireReader {
public:
    WireReader(std::string_view bytes, const std::string& place) : bytes_(bytes), place_(place) {}

    // Moves to the next field and returns whether there is one; its value is then in `number` or `content`.
    bool next() {
        if (at_ == bytes_.size()) return false;
        const auto key = varint();
        field = key >> 3U;
        content = {};
        switch (key & 7U) {
            case 0: number = varint(); break;
            case 1: content = take(8); break;
            case 2: content = take(varint()); break;
            case 5: content = take(4); break;
            default: refuse();
        }
        return true;
    }
    WireReader inside() const { return {content, place_}; }
    bool done() const { return at_ == bytes_.size(); }
    std::uint64_t varint() {
        std::uint64_t value = 0;
        for (unsigned shift = 0; shift < 64; shift += 7) {
            if (at_ == bytes_.size()) refuse();
            const auto byte = static_cast<unsigned char>(bytes_[at_++]);
            value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
            if (byte < 0x80) return value;
        }
        refuse();
    }

    std::uint64_t field = 0;
    std::uint64_t number = 0;  // of a varint field
    std::string_view content;  // of a field of bytes

private:
    std::string_view take(std::uint64_t size) {
        if (size > bytes_.size() - at_) refuse();
        const auto part = bytes_.substr(at_, static_cast<std::size_t>(size));
        at_ += part.size();
        return part;
    }
    [[noreturn]] void refuse() const {
        throw ModelError(message(place_, "an ONNX graph", "bytes that are not one", "re-run pop-export"));
    }

    std::string_view bytes_;
    const std::string& place_;
    std::size_t at_ = 0;
};

// Returns the number that a text is, or throws ModelError.
std::uint64_t parse_number(std::string_view text, const std::string& place, const std::string& what) {
    std::uint64_t number = 0;
    const auto* const stop = text.data() + text.size();
    const auto [end, failed] = std::from_chars(text.data(), stop, number);
    if (failed != std::errc() || end != stop) {
        throw ModelError(message(place + ", " + what, "a whole number", one_line(text), "re-run pop-export"));
    }
    return number;
}

// Reads one TensorProto; returns whether its data is external.
bool read_tensor(WireReader tensor, const std::string& place, ExternalTensor& found) {
    bool is_external = false;
    bool has_length = false;
    while (tensor.next()) {
        switch (tensor.field) {
            case 1:  // dims, packed or one by one
                if (tensor.content.empty()) found.dims.push_back(static_cast<std::int64_t>(tensor.number));
                for (auto dims = tensor.inside(); !dims.done();) {
                    found.dims.push_back(static_cast<std::int64_t>(dims.varint()));
                }
                break;
            case 2: found.data_type = static_cast<std::int32_t>(tensor.number); break;
            case 8: found.name = tensor.content; break;
            case 13: {  // external_data: a StringStringEntryProto
                std::string_view key;
                std::string_view value;
                for (auto entry = tensor.inside(); entry.next();) {
                    if (entry.field == 1) key = entry.content;
                    if (entry.field == 2) value = entry.content;
                }
                if (key == "location") found.location = value;
                if (key == "offset") found.offset = parse_number(value, place, "offset");
                if (key == "length") {
                    found.length = parse_number(value, place, "length");
                    has_length = true;
                }
                break;
            }
            case 14: is_external = tensor.number == 1; break;  // data_location
            default: break;
        }
    }
    if (is_external && (found.location.empty() || !has_length)) {
        const auto where = place + ", " + one_line(found.name);
        throw ModelError(message(where, "location and length of external data", "none", "re-run pop-export"));
    }
    return is_external;
}

}  // namespace

std::vector<ExternalTensor> external_tensors(std::string_view model, const std::string& place) {
    constexpr std::uint64_t kModelGraph = 7;
    constexpr std::uint64_t kGraphInitializer = 5;
    std::vector<ExternalTensor> tensors;
    for (WireReader fields(model, place); fields.next();) {
        if (fields.field != kModelGraph) continue;
        for (auto graph = fields.inside(); graph.next();) {
            if (graph.field != kGraphInitializer) continue;
            ExternalTensor tensor;
            if (read_tensor(graph.inside(), place, tensor)) tensors.push_back(std::move(tensor));
        }
    }
    return tensors;
}

}  // namespace pop::internal
