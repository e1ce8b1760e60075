// The tiny bundle that the tests run on: 3 layers, of which prefill skips the last two, each a segment; 300 tokens, 64
// positions, sink 0, boundary 1, end token 257.
#pragma once

#include <filesystem>
#include <vector>

#include "pop/pop.h"

const std::filesystem::path& bundle_folder();

// The bundle, loaded once with one thread a session.
const pop::Model& bundle();

// Returns `count` token ids that are not the end token; another seed gives others.
std::vector<std::int64_t> some_ids(std::size_t count, std::uint64_t seed = 0);
