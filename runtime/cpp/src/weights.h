// One copy of the weights for all sessions of a bundle.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "ort.h"
#include "pop/manifest.h"

namespace pop::internal {

// A file mapped read-only into memory. Throws ModelError: it cannot be opened or mapped.
class MappedFile {
public:
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::string_view bytes() const noexcept { return {data_, size_}; }

    // Gives the pages back to the system; they are read again if they are touched.
    void release_pages() const noexcept;

private:
    char* data_ = nullptr;
    std::size_t size_ = 0;
};

// Gives the weights in the mapped file to sessions, and keeps what they pack them into, so that a weight which several
// graphs use is packed once. Has to outlive the sessions.
class SharedWeights {
public:
    // Throws ModelError: the weights file is missing.
    SharedWeights(const std::filesystem::path& folder, const Manifest& manifest);

    // Lets the session of a graph take its weights from here.
    //
    // Throws ModelError: the graph's external data is not in the weights file. BackendError: ONNX Runtime refuses the
    // type, the shape or the size of a tensor, or a second one of a name.
    void give(const std::string& graph, Ort::SessionOptions& options);

    // Returns a session for a graph whose weights were given to `options`. From any number of threads.
    //
    // Throws Ort::Exception.
    Ort::Session open(const Ort::Env& env, const std::string& graph, const Ort::SessionOptions& options) const;

    // Gives back the pages that packing has read. What is used as it lies in the file comes back when it is used.
    void release_pages() const noexcept { file_.release_pages(); }

private:
    struct ReleaseContainer {
        void operator()(OrtPrepackedWeightsContainer* container) const noexcept;
    };

    std::filesystem::path folder_;
    std::string name_;
    MappedFile file_;
    std::unique_ptr<OrtPrepackedWeightsContainer, ReleaseContainer> container_;
    std::vector<Ort::Value> values_;  // over the mapped bytes
};

}  // namespace pop::internal
