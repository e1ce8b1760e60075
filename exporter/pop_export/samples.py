"""Sample answers for the report: the same prompts read in full and pruned."""

from __future__ import annotations

import logging
from typing import Any

from pop_runtime.errors import UsageError
from pop_runtime.model import Model
from pop_runtime.sequence import Prefill

_LOG = logging.getLogger(__name__)
NEW_TOKENS = 48
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Summarise this note in one sentence.\n\n"
    "The ferry to the island leaves at half past seven in the morning and at four in the afternoon, every day except "
    "Sunday. In winter the afternoon boat is replaced by a bus that goes around the bay and takes two hours longer. "
    "Bicycles travel free of charge, but their number is limited to twelve, so it is wise to book a place the day "
    "before. Dogs are welcome on deck. The café on board sells soup, bread and coffee, and only takes coins.",
    "Read the letter and answer the question after it.\n\n"
    "Dear Anna, thank you for looking after the house. The key to the shed hangs behind the kitchen door. Please water "
    "the tomatoes every second evening, and the lemon tree once a week. The neighbour, Mr. Okafor, feeds the cat when "
    "you are away; his number is on the fridge. The man who repairs the boiler comes on Thursday between nine and "
    "eleven. We are back on the nineteenth. Yours, Miriam.\n\n"
    "Question: On which day does the boiler get repaired, and who feeds the cat?",
)


def sample_answers(model: Model, num_new: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """Return greedy answers of a bundle to `PROMPTS`, each with `prompt`, `full`, `pruned` and `common_tokens`.

    Prompts that the model is too short for are left out, and all of them without a tokenizer. Where the chat template
    takes no plain message of a user, or writes ids that the model lacks, the prompts are raw text.
    """
    if model.tokenizer is None:
        return []
    room = model.manifest.max_positions - num_new
    for raw in (False, True):
        try:
            fitting = [prompt for prompt in PROMPTS if len(model.encode_prompt(prompt, raw)) <= room]
        except UsageError as error:  # the export is whole without samples
            _LOG.warning("no sample answers to %s prompts: %s", "raw" if raw else "chat", error)
            continue
        return [_answers(model, prompt, num_new, raw) for prompt in fitting]
    return []


def _answers(model: Model, prompt: str, num_new: int, raw: bool) -> dict[str, Any]:
    """Return one prompt's answers and how many leading tokens they have in common, end token not counted."""
    modes: tuple[Prefill, ...] = ("full", "pop")
    full, pruned = (
        model.generate(
            prompt, max_new_tokens=num_new, prefill=prefill, raw=raw, temperature=0.0, repetition_penalty=1.0
        )
        for prefill in modes
    )
    ids = [[token.id for token in answer] for answer in (full, pruned)]
    common = 0
    for of_full, of_pruned in zip(*ids, strict=False):
        if of_full != of_pruned:
            break
        common += 1
    return {"prompt": prompt, "full": full.text, "pruned": pruned.text, "common_tokens": common}
