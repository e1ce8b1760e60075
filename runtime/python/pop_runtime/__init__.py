"""Run a bundle made by `pop-export`: numpy, onnxruntime, tokenizers and jinja2 only.

    model = pop_runtime.load("out/smollm2")
    for token in model.generate("Why is the sky blue?"):
        print(token.text, end="", flush=True)

`Model.conversation` keeps the cache between turns, `Model.generate_batch` answers many prompts at once.
Names are loaded on first use, so that reading a manifest needs no onnxruntime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pop_runtime.batch import Completion as Completion
    from pop_runtime.conversation import Conversation as Conversation
    from pop_runtime.generate import Generation as Generation
    from pop_runtime.manifest import read_manifest as read_manifest
    from pop_runtime.model import Model as Model
    from pop_runtime.model import load as load
    from pop_runtime.request import Options as Options
    from pop_runtime.sequence import Sequence as Sequence
    from pop_runtime.text import Token as Token

_HOMES = {
    "Completion": "batch", "Conversation": "conversation", "Generation": "generate", "Model": "model",
    "Options": "request", "Sequence": "sequence", "Token": "text", "load": "model", "read_manifest": "manifest",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
