#include "joined.h"

namespace pop::internal {

void run_joined(BoundGraph& prefill, BoundGraph& decode, const Tokens& tokens, const std::vector<Stretch>& stretches,
                const Ort::RunOptions& options) {
    const std::vector<Stretch> whole{{0, tokens.count, Stage::decode}};
    const auto num_past = tokens.total - tokens.count;
    HiddenStates hidden;
    for (std::size_t place = 0; place < decode.chain().size(); ++place) {
        const bool is_kept = prefill.chain()[place] == decode.chain()[place];
        HiddenStates made(*decode.chain()[place], tokens.count);
        for (const auto& [start, stop, stage] : is_kept ? whole : stretches) {
            auto& graph = stage == Stage::decode ? decode : prefill;
            graph.run_link(place, {tokens.ids + start, stop - start, num_past + stop}, hidden.rows(start, stop),
                           made.rows(start, stop), options);
            if (made && !graph.chain()[place]->hidden_out) made.copy_rows(hidden, start, stop);
        }
        hidden = std::move(made);
    }
}

}  // namespace pop::internal
