"""The text part of a multimodal checkpoint, as a plain causal model, equals the whole model fed with text alone."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pop_export.checkpoint import load_checkpoint
from pop_export.multimodal import text_key
from pop_runtime.errors import ModelError
from tests.tiny_models import TINY, byte_tokenizer, redraw

TEXT = {**TINY, "head_dim": 16, "tie_word_embeddings": False}
CLIP = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def gemma3():
    text = {**TINY, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=CLIP, mm_tokens_per_image=4, image_token_index=299
    )
    return transformers.Gemma3ForConditionalGeneration(config), 0.0


def llava():
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**CLIP), text_config=text,
                                      image_token_index=299)  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), 1.0


def mistral3():
    vision = transformers.PixtralVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                              num_attention_heads=2, image_size=16, patch_size=8)  # fmt: skip
    text = transformers.MistralConfig(**TEXT, sliding_window=None)
    config = transformers.Mistral3Config(vision_config=vision, text_config=text, image_token_index=299)
    return transformers.Mistral3ForConditionalGeneration(config), 1.0


def qwen2_vl(name="Qwen2VL", tied=False):
    vision = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=8)
    if name == "Qwen2_5_VL":
        vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=8, out_hidden_size=64)
    text = {**TEXT, "rope_parameters": MROPE, "tie_word_embeddings": tied}
    text.pop("head_dim")
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=299, video_token_id=298, vision_start_token_id=297,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), 1.0


def qwen3_vl():
    vision = dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=8, out_hidden_size=64,
                  num_position_embeddings=4, deepstack_visual_indexes=[1])  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, image_token_id=299, video_token_id=298,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config), 1.0


FAMILIES = {
    "gemma3": gemma3,
    "llava": llava,
    "mistral3": mistral3,
    "qwen2_vl": qwen2_vl,
    "qwen2_vl_tied": lambda: qwen2_vl(tied=True),
    "qwen2_5_vl": lambda: qwen2_vl("Qwen2_5_VL"),
    "qwen3_vl": qwen3_vl,
}


def saved(folder, build):
    torch.manual_seed(0)
    model, norm_offset = build()
    model = model.to(torch.float32).eval()
    model.set_attn_implementation("eager")
    redraw(model, 0, norm_offset)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def logits(model):
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_gives_the_logits_of_the_whole_model(tmp_path, family, caplog):
    whole = saved(tmp_path, FAMILIES[family])
    checkpoint = load_checkpoint(str(tmp_path))
    expected = logits(whole)
    assert float((logits(checkpoint.model) - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert checkpoint.source["architecture"].endswith("ForCausalLM")
    assert not any("vision" in name or "visual" in name for name, _ in checkpoint.model.named_parameters())
    assert checkpoint.eos_token_ids == (257,)
    assert caplog.text == ""
    assert checkpoint.model.config.tie_word_embeddings == whole.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm1.weight", None),
        ("visual.merger.mlp.0.bias", None),
        ("model.vision_tower.vision_model.embeddings.patch_embedding.weight", None),
        ("multi_modal_projector.mm_soft_emb_norm.weight", None),
    ],
)
def test_tensor_names_of_older_and_newer_checkpoints_are_understood(name, expected):
    assert text_key(name) == expected


def test_a_missing_text_tensor_is_refused(tmp_path):
    saved(tmp_path, llava)
    file = tmp_path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if "layers.2.mlp.up_proj" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.2.mlp.up_proj.weight"):
        load_checkpoint(str(tmp_path))


def test_damaged_or_pickled_multimodal_weights_are_one_line(tmp_path):
    saved(tmp_path, llava)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_checkpoint(str(tmp_path))
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors only"):
        load_checkpoint(str(tmp_path), allow_pickle=True)


def test_a_text_part_without_causal_model_is_refused_by_name(tmp_path):
    saved(tmp_path, llava)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] = {"model_type": "modernbert", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"llava: its text part \(modernbert\) has no causal language model"):
        load_checkpoint(str(tmp_path))


def test_another_multimodal_model_is_refused_by_name(tmp_path):
    saved(tmp_path, llava)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="paligemma", architectures=["PaliGemmaForConditionalGeneration"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="PaliGemmaForConditionalGeneration is not a decoder-only"):
        load_checkpoint(str(tmp_path))
