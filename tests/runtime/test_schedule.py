import itertools
from collections.abc import Iterable

import pytest

from pop_runtime.manifest import Windows
from pop_runtime.schedule import Stretch, plan_joined_turn, plan_turn


def _plan(
    num_past: int, num_new: int, sink: int = 0, boundary: int = 1, chunk: int = 512
) -> list[tuple[int, int, str]]:
    stretches = plan_turn(num_past, num_new, Windows(sink, boundary), chunk)
    return [(stretch.start, stretch.stop, stretch.stage) for stretch in stretches]


def test_all_but_the_last_token_is_prefilled() -> None:
    assert _plan(0, 40) == [(0, 39, "prefill"), (39, 40, "decode")]


def test_one_token_leaves_nothing_to_prefill() -> None:
    assert _plan(0, 1) == [(0, 1, "decode")]


def test_two_tokens_prefill_one() -> None:
    assert _plan(0, 2) == [(0, 1, "prefill"), (1, 2, "decode")]


def test_a_turn_no_longer_than_its_windows_runs_full_in_one_piece() -> None:
    assert _plan(0, 5, sink=2, boundary=3) == [(0, 5, "decode")]
    assert _plan(0, 4, sink=2, boundary=3) == [(0, 4, "decode")]
    assert _plan(0, 2, boundary=9) == [(0, 2, "decode")]


def test_sink_and_boundary_run_full_and_one_token_between_is_prefilled() -> None:
    assert _plan(0, 6, sink=2, boundary=3) == [(0, 2, "decode"), (2, 3, "prefill"), (3, 6, "decode")]


def test_the_sink_is_a_place_in_the_sequence_not_in_the_turn() -> None:
    assert _plan(7, 6, sink=4) == [(0, 5, "prefill"), (5, 6, "decode")]
    assert _plan(3, 6, sink=4) == [(0, 1, "decode"), (1, 5, "prefill"), (5, 6, "decode")]


def test_a_chunk_tail_of_one_token_is_still_prefill() -> None:
    assert _plan(0, 10, chunk=4) == [(0, 4, "prefill"), (4, 8, "prefill"), (8, 9, "prefill"), (9, 10, "decode")]


def test_without_windows_the_whole_turn_runs_full_in_chunks() -> None:
    assert plan_turn(0, 5, None, 3) == [Stretch(0, 3, "decode"), Stretch(3, 5, "decode")]


@pytest.mark.parametrize("num_past", [0, 2, 9])
def test_stretches_always_cover_the_turn_and_end_full(num_past: int) -> None:
    for num_new, sink, boundary, chunk in itertools.product(range(1, 12), range(4), range(1, 5), (1, 3, 50)):
        plan = plan_turn(num_past, num_new, Windows(sink, boundary), chunk)
        assert [0, *(stretch.stop for stretch in plan)] == [*(stretch.start for stretch in plan), num_new]
        assert all(0 < stretch.stop - stretch.start <= chunk for stretch in plan)
        stages = [stretch.stage for stretch in plan for _ in range(stretch.start, stretch.stop)]
        assert set(stages[-boundary:]) == {"decode"}
        assert all(stage == "decode" for stage in stages[: max(sink - num_past, 0)])
        assert stages.count("prefill") == max(num_new - boundary - min(max(sink - num_past, 0), num_new), 0)


def test_a_joined_turn_is_cut_at_multiples_of_the_chunk_and_where_the_stage_changes() -> None:
    chunks = plan_joined_turn(0, 12, Windows(2, 3), 5)
    assert [[(part.start, part.stop, part.stage) for part in chunk] for chunk in chunks] == [
        [(0, 2, "decode"), (2, 5, "prefill")],
        [(5, 9, "prefill"), (9, 10, "decode")],
        [(10, 12, "decode")],
    ]


@pytest.mark.parametrize("num_past", [0, 2, 9])
def test_a_joined_turn_sends_every_token_through_the_graph_of_the_plain_one(num_past: int) -> None:
    for num_new, sink, boundary, chunk in itertools.product(range(1, 12), range(4), range(1, 5), (1, 3, 50)):
        windows = Windows(sink, boundary)
        joined = plan_joined_turn(num_past, num_new, windows, chunk)
        assert [(part[0].start, part[-1].stop) for part in joined] == [
            (at, min(at + chunk, num_new)) for at in range(0, num_new, chunk)
        ]
        plain = plan_turn(num_past, num_new, windows, chunk)
        assert _stages(part for parts in joined for part in parts) == _stages(plain)


def _stages(stretches: Iterable[Stretch]) -> list[str]:
    """Return the stage of every token; fails if stretches leave a gap."""
    stages: list[str] = []
    for stretch in stretches:
        assert stretch.start == len(stages) < stretch.stop
        stages += [stretch.stage] * (stretch.stop - stretch.start)
    return stages
