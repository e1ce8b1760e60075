"""Tiny seeded models and a byte tokenizer, built on the spot: what most tests run on.

Every parameter is re-drawn after construction: library defaults leave biases 0, norms neutral and attention nearly
uniform, which hides most faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NUM_LAYERS = 5
VOCAB_SIZE = 300
TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=256,
    pad_token_id=258,
    bos_token_id=256,
    eos_token_id=257,
    tie_word_embeddings=True,
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<turn>' + m['role'] + ':' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant:' }}{% endif %}"
)


@torch.no_grad()
def redraw(model: nn.Module, seed: int, norm_offset: float = 1.0) -> None:
    """Re-draw every parameter, tied ones once: matrices std 0.3, biases std 0.5, norm weights `norm_offset` +- 0.2."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim > 1:
            parameter.copy_(noise * 0.3)
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.5)
        else:
            parameter.copy_(noise * 0.2 + norm_offset)


def tiny_model(config: Any = None, seed: int = 0, norm_offset: float = 1.0) -> Any:
    """Return a re-drawn eager fp32 model: a Llama of 5 layers unless `config` says otherwise."""
    config = config or transformers.LlamaConfig(**TINY)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    redraw(model, seed, norm_offset)
    return model


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 byte tokens plus <bos> 256, <eos> 257, <pad> 258 and <turn> 259; it adds no bos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<turn>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<turn>"],
    )
    fast.chat_template = chat_template
    return fast


def save_checkpoint(
    folder: Path, model: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **generation: Any
) -> Path:
    """Write model, tokenizer and generation config as a Hugging Face folder (safetensors) and return the folder."""
    model = model if model is not None else tiny_model()
    for key, value in generation.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder
