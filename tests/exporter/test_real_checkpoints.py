"""The two real models that pip can fetch: what their GGUF files say is what the published models are."""

from pydoc_data.topics import topics

import pytest
import torch

from pop_export.checkpoint import load_checkpoint
from pop_export.known_models import known_models

pytestmark = pytest.mark.real


def next_token(checkpoint, prompt):
    ids = checkpoint.tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        return checkpoint.tokenizer.decode(checkpoint.model(ids).logits[0, -1].argmax())


def test_smollm2_is_fetched_once_and_then_loads_offline():
    load_checkpoint("smollm2-135m")
    checkpoint = load_checkpoint("smollm2-135m", offline=True)
    known = known_models()["smollm2-135m"]
    config = checkpoint.model.config
    assert config.num_hidden_layers == known.num_layers and checkpoint.source["sha256"] == known.sha256
    assert (config.model_type, config.rope_parameters["rope_theta"]) == (known.family, 100000.0)
    assert config.tie_word_embeddings and config.rms_norm_eps == pytest.approx(1e-5)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id, checkpoint.pad_token_id) == ((2,), 1, 2)
    assert checkpoint.tokenizer("a  123 b").tokens() == ["a", "ĠĠ", "1", "2", "3", "Ġb"]  # adds no bos
    chat = checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert next_token(checkpoint, "The capital of France is") == " Paris"


def test_gemma3_has_the_config_of_the_published_model():
    checkpoint = load_checkpoint("gemma3-270m")
    config = checkpoint.model.config
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert config.rope_parameters["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert (config.sliding_window, config.query_pre_attn_scalar, config.head_dim) == (512, 256, 256)
    assert config.rms_norm_eps == pytest.approx(1e-6)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, None)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id, checkpoint.pad_token_id) == ((1,), 2, 0)
    assert checkpoint.tokenizer("hello").tokens() == ["<bos>", "hello"]
    assert next_token(checkpoint, "Paris is the capital of") == " France"


def test_gemma3_reads_text_worse_with_the_faults_that_gguf_loaders_are_known_for():
    """Measured on 300 tokens: 3.38 nats as loaded, 4.48 with one rope base, 18.6 with the norm offset left in."""
    checkpoint = load_checkpoint("gemma3-270m")
    model = checkpoint.model
    ids = checkpoint.tokenizer(topics["class"][:6000], return_tensors="pt").input_ids[:, :300]

    def loss():
        with torch.no_grad():
            return float(model(ids, labels=ids).loss)

    right = loss()
    assert right < 3.6
    rotary = model.model.rotary_emb
    local = rotary.sliding_attention_inv_freq.clone()
    rotary.sliding_attention_inv_freq.copy_(rotary.full_attention_inv_freq)
    assert loss() > right + 0.5
    rotary.sliding_attention_inv_freq.copy_(local)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.add_(1)
    assert loss() > right + 10
