"""Time full and pruned prefill at the shape of Llama-3.1-8B in PyTorch, with random bf16 weights.

    python benchmarks/gpu_llama8b.py                      on a GPU of 20 GB: 512 to 8192 tokens, 10 of 32 layers skipped
    python benchmarks/gpu_llama8b.py --device cpu --tiny  the same logic where there is none

The paper (arXiv:2602.03295) has 1.36 x at 2048 tokens. `pop_export.reference` computes the pruned prefill as plainly as
can be, skipped layers in full; here a skipped layer computes nothing but K and V. Before anything is timed, both are
held against each other on a small model of the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from device_pair import median_ms
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pop_export.decoder import cache_argument
from pop_export.reference import PrefillPlan, Reference

LLAMA_8B: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=300, max_position_embeddings=512,
)  # fmt: skip
LENGTHS = (512, 1024, 2048, 4096, 8192)
TARGET_TOKENS, TARGET = 2048, 1.36
ROUNDS = 5
SAME = 1e-4  # of the largest number: the same arithmetic in fp32


def main() -> int:
    """Check, time and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_llama8b: error: --device cuda: expected a GPU in torch, found none; use --device cpu --tiny",
              file=sys.stderr)  # fmt: skip
        return 4
    torch.manual_seed(0)
    with torch.device(arguments.device), torch.no_grad():
        difference = largest_difference(random_model(SMALL, torch.float32), (5, 6, 7), 48)
        print(f"KV-only layers against pop_export.reference: {difference:.1e} of the largest K or V")
        if not difference <= SAME:
            print(f"gpu_llama8b: error: expected at most {SAME:g}, found {difference:.2g}", file=sys.stderr)
            return 5
        shape = SMALL if arguments.tiny else LLAMA_8B
        model = random_model(shape, torch.float32 if arguments.device == "cpu" else torch.bfloat16)
        num_layers = shape["num_hidden_layers"]
        skipped = tuple(range(num_layers - round(num_layers * 10 / 32), num_layers))
        lengths = (32, 64) if arguments.tiny else LENGTHS
        rows = [time_prefill(model, skipped, length, arguments.device) for length in lengths]
    print(f"{len(skipped)} of {num_layers} layers skipped")
    print("| tokens | full ms | pruned ms | full / pruned |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['num_tokens']} | {row['full_ms']:.1f} | {row['pruned_ms']:.1f} | {row['speedup']:.2f} |")
    print(f"target at {TARGET_TOKENS} tokens: >= {TARGET}")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    print(json.dumps({"device": name, "skipped_layers": skipped, "rows": rows}))
    return 0


def random_model(shape: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Return a Llama of this shape on the default device, its weights drawn in place."""
    theta = shape.get("rope_theta", 10000.0)
    config = LlamaConfig(
        **{name: value for name, value in shape.items() if name != "rope_theta"},
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02)
    return model


@contextmanager
def kv_only(model: PreTrainedModel, skipped: tuple[int, ...]) -> Iterator[None]:
    """Let skipped layers compute nothing but their K and V, and pass their input on, while the context is open."""
    layers = [model.model.layers[index] for index in skipped]
    for layer in layers:
        layer.forward = MethodType(_write_kv, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _write_kv(layer: Any, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden_states)  # [B, S, E]
    heads = (*normed.shape[:-1], -1, attention.head_dim)
    key, value = (projection(normed).view(heads).transpose(1, 2) for projection in (attention.k_proj, attention.v_proj))
    _, key = apply_rotary_pos_emb(key, key, *kwargs["position_embeddings"])
    cache = kwargs.get("past_key_values", kwargs.get("cache"))  # transformers calls it by either name
    cache.update(key, value, attention.layer_idx)
    return hidden_states


def prefill(model: PreTrainedModel, ids: Tensor, skipped: tuple[int, ...]) -> DynamicCache:
    """Return the cache after a prefill of ids [1, S], without a head over the prompt."""
    cache = DynamicCache(config=model.config)
    with kv_only(model, skipped):
        model.model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    return cache


def largest_difference(model: PreTrainedModel, skipped: tuple[int, ...], num_tokens: int) -> float:
    """Return how far K and V of `prefill` are from those of the plain reference, over the largest of them."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens))
    reference = Reference(model, PrefillPlan(frozenset(skipped)))
    reference.feed(ids[0], "prefill")
    worst = largest = 0.0
    for found, wanted in zip(prefill(model, ids, skipped).layers, reference.cache.layers, strict=True):
        for ours, theirs in ((found.keys, wanted.keys), (found.values, wanted.values)):
            worst = max(worst, float((ours - theirs).abs().max()))
            largest = max(largest, float(theirs.abs().max()))
    return worst / largest


def time_prefill(model: PreTrainedModel, skipped: tuple[int, ...], num_tokens: int, device: str) -> dict[str, Any]:
    """Return the times of a full and of a pruned prefill."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens))
    full = median_ms(lambda: prefill(model, ids, ()), device, ROUNDS)
    pruned = median_ms(lambda: prefill(model, ids, skipped), device, ROUNDS)
    return {"num_tokens": num_tokens, "full_ms": full, "pruned_ms": pruned, "speedup": full / pruned}


if __name__ == "__main__":
    sys.exit(main())
