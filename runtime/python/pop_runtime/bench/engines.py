"""The engines that can be measured, each behind the same two calls; used inside a worker process only.

All are given token ids, one prompt at a time, choose greedily and compute logits for the last position of the prompt
alone. Their packages are imported where they are used: a worker has one of them.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """One answer: milliseconds from the call to the first token, and of each token after it."""

    first_ms: float
    step_ms: tuple[float, ...]


class Engine(Protocol):
    """A loaded model."""

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt with exactly `num_new` tokens; `prefill` counts for a bundle alone."""


@dataclass(frozen=True)
class Peer:
    """Another engine: what it is installed with, and what its model is made with."""

    package: str  # distribution whose version is reported
    module: str
    install: str
    model: str  # what it loads
    load: Callable[[Path, int, int], Engine]  # path, threads, most tokens of a prompt and its answer


class Clock:
    """Notes when tokens come."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def tick(self) -> None:
        """A token is there."""
        self._times.append(time.perf_counter())

    def run(self) -> Run:
        """Return the times between the ticks."""
        gaps = [(after - before) * 1e3 for before, after in zip(self._times, self._times[1:], strict=False)]
        return Run(gaps[0], tuple(gaps[1:]))


class BundleEngine:
    """A bundle through our runtime; with `graphs="decode"` its decode graph alone, which can read prompts too."""

    def __init__(self, folder: Path, threads: int, low_memory: bool = False, graphs: str = "both") -> None:
        from pop_runtime.manifest import read_manifest
        from pop_runtime.model import Model, load
        from pop_runtime.sessions import DECODE_ENTRIES, SessionPair, open_session

        if graphs == "both":
            self._model = load(folder, threads, verify=False, low_memory=low_memory)
        else:
            manifest = read_manifest(folder)
            alone = open_session(folder / manifest.decode_graph, threads, DECODE_ENTRIES)
            self._model = Model(folder, manifest, SessionPair(alone, alone, threads))

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt; see `Engine`."""
        clock = Clock()
        sequence = self._model.sequence(len(prompt) + num_new)
        token = int(sequence.append(prompt, prefill).argmax())  # type: ignore[arg-type]
        clock.tick()
        for _ in range(num_new - 1):
            sequence.accept(token)
            token = int(sequence.step().argmax())
            clock.tick()
        return clock.run()


class TransformersEngine:
    """transformers on PyTorch, in the type that the checkpoint is stored in."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt; see `Engine`."""
        torch, clock, past = self._torch, Clock(), None
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            for _ in range(num_new):
                out = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
                clock.tick()
        return clock.run()


class OnnxruntimeGenaiEngine:
    """onnxruntime-genai on a folder made by its own model builder."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import json

        import onnxruntime_genai as genai

        config = genai.Config(str(path))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._genai, self._model = genai, genai.Model(config)

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt; see `Engine`."""
        import numpy as np

        clock, total = Clock(), len(prompt) + num_new
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array([prompt], np.int32))
        for _ in range(num_new):
            generator.generate_next_token()
            clock.tick()
        return clock.run()


class OpenvinoGenaiEngine:
    """OpenVINO GenAI on a folder made by `optimum-cli export openvino`, or on a GGUF file."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt; see `Engine`."""
        import numpy as np
        import openvino

        genai, clock = self._genai, Clock()

        class Streamer(genai.StreamerBase):  # type: ignore[name-defined]
            def write(self, token: int | list[int]) -> Any:
                for _ in [token] if isinstance(token, int) else token:
                    clock.tick()
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        settings = genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.array([prompt], np.int64))
        inputs = genai.TokenizedInputs(ids, openvino.Tensor(np.ones((1, len(prompt)), np.int64)))
        self._pipeline.generate(inputs, settings, Streamer())
        return clock.run()


class LlamaCppEngine:
    """llama.cpp on a GGUF file."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        from llama_cpp import Llama

        self._model = Llama(
            str(path), n_ctx=max_tokens, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False
        )

    def run(self, prompt: Sequence[int], num_new: int, prefill: str) -> Run:
        """Answer a prompt; see `Engine`."""
        clock = Clock()
        self._model.reset()
        self._model.eval(list(prompt))
        for _ in range(num_new):
            token = self._model.sample(temp=0.0)
            clock.tick()
            self._model.eval([token])
        return clock.run()


PEERS = {
    "transformers": Peer(
        "transformers", "transformers", "pip install transformers torch",
        "a Hugging Face folder", TransformersEngine,
    ),
    "onnxruntime-genai": Peer(
        "onnxruntime-genai", "onnxruntime_genai", "pip install onnxruntime-genai",
        "a folder that `python -m onnxruntime_genai.models.builder -m HF_FOLDER -o DIR -p PRECISION -e cpu "
        "--extra_options prune_lm_head=true` makes", OnnxruntimeGenaiEngine,
    ),
    "openvino-genai": Peer(
        "openvino-genai", "openvino_genai", "pip install openvino-genai",
        "a folder that `optimum-cli export openvino -m HF_FOLDER --weight-format int8 DIR` makes, or a GGUF file",
        OpenvinoGenaiEngine,
    ),
    "llama-cpp": Peer(
        "llama-cpp-python", "llama_cpp", "pip install llama-cpp-python", "a GGUF file", LlamaCppEngine,
    ),
}  # fmt: skip


def version_of(package: str) -> str:
    """Return the version of an installed distribution."""
    return importlib.metadata.version(package)
