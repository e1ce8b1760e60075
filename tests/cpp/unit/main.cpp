#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <iostream>

#include "bundle.h"
#include "sampling.h"

namespace {
std::filesystem::path folder;
}

const std::filesystem::path& bundle_folder() { return folder; }

const pop::Model& bundle() {
    static const auto model = [] {
        pop::LoadOptions options;
        options.threads = 1;
        return pop::Model::load(folder, options);
    }();
    return model;
}

std::vector<std::int64_t> some_ids(std::size_t count, std::uint64_t seed) {
    std::vector<std::int64_t> ids;
    while (ids.size() < count) ids.push_back(static_cast<std::int64_t>(pop::internal::split_mix_64(seed) % 250));
    return ids;
}

int main(int argc, char** argv) {
    if (argc < 2) {
        std::cerr << "pop_tests BUNDLE [doctest options]\n";
        return 2;
    }
    folder = argv[1];
    doctest::Context context(argc - 1, argv + 1);
    return context.run();
}
