"""A loaded bundle: what `pop_runtime.load` returns and everything is asked of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sized
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import jinja2
from tokenizers import Tokenizer

from pop_runtime.batch import Completion, complete_batch
from pop_runtime.chat import Message, compile_template, is_messages, render_chat, special_tokens
from pop_runtime.checks import is_within
from pop_runtime.conversation import Conversation
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.generate import Generation
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import MAKER, FileEntry, Manifest, read_manifest, verify_entries
from pop_runtime.providers import Target
from pop_runtime.request import Defaults, Options, check_options, make_request
from pop_runtime.sampling import unknown_settings
from pop_runtime.sequence import Sequence, checked_ids
from pop_runtime.sessions import SessionPair, engine_for, open_pair
from pop_runtime.text import encode, open_tokenizer

Prompt = str | Message | Items[Message] | Items[int]


def load(
    folder: str | PathLike[str], threads: int | None = None, verify: bool = True, low_memory: bool = False,
    ep: str = "cpu", device: int = 0, engine: bool = False, cuda_graphs: bool = False,
) -> Model:  # fmt: skip
    """Return the bundle in `folder`, ready to generate.

    Args:
        folder: what `pop-export --out` made.
        threads: of each session; None takes the cores this process may run on.
        verify: whether to compare the sha256 of every file with the manifest.
        low_memory: leave weights that are not quantised as they lie in the file, both graphs sharing them, for slower
            steps.
        ep: execution provider, a key of `providers.PROVIDERS`.
        device: number of its device.
        engine: run what `pop-compile` made for this provider on this machine; the TensorRT providers always do.
        cuda_graphs: on provider "cuda", record a decode step once for each cache and replay it.

    Raises:
        UsageError: threads out of range, an unknown provider, one that does not take the bundle's dialect or
            `cuda_graphs`, or `low_memory` with an engine.
        ModelError: the folder is not a whole, unaltered bundle of a known format.
        BackendError: ONNX Runtime cannot load a graph, the provider or device is missing, or no engine fits.
    """
    target = Target(ep, device, cuda_graphs)
    path = Path(folder)
    manifest = read_manifest(path)
    with ThreadPoolExecutor(1) as beside, _verified(path, manifest) if verify else nullcontext():
        tokenizer = beside.submit(open_tokenizer, path / manifest.tokenizer) if manifest.tokenizer else None
        built = engine_for(path, manifest, target, engine, verify)
        if built is not None and built.facts.shapes is not None:  # an engine's buffers may be shorter than the model
            longest = min(manifest.max_positions, built.facts.shapes.max_seq_len)
            manifest = dataclasses.replace(manifest, max_positions=longest)
        model = Model(path, manifest, open_pair(path, manifest, threads, low_memory, target, built))
    if tokenizer is not None and tokenizer.exception() is None:  # a damaged one is named by the first that needs it
        model.tokenizer = tokenizer.result()
    return model


@contextmanager
def _verified(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Check every file of a bundle: the weights, by far the largest, while the body opens sessions on them.

    ONNX Runtime thus never parses a graph that was not checked. Nothing is returned from the body, and none of its
    errors shown, before the weights are found to be whole.
    """
    parts: tuple[dict[str, FileEntry], dict[str, FileEntry]] = ({}, {})
    for name, entry in manifest.files.items():
        parts[name == manifest.weights][name] = entry
    others, weights = parts
    verify_entries(folder, others, MAKER)
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(verify_entries, folder, weights, MAKER)
        try:
            yield
        finally:
            check.result()


class Model:
    """Both graphs of a bundle with its tokenizer, chat template and default settings; holds no sequence.

    The template is read when first needed, and so is a tokenizer that `load` could not read: a `sequence` needs
    neither, every answer the tokenizer, for its text.
    """

    def __init__(self, folder: Path, manifest: Manifest, sessions: SessionPair) -> None:
        self.folder, self.manifest, self.sessions = folder, manifest, sessions
        self.generation_config = self._read_json(manifest.generation_config)
        self.ignored_settings = unknown_settings(self.generation_config)
        if self.generation_config.get("stop_strings") and manifest.tokenizer is None:
            self.ignored_settings.append("stop_strings")
        self.defaults = Defaults(manifest, self.generation_config, manifest.tokenizer is not None, sessions.threads)

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

    def generate(self, prompt: Prompt, *, sequence: Sequence | None = None, **options: Unpack[Options]) -> Generation:
        """Return an iterator over the answer's tokens; refusals come now, work starts with the first `next`.

        Args:
            prompt: text (one user message if the bundle has a chat template and not `raw`), one chat message or
                several, or token ids.
            sequence: continues this one, with the prompt as its next turn; None starts a new one.
            options: see `pop_runtime.Options`.

        Raises:
            UsageError: an argument out of range, an empty prompt or one that does not fit.
            ModelError: the tokenizer, the template or generation_config.json is damaged.
        """
        check_options(options)
        is_first_turn = sequence is None or len(sequence) == 0
        ids = self.encode_prompt(prompt, options.get("raw", False), is_first_turn)
        num_past, capacity = (0, None) if sequence is None else (len(sequence), sequence.capacity)
        request = make_request(self.defaults, options, ids, num_past, capacity)
        if sequence is None:
            sequence = self.sequence(len(ids) + request.limit_tokens)
        return Generation(sequence, request, self.tokenizer)

    def generate_batch(self, prompts: Items[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """Return the answers to several prompts, decoded together; each is what `generate` alone would give.

        Args:
            prompts: at least one, each as for `generate`, of any lengths.
            options: see `pop_runtime.Options`; one seed serves every row.

        Raises:
            UsageError, ModelError: as for `generate`; what is wrong with one prompt names its row.
        """
        check_options(options)
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sized) or len(prompts) == 0:
            raise UsageError(f"prompts: expected a list of at least one prompt, found {prompts!r}")
        checked = make_request(self.defaults, options, [])  # refuses options before any prompt
        options["seed"] = checked.sampling.seed  # the same for all rows, if it was drawn
        requests = []
        for row, prompt in enumerate(prompts):
            try:
                ids = self.encode_prompt(prompt, options.get("raw", False))
                requests.append(make_request(self.defaults, options, ids))
            except UsageError as error:
                raise UsageError(f"row {row}, {error}") from error
        return complete_batch(self.sessions, self.manifest, self.tokenizer, requests)

    def conversation(self, capacity: int | None = None) -> Conversation:
        """Return an empty conversation, whose turns read only what is new.

        Args:
            capacity: the most tokens it may hold, allocated at once; None grows with the need up to the model's
                positions.

        Raises:
            UsageError: `capacity` is not within 1 and the model's positions.
        """
        return Conversation(self, capacity)

    def sequence(self, capacity: int) -> Sequence:
        """Return an empty sequence that can hold `capacity` tokens, prompts and answers together.

        Raises:
            UsageError: `capacity` is not within 1 and the model's positions.
        """
        most = self.manifest.max_positions
        if not is_within(capacity, 1, most):
            raise UsageError(f"capacity: expected 1..{most} tokens, found {capacity!r}")
        return Sequence(self.sessions, allocate_cache(self.manifest, 1, capacity, self.sessions.place))

    def encode_prompt(self, prompt: Prompt, raw: bool = False, is_first_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Text and messages pass the chat template and are then encoded without added special tokens, since the
        template writes them; raw text is encoded with them, on the first turn.

        Raises:
            UsageError: nothing to encode, no tokenizer or no template where one is needed, or text for a later turn
                that is not `raw`, since a template would open the conversation anew (`conversation` can do it).
        """
        if isinstance(prompt, Mapping):
            prompt = [prompt]
        if not isinstance(prompt, str) and not is_messages(prompt):
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
                "prompt: expected raw text or token ids for a later turn, found text for the chat template; "
                "use Model.conversation"
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
