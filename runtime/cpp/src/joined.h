// Both graphs over the same new tokens at once: kept layers read all of them, skipped layers each stretch by itself.
//
// A turn begins and ends at full depth (its windows) and is pruned between. Fed one after another the three stretches
// go through the kept layers three times, and few tokens cost nearly as much as many: the weights are read for each
// stretch. Where both graphs lie in segments, the kept ones are the same sessions in both.
#pragma once

#include "bound_graph.h"
#include "schedule.h"

namespace pop::internal {

// Feeds the new tokens of one chunk and writes their K and V in place; as one stretch after another would, but for
// rounding. The logits of the last stretch of decode are then those of `decode`.
//
// prefill, decode: bound to the same cache; their chains `have_same_places`.
// tokens: of the whole chunk. stretches: they cover 0..count in order.
// Throws BackendError: as `BoundGraph::run`; what was written until then counts for nothing.
void run_joined(BoundGraph& prefill, BoundGraph& decode, const Tokens& tokens, const std::vector<Stretch>& stretches,
                const Ort::RunOptions& options);

}  // namespace pop::internal
