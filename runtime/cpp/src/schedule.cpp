#include "schedule.h"

#include <algorithm>

namespace pop::internal {

std::vector<Stretch> plan_turn(std::int64_t num_past, std::int64_t num_new, const std::optional<Windows>& windows,
                               std::int64_t chunk_tokens) {
    std::vector<Stretch> stretches;
    const auto add = [&](std::int64_t start, std::int64_t stop, Stage stage) {
        while (start < stop) {
            const auto chunk_stop = start + std::min(chunk_tokens, stop - start);
            stretches.push_back({start, chunk_stop, stage});
            start = chunk_stop;
        }
    };
    if (windows) {
        const auto sink_stop = std::min(std::max<std::int64_t>(windows->sink_tokens - num_past, 0), num_new);
        const auto boundary_start = num_new - windows->boundary_tokens;
        if (boundary_start > sink_stop) {
            add(0, sink_stop, Stage::decode);
            add(sink_stop, boundary_start, Stage::prefill);
            add(boundary_start, num_new, Stage::decode);
            return stretches;
        }
    }
    add(0, num_new, Stage::decode);
    return stretches;
}

std::vector<std::vector<Stretch>> plan_joined_turn(std::int64_t num_past, std::int64_t num_new,
                                                   const std::optional<Windows>& windows, std::int64_t chunk_tokens) {
    std::vector<std::vector<Stretch>> chunks;
    const auto whole = plan_turn(num_past, num_new, windows, num_new);
    for (std::int64_t start = 0; start < num_new;) {
        const auto stop = start + std::min(chunk_tokens, num_new - start);
        auto& chunk = chunks.emplace_back();
        for (const auto& stretch : whole) {
            if (stretch.start >= stop || stretch.stop <= start) continue;
            chunk.push_back({std::max(stretch.start, start), std::min(stretch.stop, stop), stretch.stage});
        }
        start = stop;
    }
    return chunks;
}

}  // namespace pop::internal
