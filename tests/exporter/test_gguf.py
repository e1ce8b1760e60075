"""GGUF files: each gives the model it was made from, or is refused with the name of what would be lost (B21)."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pop_export import gguf_reader
from pop_export.checkpoint import load_checkpoint, save_tokenizer
from pop_export.gguf_config import gguf_config
from pop_runtime.errors import ModelError
from tests.exporter.gguf_writing import config_of, gguf_tensors, logits, write_gguf
from tests.tiny_models import byte_tokenizer, tiny_model

TOLERANCE = 1e-5  # times the largest logit: the same weights and mathematics, F32 throughout


def tiny(architecture, seed=0, **changes):
    offset = 0.0 if architecture.startswith("gemma") else 1.0
    return tiny_model(config_of(architecture, **changes), seed, norm_offset=offset)


def difference(first, second):
    """Return the largest logit difference, relative to the largest logit."""
    return float((first - second).abs().max() / first.abs().max())


def assert_same(path, model):
    assert difference(logits(model), logits(load_checkpoint(str(path)).model)) < TOLERANCE


def refused(path, match):
    with pytest.raises(ModelError, match=match) as caught:
        load_checkpoint(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_the_model_it_was_made_from(tmp_path, architecture, tied):
    if not tied and architecture.startswith("gemma"):
        pytest.skip("Gemma heads are always the embedding")
    model = tiny(architecture, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "tiny modèle 模型.gguf", model, architecture)
    assert_same(path, model)
    assert load_checkpoint(str(path)).model.config.tie_word_embeddings is tied


def test_llama_biases_are_put_back_in_order_with_their_weights(tmp_path):
    model = tiny("llama", attention_bias=True)
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    loaded = load_checkpoint(str(path)).model
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.q_proj.bias)
    assert_same(path, model)


def test_the_window_of_8_and_the_norm_offset_can_be_seen_in_the_logits(tmp_path):
    for architecture in ("gemma2", "gemma3"):
        model = tiny(architecture)
        right = logits(model)
        wide = tiny(architecture, sliding_window=256)
        assert difference(right, logits(wide)) > 10 * TOLERANCE
        with torch.no_grad():
            model.model.norm.weight += 1
        assert difference(right, logits(model)) > 10 * TOLERANCE


def test_gemma3_gets_its_two_rope_bases_and_five_sliding_layers_to_one_full(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("gemma3"), "gemma3")
    config = load_checkpoint(str(path)).model.config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1000000.0


def test_gemma3_takes_pattern_local_base_and_linear_scaling_from_newer_files(tmp_path):
    model = tiny(
        "gemma3", layer_types=["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )  # fmt: skip
    extra = {
        "attention.sliding_window_pattern": [False, True, False, True, False, True, False],
        "rope.freq_base_swa": 2e4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    assert_same(write_gguf(tmp_path / "m.gguf", model, "gemma3", extra), model)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_gemma_whose_attention_scale_is_not_in_the_file_is_refused(tmp_path, architecture):
    model = tiny(architecture, head_dim=32)
    refused(write_gguf(tmp_path / "m.gguf", model, architecture), f"{architecture}.attention.scale")
    extra = {"attention.scale": 1 / 16.0}
    assert_same(write_gguf(tmp_path / "n.gguf", model, architecture, extra), model)
    refused(write_gguf(tmp_path / "o.gguf", model, architecture, {"attention.scale": 0.3}), "sqrt of a whole number")


@pytest.mark.parametrize(("architecture", "num_layers", "scalar"), [("gemma2", 46, 144), ("gemma3", 62, 168)])
def test_a_27b_gemma_scales_by_its_hidden_size_per_head(architecture, num_layers, scalar):
    fields = {
        "block_count": num_layers, "attention.key_length": 128, "attention.head_count": 32, "context_length": 8192,
        "embedding_length": 32 * scalar, "feed_forward_length": 8, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 1024,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in fields.items()}
    config = gguf_config(Path("m"), {**metadata, "general.architecture": architecture}, num_rows=9, tensors=set())
    assert config.query_pre_attn_scalar == scalar


def test_rope_factors_of_llama_3_are_applied(tmp_path):
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    model, plain = tiny("llama", rope_parameters=scaling), tiny("llama")
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert difference(logits(model), logits(plain)) > 10 * TOLERANCE
    path = write_gguf(tmp_path / "m.gguf", model, "llama", None, {"rope_freqs.weight": factors.numpy()})
    assert_same(path, model)


@pytest.mark.parametrize(("architecture", "count"), [("llama", 7), ("gemma3", 128)])
def test_rope_factors_that_do_not_fit_are_refused(tmp_path, architecture, count):
    factors = {"rope_freqs.weight": np.ones(count, np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", tiny(architecture), architecture, None, factors), "rope_freqs.weight")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rope_scaling_keys_are_applied(tmp_path, architecture, kind):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    extra = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = extra["rope.scaling.original_context_length"] = 64
    model = tiny(architecture, rope_parameters=scaling)
    assert difference(logits(model), logits(tiny(architecture))) > 10 * TOLERANCE
    assert_same(write_gguf(tmp_path / "m.gguf", model, architecture, extra), model)


def test_yarn_betas_are_applied(tmp_path):
    scaling = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0,
    }  # fmt: skip
    extra = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
    }  # fmt: skip
    model = tiny("llama", rope_parameters=scaling)
    assert_same(write_gguf(tmp_path / "m.gguf", model, "llama", extra), model)


def test_the_old_linear_scaling_key_is_applied_and_type_none_means_none(tmp_path):
    scaled = tiny("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    assert_same(write_gguf(tmp_path / "m.gguf", scaled, "llama", {"rope.scale_linear": 4.0}), scaled)
    extra = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    plain = tiny("llama")
    assert_same(write_gguf(tmp_path / "n.gguf", plain, "llama", extra), plain)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "llama.rope.scaling.type|factor"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
         "llama.rope.scaling.yarn_log_multiplier"),
        ({"attention.sliding_window": 8}, "llama.attention.sliding_window"),
        ({"expert_count": 4}, "llama.expert_count"),
        ({"attention.scale": 0.5}, "llama.attention.scale"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count: expected the head size 16, found 8"),
        ({"attention.value_length": 8}, "llama.attention.value_length"),
        ({"vocab_size": 299}, "llama.vocab_size: expected 300"),
        ({"context_length": None}, "llama.context_length: expected a value above 0, found none"),
        ({"attention.head_count_kv": [2, 2, 2, 2, 2]}, "llama.attention.head_count_kv: .* found 5"),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_applied_is_refused_by_name(tmp_path, extra, key):
    refused(write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", extra), key)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"attention.sliding_window": None}, "gemma3.attention.sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping"),
        ({"attention.sliding_window_pattern": [True, False]}, "gemma3.attention.sliding_window_pattern"),
    ],
)
def test_a_gemma3_key_that_cannot_be_applied_is_refused_by_name(tmp_path, extra, key):
    refused(write_gguf(tmp_path / "m.gguf", tiny("gemma3"), "gemma3", extra), key)


def test_keys_that_say_nothing_special_are_accepted(tmp_path):
    extra = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "vocab_size": 300}
    model = tiny("llama")
    assert_same(write_gguf(tmp_path / "m.gguf", model, "llama", extra), model)


def test_a_head_of_its_own_is_used_and_a_stored_copy_of_the_embedding_is_tied(tmp_path):
    model = tiny("qwen2", tie_word_embeddings=False)
    assert difference(logits(model), logits(tiny("qwen2"))) > 10 * TOLERANCE
    assert_same(write_gguf(tmp_path / "m.gguf", model, "qwen2"), model)
    tied = tiny("qwen2")
    copy = {"output.weight": gguf_tensors(tied, "qwen2")["token_embd.weight"]}
    path = write_gguf(tmp_path / "n.gguf", tied, "qwen2", None, copy)
    assert_same(path, tied)
    assert load_checkpoint(str(path)).model.config.tie_word_embeddings


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path):
    for name in ("blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "blk.0.attn_q_norm.weight"):
        path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", None, {name: np.ones(16, np.float32)})
        refused(path, f"tensor {name} has no place")


def test_a_missing_or_misshapen_tensor_is_refused_by_name(tmp_path):
    model = tiny("llama")
    refused(write_gguf(tmp_path / "a.gguf", model, "llama", None, {"blk.1.ffn_up.weight": None}),
            "missing: model.layers.1.mlp.up_proj.weight")  # fmt: skip
    wrong = {"output_norm.weight": np.ones(63, np.float32)}
    refused(write_gguf(tmp_path / "b.gguf", model, "llama", None, wrong), "wrong shape: model.norm.weight")
    refused(write_gguf(tmp_path / "c.gguf", model, "llama", None, {"token_embd.weight": None}), "token_embd.weight")


def test_a_bias_that_the_model_would_not_use_is_refused(tmp_path):
    extra = {"blk.0.ffn_up.bias": np.ones(128, np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", tiny("qwen2"), "qwen2", None, extra), "model.layers.0.mlp.up_proj.bias")


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16"])
def test_stored_types_are_dequantised(tmp_path, kind):
    model = tiny("llama")
    quantised = gguf.quants.quantize(
        gguf_tensors(model, "llama")["blk.0.ffn_down.weight"], gguf.GGMLQuantizationType[kind]
    )
    rounded = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.copy_(torch.from_numpy(rounded))
    path = write_gguf(tmp_path / "q.gguf", model, "llama", None, {"blk.0.ffn_down.weight": None}, None, {
        "blk.0.ffn_down.weight": (quantised, gguf.GGMLQuantizationType[kind])
    })  # fmt: skip
    assert_same(path, model)


# damaged and foreign files
def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 not a model at all")
    refused(tmp_path / "m.gguf", "expected a GGUF file, found other content")
    (tmp_path / "e.gguf").write_bytes(b"")
    refused(tmp_path / "e.gguf", "damaged or cut short")


def test_another_version_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    refused(tmp_path / "m.gguf", "expected GGUF version 2 or 3, found 9")


@pytest.mark.parametrize("kept", [30, 2000, 9000, -1])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, kept):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama")
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, "cut short")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama")

    def fail(*_args, **_kwargs):
        raise PermissionError("not yours")

    monkeypatch.setattr(gguf_reader.mmap, "mmap", fail)
    refused(path, "m.gguf: cannot be read: not yours")


def test_an_unknown_storage_type_names_the_tensor(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama")
    data = path.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # past the name, the number of dimensions and the one dimension
    path.write_bytes(data[:at] + struct.pack("<I", 999) + data[at + 4 :])
    refused(path, "output_norm.weight has unknown storage type 999")


def test_an_alignment_that_is_no_number_of_bytes_is_refused(tmp_path):
    key = b"general.alignment"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    refused(tmp_path / "m.gguf", "damaged or cut short: general.alignment is 0")


def test_another_architecture_and_a_split_file_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "GGUF architecture mamba is not supported")
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "s.gguf", "one of 3 GGUF files; merge them")


def test_a_model_that_transformers_cannot_build_is_one_line(tmp_path):
    extra = {"attention.head_count": 3}
    refused(write_gguf(tmp_path / "m.gguf", tiny("qwen2"), "qwen2", extra), "m.gguf: ")


# tokenizer
def test_ids_and_tokenizer_come_from_the_metadata(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.eot_token_id": 259})
    checkpoint = load_checkpoint(str(path))
    text = "Hi <turn> wörld 日本"
    assert checkpoint.tokenizer(text).input_ids == byte_tokenizer()(text).input_ids
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer(text).input_ids) == text
    assert checkpoint.eos_token_ids == (257, 259)
    assert (checkpoint.bos_token_id, checkpoint.pad_token_id) == (256, 258)
    assert checkpoint.source["license"] == "apache-2.0" and checkpoint.source["name"] == "m"
    files = save_tokenizer(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / files.chat_template).read_text() == byte_tokenizer().chat_template


@pytest.mark.parametrize(("add_bos", "add_eos", "expected"), [
    (True, True, [256, 71, 257]), (True, False, [256, 71]), (False, None, [71]), (None, None, [71]),
])  # fmt: skip
def test_bos_and_eos_are_added_as_the_file_says(tmp_path, add_bos, add_eos, expected):
    flags = {"ggml.add_bos_token": add_bos, "ggml.add_eos_token": add_eos}
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer=flags)
    assert load_checkpoint(str(path)).tokenizer("h").input_ids == expected


def test_digits_are_split_one_by_one_where_the_rule_says_so(tmp_path):
    """Transformers splits SmolLM text as for GPT-2: two spaces before a digit then give other ids than the original."""
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.pre": "smollm"})
    split = load_checkpoint(str(path)).tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in split] == ["a", "ĠĠ", "1", "2"]


def test_llama3_vocabularies_keep_whole_tokens_and_add_bos_unless_told(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.pre": "llama-bpe", "ggml.add_bos_token": None}
    )
    tokenizer = load_checkpoint(str(path)).tokenizer
    assert tokenizer.backend_tokenizer.model.ignore_merges and tokenizer("h").input_ids == [256, 71]


def test_a_file_without_a_splitting_rule_is_split_as_for_gpt2_with_a_warning(tmp_path, caplog):
    load_checkpoint(str(write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.pre": None})))
    assert "tokenizer.ggml.pre is not set" in caplog.text


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        ({"ggml.model": None}, "tokenizer.ggml.model: expected .* found None"),
        ({"ggml.model": "rwkv"}, "found rwkv"),
        ({"ggml.pre": "zeppelin"}, "tokenizer.ggml.pre: rule 'zeppelin' is not supported"),
        ({"ggml.model": "llama"}, "the tokenizer cannot be built"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused_by_key(tmp_path, tokenizer, match):
    refused(write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer=tokenizer), match)


def test_a_vocabulary_of_whole_words_without_merges_is_refused(tmp_path):
    from tests.exporter.gguf_writing import byte_vocabulary

    tokens = byte_vocabulary()["ggml.tokens"]
    tokens[255] = "whole"
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.tokens": tokens})
    refused(path, "tokenizer.ggml.merges: expected the merges")


def test_a_chat_template_that_is_no_jinja_is_refused_by_its_key(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"chat_template": "{% if %}"})
    refused(path, r"m\.gguf: tokenizer\.chat_template: expected a Jinja template, found .*; mend or remove")


# entries of another type than a converter writes
@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        (
            "llama",
            {"attention.head_count": "4"},
            "llama.attention.head_count: expected a whole number above 0, found 4",
        ),
        ("llama", {"embedding_length": "wide"}, "llama.embedding_length: expected a whole number above 0, found wide"),
        ("llama", {"attention.head_count_kv": 0}, "llama.attention.head_count_kv: expected a whole number above 0"),
        ("llama", {"attention.key_length": 16.0}, "llama.attention.key_length: expected a whole number above 0"),
        ("llama", {"rope.freq_base": "high"}, "llama.rope.freq_base: expected a number, found high"),
        ("llama", {"rope.freq_base": float("nan")}, "llama.rope.freq_base: expected a number, found nan"),
        ("llama", {"block_count": 2**31 - 1}, r"llama.block_count: expected 5 \(blk\.\*\), found 2147483647"),
        ("gemma3", {"attention.scale": "small"}, "gemma3.attention.scale: expected a number, found small"),
        ("gemma3", {"attention.scale": 0.0}, "the metadata makes no gemma3 model"),
        ("gemma3", {"attention.sliding_window_pattern": "all"}, "the metadata makes no gemma3 model"),
    ],
)
def test_metadata_of_another_type_is_refused_by_its_key(tmp_path, architecture, extra, message):
    refused(write_gguf(tmp_path / "m.gguf", tiny(architecture), architecture, extra), message)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"ggml.tokens": [1, 2, 3]}, r"tokenizer\.ggml\.tokens: expected a list of texts, found \[1, 2, 3\]"),
        ({"ggml.merges": [1]}, r"tokenizer\.ggml\.merges: expected a list of texts, found \[1\]"),
        ({"ggml.merges": ["a b", "zz yy q"]}, r"tokenizer\.ggml\.\*: the tokenizer cannot be built"),
        ({"ggml.pre": [1]}, r"tokenizer\.ggml\."),
        ({"chat_template": 5}, r"tokenizer\.chat_template: expected the text of a chat template, found 5"),
    ],
)
def test_a_tokenizer_of_odd_entries_is_refused(tmp_path, tokenizer, message):
    refused(write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer=tokenizer), message)


def test_a_special_token_that_is_no_id_is_not_used(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tokenizer={"ggml.unknown_token_id": "<unk>"})
    assert load_checkpoint(str(path)).tokenizer.unk_token is None


@pytest.mark.parametrize(("kind", "dtype"), [("F64", np.float64), ("I8", np.int8)])
def test_a_storage_type_that_is_never_read_is_refused_with_its_tensor(tmp_path, kind, dtype):
    name, stored = "blk.0.ffn_down.weight", (np.ones((64, 128), dtype), gguf.GGMLQuantizationType[kind])
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", None, {name: None}, None, {name: stored})
    refused(path, f"tensor {name}: expected a storage type .* found {kind}; give the safetensors")


def test_rows_that_are_not_whole_blocks_are_refused_with_their_tensor(tmp_path):
    """The file says 60 numbers a row where Q8_0 stores blocks of 32."""
    name, kind = "blk.0.ffn_down.weight", gguf.GGMLQuantizationType.Q8_0
    stored = {name: (gguf.quants.quantize(np.ones((64, 128), np.float32), kind), kind)}
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", None, {name: None}, None, stored)
    entry = name.encode() + struct.pack("<IQ", 2, 128)
    data = path.read_bytes()
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, name.encode() + struct.pack("<IQ", 2, 60)))
    refused(path, rf"tensor {name}: expected rows of a multiple of 32 numbers \(Q8_0\), found 60")


@pytest.mark.parametrize("num_rows", [63, 4, 60])
def test_rows_that_do_not_divide_by_the_heads_are_refused_with_their_tensor(tmp_path, num_rows):
    rows = {"blk.0.attn_q.weight": np.ones((num_rows, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", None, rows)
    refused(path, f"q_proj.weight: expected rows in pairs for each of 4 heads, found {num_rows}; give")


def test_arrays_within_arrays_without_end_are_refused(tmp_path):
    nested = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "m.gguf").write_bytes(header + nested)
    refused(tmp_path / "m.gguf", "damaged or cut short")
