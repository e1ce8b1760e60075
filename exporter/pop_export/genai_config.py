"""`genai_config.json`: lets onnxruntime-genai run the pair as a pipeline of two stages.

Its `decoder-pipeline` chooses the stage by token count alone: more than one new token runs `prefill`, one `decode`.
A caller has to append a prompt as `ids[:-1]` and then `ids[-1:]`, or the boundary rule is lost (docs/genai.md).
"""

from __future__ import annotations

from typing import Any

from pop_runtime.manifest import Manifest


def genai_config(manifest: Manifest) -> dict[str, Any] | None:
    """Return what onnxruntime-genai needs to know of a bundle; every fact comes from the manifest.

    None if it could not hold the cache, which it allocates with one head count and one head size for everything.
    """
    layer = manifest.kv_layers[0]
    if set(manifest.kv_layers) != {layer} or layer.key_head_size != layer.value_head_size:
        return None
    past = {
        "past_key_names": manifest.past_key.format(layer="%d"),
        "past_value_names": manifest.past_value.format(layer="%d"),
    }
    present = {
        "present_key_names": manifest.present_key.format(layer="%d"),
        "present_value_names": manifest.present_value.format(layer="%d"),
    }
    inputs = [manifest.input_ids, manifest.attention_mask, *_buffers(manifest, manifest.past_key, manifest.past_value)]
    buffers = _buffers(manifest, manifest.present_key, manifest.present_value)
    stages = [
        {
            "prefill": {
                "filename": manifest.prefill_graph,
                "inputs": inputs,
                "outputs": buffers,
                "run_on_prompt": True,
                "run_on_token_gen": False,
            }
        },
        {
            "decode": {
                "filename": manifest.decode_graph,
                "inputs": inputs,
                "outputs": [manifest.logits, *buffers],
                "run_on_prompt": False,
                "run_on_token_gen": True,
            }
        },
    ]
    return {
        "model": {
            "type": "decoder-pipeline",
            "bos_token_id": manifest.bos_token_id if manifest.bos_token_id is not None else 0,
            "eos_token_id": list(manifest.eos_token_ids),
            "pad_token_id": manifest.pad_token_id if manifest.pad_token_id is not None else 0,
            "context_length": manifest.max_positions,
            "vocab_size": manifest.vocab_size,
            "decoder": {
                "session_options": {"provider_options": []},
                "head_size": layer.key_head_size,
                "num_key_value_heads": layer.num_heads,
                "num_hidden_layers": len(manifest.kv_layers),
                "inputs": {"input_ids": manifest.input_ids, "attention_mask": manifest.attention_mask, **past},
                "outputs": {"logits": manifest.logits, **present},
                "pipeline": stages,
            },
        },
        "search": {
            "max_length": manifest.max_positions,
            "past_present_share_buffer": True,
            "do_sample": False,
        },
    }


def _buffers(manifest: Manifest, key: str, value: str) -> list[str]:
    return [name.format(layer=layer) for layer in range(len(manifest.kv_layers)) for name in (key, value)]
