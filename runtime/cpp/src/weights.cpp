#include "weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "graph_file.h"
#include "json_file.h"
#include "text_format.h"

namespace pop::internal {

MappedFile::MappedFile(const std::filesystem::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status{};
    if (file < 0 || ::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
        const std::string found = file < 0 ? std::strerror(errno) : "something else";
        if (file >= 0) ::close(file);
        throw ModelError(message(path.string(), "a readable file", found, "re-run pop-export"));
    }
    size_ = static_cast<std::size_t>(status.st_size);
    void* mapped = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int failed = errno;
    ::close(file);  // the mapping stays
    if (mapped == MAP_FAILED) {
        throw BackendError(message(path.string(), "a file to map", std::strerror(failed), "free some memory"));
    }
    data_ = static_cast<char*>(mapped);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

void MappedFile::release_pages() const noexcept {
    if (data_ != nullptr) ::madvise(data_, size_, MADV_DONTNEED);
}

void SharedWeights::ReleaseContainer::operator()(OrtPrepackedWeightsContainer* container) const noexcept {
    Ort::GetApi().ReleasePrepackedWeightsContainer(container);
}

SharedWeights::SharedWeights(const std::filesystem::path& folder, const Manifest& manifest)
    : folder_(folder), name_(manifest.weights), file_(folder / manifest.weights) {
    OrtPrepackedWeightsContainer* container = nullptr;
    Ort::ThrowOnError(Ort::GetApi().CreatePrepackedWeightsContainer(&container));
    container_.reset(container);
}

void SharedWeights::give(const std::string& graph, Ort::SessionOptions& options) {
    const auto path = folder_ / graph;
    const MappedFile model(path);
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    for (const auto& tensor : external_tensors(model.bytes(), path.string())) {
        const auto place = path.string() + ", " + one_line(tensor.name);
        if (tensor.location != name_) {
            throw ModelError(message(place, "data in " + name_, one_line(tensor.location), "re-run pop-export"));
        }
        const auto size = file_.bytes().size();
        if (tensor.length > size || tensor.offset > size - tensor.length) {
            const auto found = std::to_string(tensor.offset) + " + " + std::to_string(tensor.length);
            throw ModelError(message(place, "data within " + std::to_string(size) + " bytes of " + name_, found,
                                     "re-run pop-export"));
        }
        // The session only reads: the API has no const form.
        auto* const data = const_cast<char*>(file_.bytes().data() + tensor.offset);  // NOLINT
        try {
            values_.push_back(Ort::Value::CreateTensor(memory, data, static_cast<std::size_t>(tensor.length),
                                                       tensor.dims.data(), tensor.dims.size(),
                                                       static_cast<ONNXTensorElementDataType>(tensor.data_type)));
            options.AddInitializer(tensor.name.c_str(), values_.back());
        } catch (const Ort::Exception& error) {
            throw backend_error(place, "a tensor that ONNX Runtime takes", error);
        }
    }
}

Ort::Session SharedWeights::open(const Ort::Env& env, const std::string& graph,
                                 const Ort::SessionOptions& options) const {
    return {env, (folder_ / graph).c_str(), options, container_.get()};
}

}  // namespace pop::internal
