// Which graph each new token of a turn goes through: pure arithmetic.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pop/manifest.h"

namespace pop::internal {

enum class Stage { prefill, decode };

// New tokens start..stop of a turn (half-open, counted within the turn) that are fed at once to one graph.
struct Stretch {
    std::int64_t start;
    std::int64_t stop;
    Stage stage;
};

inline bool operator==(const Stretch& a, const Stretch& b) {
    return a.start == b.start && a.stop == b.stop && a.stage == b.stage;
}

// Returns the stretches that feed a turn's new tokens, in order; together they cover 0..num_new.
//
// The sink (the first positions of the sequence) and the boundary (the last tokens of the turn) go through the full
// graph, everything between through the pruned one. With nothing between, the whole turn runs full. A chunk tail of one
// token keeps its stage.
//
// num_past: tokens of the sequence before this turn; the sink is used up once it exceeds `sink_tokens`.
// num_new: tokens of this turn, at least 1.
// windows: sink and boundary; none runs the whole turn full.
// chunk_tokens: longest stretch, at least 1.
std::vector<Stretch> plan_turn(std::int64_t num_past, std::int64_t num_new, const std::optional<Windows>& windows,
                               std::int64_t chunk_tokens);

// Returns chunks of a turn for a runtime that feeds both graphs at once, each cut where its stage changes.
//
// Every token goes through the graph that `plan_turn` says. A chunk begins at a multiple of `chunk_tokens`.
std::vector<std::vector<Stretch>> plan_joined_turn(std::int64_t num_past, std::int64_t num_new,
                                                   const std::optional<Windows>& windows, std::int64_t chunk_tokens);

}  // namespace pop::internal
