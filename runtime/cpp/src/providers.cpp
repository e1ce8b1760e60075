#include "providers.h"

#include <algorithm>
#include <vector>

#include "pop/error.h"
#include "text_format.h"

namespace pop::internal {

namespace {

struct Provider {
    const char* ep;
    const char* install;  // what brings it to `pop-run`
};

// The providers of `pop_runtime.providers`, in its order. That one runs them all; here the CPU is the only one: ONNX
// Runtime tells which provider got a node from 1.24 on, and this library builds on the headers of 1.21, with which a
// node left to the CPU would go unnoticed.
const std::vector<Provider>& providers() {
    static const std::vector<Provider> kProviders{
        {"cpu", "pip install 'pop-export[cpu]'"},
        {"cuda", "pip install 'pop-export[gpu]' on a machine with an NVIDIA driver"},
        {"tensorrt", "pip install 'pop-export[gpu]' and NVIDIA's TensorRT 10.15 or newer"},
        {"nv-tensorrt-rtx", "pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx"},
        {"openvino", "pip install onnxruntime onnxruntime-ep-openvino"},
    };
    return kProviders;
}

}  // namespace

void require_provider(const std::string& ep, int device) {
    const auto found =
        std::find_if(providers().begin(), providers().end(), [&](const Provider& row) { return row.ep == ep; });
    if (found == providers().end()) {
        std::vector<std::string> names;
        for (const auto& row : providers()) names.emplace_back(row.ep);
        throw UsageError(message("--ep", "one of " + join(names, ", "), one_line(ep), "change it"));
    }
    const bool is_cpu = ep == "cpu";
    if (device < 0 || (is_cpu && device != 0)) {
        throw UsageError(message("--device", is_cpu ? "0" : "0 or more", std::to_string(device), "change it"));
    }
    if (is_cpu) return;
    throw BackendError(message("--ep " + ep + " --device " + std::to_string(device),
                               "cpu, the one provider of this runtime", ep,
                               "run it with pop-run: " + std::string(found->install)));
}

}  // namespace pop::internal
