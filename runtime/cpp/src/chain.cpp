#include "chain.h"

namespace pop::internal {

bool have_same_places(const Chain& prefill, const Chain& decode) {
    if (prefill.size() != decode.size()) return false;
    for (std::size_t place = 0; place < decode.size(); ++place) {
        const auto& pruned = *prefill[place];
        const auto& full = *decode[place];
        const bool is_first = place == 0;
        const bool is_last = place + 1 == decode.size();
        if (pruned.hidden_in.has_value() == is_first || full.hidden_in.has_value() == is_first) return false;
        if (full.hidden_out.has_value() == is_last || (is_last && pruned.hidden_out)) return false;
        if (is_first && !is_last && !pruned.hidden_out) return false;  // it has nothing to hand on
        if (!pruned.hidden_out) continue;
        const auto& mine = pruned.outputs.at(*pruned.hidden_out);
        const auto& theirs = full.outputs.at(*full.hidden_out);
        if (mine.type != theirs.type || mine.shape.back() != theirs.shape.back()) return false;
    }
    return true;
}

}  // namespace pop::internal
