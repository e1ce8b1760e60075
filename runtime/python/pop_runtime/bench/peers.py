"""The other engines, each an adapter behind the same call; used inside a worker process only, but for their table.

Their packages are imported where they are used: a worker has one of them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pop_runtime.bench.engines import Engine


@dataclass(frozen=True)
class Peer:
    """Another engine: what it is installed with, and what its model is made with."""

    package: str  # distribution whose version is reported
    module: str
    install: str
    model: str  # what it loads
    load: Callable[[Path, int, int], Engine]  # path, threads, most tokens of a prompt and its answer


class TransformersEngine:
    """transformers on PyTorch, in the type that the checkpoint is stored in."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Answer a prompt; see `Engine`."""
        torch, past, tokens = self._torch, None, list[int]()
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            for _ in range(num_new):
                out = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
                tokens.append(int(ids))
                tick()
        return tokens


class OnnxruntimeGenaiEngine:
    """onnxruntime-genai on a folder made by its own model builder."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import json

        import onnxruntime_genai as genai

        config = genai.Config(str(path))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._genai, self._model = genai, genai.Model(config)

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Answer a prompt; see `Engine`."""
        import numpy as np

        total = len(prompt) + num_new
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompt, np.int32))
        for _ in range(num_new):
            generator.generate_next_token()
            tick()
        return list(generator.get_sequence(0)[len(prompt) :])


class OpenvinoGenaiEngine:
    """OpenVINO GenAI on a folder made by `optimum-cli export openvino`; from a GGUF file it gave other tokens."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        import openvino_genai

        # paged attention is the fastest of its back ends, but it would remember the prompts of earlier rounds
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        self._genai = openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(
            str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Answer a prompt; see `Engine`."""
        import numpy as np
        import openvino

        genai = self._genai

        class Streamer(genai.StreamerBase):  # type: ignore[name-defined]
            def write(self, token: int | list[int]) -> Any:
                for _ in [token] if isinstance(token, int) else token:
                    tick()
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        settings = genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.array([prompt], np.int64))
        inputs = genai.TokenizedInputs(ids, openvino.Tensor(np.ones((1, len(prompt)), np.int64)))
        result = self._pipeline.generate(inputs, settings, Streamer())
        return list(result.tokens[0])


class LlamaCppEngine:
    """llama.cpp on a GGUF file."""

    def __init__(self, path: Path, threads: int, max_tokens: int) -> None:
        from llama_cpp import Llama

        self._model = Llama(
            str(path), n_ctx=max_tokens, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False
        )

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Answer a prompt; see `Engine`."""
        model, tokens = self._model, list[int]()
        model.reset()
        model.eval(list(prompt))
        while True:
            tokens.append(model.sample(temp=0.0))
            tick()
            if len(tokens) == num_new:
                return tokens
            model.eval(tokens[-1:])


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
        "a folder that `optimum-cli export openvino -m HF_FOLDER --weight-format int8 DIR` makes",
        OpenvinoGenaiEngine,
    ),
    "llama-cpp": Peer(
        "llama-cpp-python", "llama_cpp", "pip install llama-cpp-python", "a GGUF file", LlamaCppEngine,
    ),
}  # fmt: skip


def version_of(package: str) -> str:
    """Return the version of an installed distribution."""
    return importlib.metadata.version(package)
