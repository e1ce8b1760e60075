#include <doctest/doctest.h>

#include <thread>

#include "bundle.h"

using namespace pop;

TEST_CASE("generations in several threads give what they give alone") {
    constexpr std::size_t kThreads = 4;
    GenerateOptions options;
    options.ignore_eos = true;
    options.temperature = 0.9;
    options.seed = 11;
    std::vector<std::vector<std::int64_t>> alone(kThreads);
    for (std::size_t index = 0; index < kThreads; ++index) {
        alone[index] = bundle().generate(some_ids(8 + index, index), options).token_ids;
    }
    std::vector<std::vector<std::int64_t>> together(kThreads);
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < kThreads; ++index) {
        threads.emplace_back([&, index] {
            for (int round = 0; round < 5; ++round) {
                together[index] = bundle().generate(some_ids(8 + index, index), options).token_ids;
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(together == alone);
}

TEST_CASE("models are loaded and let go in several threads") {
    std::vector<std::thread> threads;
    for (int index = 0; index < 3; ++index) {
        threads.emplace_back([] {
            LoadOptions load;
            load.threads = 1;
            const auto model = Model::load(bundle_folder(), load);
            GenerateOptions options;
            options.max_new_tokens = 2;
            model.generate(some_ids(5), options);
        });
    }
    for (auto& thread : threads) thread.join();
}
