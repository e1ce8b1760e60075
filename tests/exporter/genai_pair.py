"""Greedy tokens from stock onnxruntime-genai, with the prompt appended as docs/genai.md says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

NUM_NEW = 200


def genai_tokens(folder: Path, ids: list[int], num_new: int, prefill: str) -> list[int]:
    """Return at most `num_new` greedy tokens of a bundle; skips the test where onnxruntime-genai is not installed.

    Args:
        folder: holds genai_config.json and the graphs it names.
        ids: the prompt.
        num_new: how many tokens; fewer come if an end token does, which is then the last.
        prefill: "pop" appends all but the last token, then the last; "full" appends one token at a time.
    """
    genai = pytest.importorskip("onnxruntime_genai")
    parameters = genai.GeneratorParams(model := genai.Model(str(folder)))
    parameters.set_search_options(max_length=len(ids) + num_new)
    generator = genai.Generator(model, parameters)
    pieces = [ids[:-1], ids[-1:]] if prefill == "pop" else [[token] for token in ids]
    for piece in pieces:
        generator.append_tokens(np.array([piece], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return list(map(int, generator.get_sequence(0)[len(ids) :]))
