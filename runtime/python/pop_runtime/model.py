"""A loaded bundle: what `pop_runtime.load` returns and everything is asked of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from pop_runtime.batch import Completion, complete_batch
from pop_runtime.chat import Message, compile_template, render_chat, special_tokens
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.generate import Generation, Request
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Windows, read_manifest, verify_files
from pop_runtime.sampling import settings_in_force, unknown_settings
from pop_runtime.sequence import Prefill, Sequence, check_prefill, check_windows, checked_ids
from pop_runtime.sessions import SessionPair, open_pair
from pop_runtime.text import decode, encode, open_tokenizer

DEFAULT_NEW_TOKENS = 256
Prompt = str | Items[Message] | Items[int]


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `Model.generate`; None takes what the bundle says."""

    max_new_tokens: int | None = None  # None: 256
    prefill: Prefill = "pop"
    raw: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    sink_tokens: int | None = None
    boundary_tokens: int | None = None
    ignore_eos: bool = False


def load(
    folder: str | PathLike[str], threads: int | None = None, verify: bool = True, low_memory: bool = False
) -> Model:
    """Return the bundle in `folder`, ready to generate.

    Args:
        folder: what `pop-export --out` made.
        threads: of each session; None takes the cores this process may run on.
        verify: whether to compare the sha256 of every file with the manifest.
        low_memory: share the weights between prefill and decode where the precision allows it, for slower steps.

    Raises:
        UsageError: fewer than one thread.
        ModelError: the folder is not a whole, unaltered bundle of a known format.
        BackendError: ONNX Runtime cannot load a graph.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    if verify:
        verify_files(path, manifest)
    return Model(path, manifest, open_pair(path, manifest, threads, low_memory))


class Model:
    """Both graphs of a bundle with its tokenizer, chat template and default settings; holds no sequence.

    Tokenizer and template are read when first needed: work on ids needs neither.
    """

    def __init__(self, folder: Path, manifest: Manifest, sessions: SessionPair) -> None:
        self.folder, self.manifest, self.sessions = folder, manifest, sessions
        self.generation_config = self._read_json(manifest.generation_config)
        self.ignored_settings = unknown_settings(self.generation_config)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the bundle has none."""
        return None if self.manifest.tokenizer is None else open_tokenizer(self.folder / self.manifest.tokenizer)

    @cached_property
    def chat_template(self) -> jinja2.Template | None:
        """The chat template, or None if the bundle has none."""
        if self.manifest.chat_template is None:
            return None
        path = self.folder / self.manifest.chat_template
        return compile_template(_read_text(path), str(path))

    def generate(
        self, prompt: Prompt, *, sequence: Sequence | None = None, max_new_tokens: int | None = None,
        prefill: Prefill = "pop", raw: bool = False, temperature: float | None = None, top_p: float | None = None,
        top_k: int | None = None, repetition_penalty: float | None = None, seed: int | None = None,
        sink_tokens: int | None = None, boundary_tokens: int | None = None, ignore_eos: bool = False,
    ) -> Generation:  # fmt: skip
        """Return an iterator over the answer's tokens; refusals come now, work starts with the first `next`.

        Args:
            prompt: text (one user message if the bundle has a chat template and not `raw`), chat messages, or token
                ids.
            sequence: continues this one, with the prompt as its next turn; None starts a new one.
            max_new_tokens: None is 256; fewer fit if prompt and answer reach the model's positions.
            prefill: "pop" leaves the planned layers out while reading the prompt, "full" does not.
            raw: takes text as it is, without the chat template.
            temperature: 0 is greedy, above 0 samples; None leaves it to generation_config.json.
            top_p: in (0, 1].
            top_k: 0 is no limit.
            repetition_penalty: above 0; 1 is none. Counts the prompt's tokens too.
            seed: of the random numbers; None draws one, which `stats` shows.
            sink_tokens: None takes the manifest's.
            boundary_tokens: at least 1; None takes the manifest's.
            ignore_eos: goes on to `max_new_tokens`, for measuring.

        Raises:
            UsageError: an argument out of range, an empty prompt or one that does not fit.
            ModelError: the tokenizer, the template or generation_config.json is damaged.
        """
        options = Options(
            max_new_tokens, prefill, raw, temperature, top_p, top_k, repetition_penalty, seed, sink_tokens,
            boundary_tokens, ignore_eos,
        )  # fmt: skip
        ids = self.encode_prompt(prompt, raw, is_first_turn=sequence is None or len(sequence) == 0)
        num_past, capacity = (0, None) if sequence is None else (len(sequence), sequence.capacity)
        request = self._request(ids, options, num_past, capacity)
        if sequence is None:
            sequence = self.sequence(len(ids) + request.limit_tokens)
        return Generation(sequence, request, self.tokenizer)

    def generate_batch(self, prompts: Items[Prompt], **options: Any) -> list[Completion]:
        """Return the answers to several prompts, decoded together; each is what `generate` alone would give.

        Args:
            prompts: at least one, each as for `generate`.
            options: the keyword arguments of `generate` except `sequence`; one seed serves every row.

        Raises:
            UsageError, ModelError: as for `generate`.
        """
        chosen = Options(**options)
        if isinstance(prompts, str) or len(prompts) == 0:
            raise UsageError(f"prompts: expected a list of at least one prompt, found {prompts!r}")
        requests = [self._request(self.encode_prompt(prompt, chosen.raw), chosen) for prompt in prompts]
        answers = complete_batch(self.sessions, self.manifest, requests)
        return [Completion(ids, decode(self.tokenizer, ids), reason) for ids, reason in answers]

    def sequence(self, capacity: int) -> Sequence:
        """Return an empty sequence that can hold `capacity` tokens, prompts and answers together.

        Raises:
            UsageError: `capacity` is not within 1 and the model's positions.
        """
        if not 1 <= capacity <= self.manifest.max_positions:
            raise UsageError(f"capacity: expected 1..{self.manifest.max_positions} tokens, found {capacity}")
        return Sequence(self.sessions, allocate_cache(self.manifest, 1, capacity))

    def encode_prompt(self, prompt: Prompt, raw: bool = False, is_first_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Text and messages pass the chat template and are then encoded without added special tokens, since the
        template writes them; raw text is encoded with them, on the first turn.

        Raises:
            UsageError: nothing to encode, no tokenizer or no template where one is needed, or text for a later turn
                that is
                not `raw`, since a template would open the conversation anew.
        """
        if not isinstance(prompt, str) and not (len(prompt) and isinstance(prompt[0], Mapping)):
            return checked_ids(prompt, self.manifest)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UsageError(f"{self.folder}: expected a tokenizer for a text prompt, found none; give token ids")
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            return checked_ids(encode(self.tokenizer, prompt, is_first_turn), self.manifest)
        if raw:
            raise UsageError(
                "raw: expected text or token ids, found messages, which need the chat template; leave out raw"
            )
        if self.chat_template is None:
            raise UsageError(f"{self.folder}: expected a chat template for messages, found none; give text instead")
        if not is_first_turn:
            raise UsageError(
                "prompt: expected raw text or token ids for a later turn, found text for the chat template"
            )
        text = self.render_prompt(prompt)  # type: ignore[arg-type]
        return checked_ids(encode(self.tokenizer, text, add_special_tokens=False), self.manifest)

    def render_prompt(self, prompt: str | Items[Message]) -> str:
        """Return a user message or a conversation as the chat template writes it, special tokens included.

        Raises:
            UsageError: the bundle has no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UsageError(f"{self.folder}: expected a chat template for messages, found none; give text instead")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        config = self._read_json(self.manifest.tokenizer_config)
        return render_chat(self.chat_template, messages, special_tokens(config))

    def _request(self, ids: list[int], options: Options, num_past: int = 0, capacity: int | None = None) -> Request:
        """Return the request for a turn, with every default filled in and every limit checked."""
        asked = DEFAULT_NEW_TOKENS if options.max_new_tokens is None else options.max_new_tokens
        if asked < 1:
            raise UsageError(f"max_new_tokens: expected at least 1, found {asked}")
        check_prefill(options.prefill)
        own = self.manifest.windows
        windows = Windows(
            own.sink_tokens if options.sink_tokens is None else options.sink_tokens,
            own.boundary_tokens if options.boundary_tokens is None else options.boundary_tokens,
        )
        check_windows(windows)
        room = min(capacity or self.manifest.max_positions, self.manifest.max_positions)
        total = num_past + len(ids)
        if total >= room:
            raise UsageError(
                f"prompt: expected fewer than {room} tokens, so that one more fits, found {total}; shorten it"
            )
        sampling = settings_in_force(
            self.generation_config, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
            repetition_penalty=options.repetition_penalty, seed=options.seed,
        )  # fmt: skip
        return Request(
            prompt_token_ids=tuple(ids), max_new_tokens=asked, limit_tokens=min(asked, room - total),
            prefill=options.prefill, windows=windows, sampling=sampling, threads=self.sessions.threads,
            end_token_ids=frozenset() if options.ignore_eos else frozenset(self.manifest.eos_token_ids),
        )  # fmt: skip

    def _read_json(self, name: str | None) -> dict[str, Any]:
        """Return the object in a JSON file of the bundle; empty without a file."""
        if name is None:
            return {}
        path = self.folder / name
        try:
            content = json.loads(_read_text(path))
        except (ValueError, RecursionError) as error:
            found = " ".join(str(error).split())
            raise ModelError(f"{path}: expected JSON, found {found}; re-run pop-export") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}; re-run pop-export")
        return content


def _read_text(path: Path) -> str:
    """Return the text of a bundle's file, or raise ModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: expected a UTF-8 text file, found {error}; re-run pop-export") from error
