"""What cannot be exported is refused with one line that names the place and the next step, and exit code 3."""

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pop_export.checkpoint import load_checkpoint
from pop_runtime.errors import ModelError, UsageError
from tests.tiny_models import TINY, byte_tokenizer, save_checkpoint, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama as a folder; copy it before changing it."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the tiny folder that a test may change."""
    return shutil.copytree(folder, tmp_path / "copy")


def edit_json(file, **changes):
    content = json.loads(file.read_text()) if file.is_file() else {}
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder, **changes):
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, file, metadata={"format": "pt"})


def refused(model, match, **options):
    with pytest.raises(ModelError, match=match) as caught:
        load_checkpoint(str(model), offline=True, **options)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3
    return str(caught.value)


# names and places
def test_a_name_that_is_nothing_lists_the_known_names(tmp_path):
    refused(tmp_path / "absent folder", "no such folder or .gguf file.*known names: gemma3-270m, smollm2-135m")
    refused("missing.gguf", "no such folder or .gguf file")


def test_a_file_that_is_not_gguf_is_refused(copy):
    refused(copy / "config.json", "expected a folder, a .gguf file")


def test_a_hub_id_offline_says_that_the_cache_does_not_hold_it(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("nobody/no-such-model", "not in the Hugging Face cache, and --offline forbids fetching")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        ("LocalEntryNotFoundError", "the hub cannot be reached .*give a folder"),
        ("RepositoryNotFoundError", "the Hugging Face hub did not deliver it: first line"),
        ("HFValidationError", "did not deliver it: first line"),
        ("OSError", "did not deliver it: first line"),
    ],
)
def test_a_hub_that_does_not_deliver_is_one_line(monkeypatch, error, match):
    import huggingface_hub
    import huggingface_hub.errors as errors

    kind = getattr(errors, error, OSError)
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    arguments = {"response": response} if error == "RepositoryNotFoundError" else {}

    def fail(*_args, **_kwargs):
        raise kind("first line\nsecond line", **arguments)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=match) as caught:
        load_checkpoint("nobody/no-such-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "match"),
    [(None, "did not deliver it: TimeoutError$"), (TimeoutError(), r"cannot be reached \(TimeoutError\)")],
)
def test_a_hub_error_without_a_text_is_named_by_its_type(monkeypatch, cause, match):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_args, **_kwargs):
        raise TimeoutError() if cause is None else LocalEntryNotFoundError("no text of its own") from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=match):
        load_checkpoint("nobody/no-such-model")


def test_offline_asks_the_hub_client_for_local_files_only(folder, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(_model, **options):
        asked.update(options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_checkpoint("some/model", offline=True, revision="v2").source["name"] == "model"
    assert (asked["local_files_only"], asked["revision"]) == (True, "v2")
    assert not {"*.py", "*.bin"} & set(asked["allow_patterns"])


@pytest.mark.parametrize(
    ("model", "found"), [("x" * 300, "File name too long"), ("~nobody of that name/m", "Could not determine home")]
)
def test_a_name_that_no_file_can_have_is_one_line(model, found):
    refused(model, f"expected a folder or a file, found: {found}.*; give another path")


# folders that are something else
def test_a_folder_without_config_is_refused(tmp_path):
    refused(tmp_path, "expected config.json, found none")


def test_a_folder_with_a_gguf_file_points_to_it(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "to export model.gguf give its own path")


def test_a_bundle_is_not_a_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "decode.onnx").write_text("")
    refused(tmp_path, "found an exported bundle")


def test_an_adapter_is_not_a_checkpoint(copy):
    (copy / "adapter_config.json").write_text("{}")
    refused(copy, "found an adapter")


def test_a_revision_of_what_has_none_is_refused(folder):
    for model in (str(folder), "smollm2-135m"):
        with pytest.raises(
            UsageError, match=f"--revision v2: expected a Hugging Face id with it, found {model}; leave"
        ):
            load_checkpoint(model, offline=True, revision="v2")


# configs
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_bad_json_is_named_with_its_file(copy, name):
    (copy / name).write_text('{"a": 1,}')
    refused(copy, rf"{name}: expected JSON, found")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "README.md"])
def test_a_file_that_may_not_be_read_is_named(copy, name, monkeypatch):
    (copy / "README.md").touch()
    real = Path.read_text

    def read_text(path, *args, **kwargs):
        if path == copy / name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    refused(copy, rf"{name}: .*: \[Errno 13\] Permission denied: .*; repair or remove the file")


def test_json_that_is_no_object_is_refused(copy):
    (copy / "config.json").write_text("[]")
    refused(copy, "expected a JSON object, found list")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_named_with_its_file(copy, name, content):
    (copy / name).write_text(content)
    refused(copy, rf"{name}: expected JSON, found")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [1]}, r"config\.json, architectures: expected a list of names, found \[1\]"),
        ({"architectures": {"a": 1}}, r"config\.json, architectures: expected a list of names"),
        ({"architectures": "LlamaForCausalLM"}, r"architectures: expected a list of names, found LlamaForCausalLM"),
        ({"model_type": ["llama"]}, r"config\.json, model_type: expected text, found \['llama'\]"),
        ({"text_config": "x"}, r"config\.json, text_config: expected an object, found x"),
        (
            {"text_config": {"quantization_config": 1}},
            r"config\.json, text_config, quantization_config: expected an ob",
        ),
        ({"quantization_config": "x"}, r"config\.json, quantization_config: expected an object, found x"),
        ({"compression_config": [1]}, r"config\.json, compression_config: expected an object"),
    ],
)
def test_an_entry_of_config_json_of_another_type_is_named(copy, changes, message):
    edit_json(copy / "config.json", **changes)
    refused(copy, message)


def test_a_config_without_model_type_is_refused(copy):
    edit_json(copy / "config.json", model_type=None)
    refused(copy, "expected model_type")


def test_an_unknown_architecture_is_named(copy):
    edit_json(copy / "config.json", model_type="zeppelin", architectures=["ZeppelinForCausalLM"])
    refused(copy, r"unknown architecture ZeppelinForCausalLM \(model_type zeppelin\)")


SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=300)


@pytest.mark.parametrize(
    ("config", "model_class", "match"),
    [
        (transformers.BertConfig(**SMALL), "BertForMaskedLM", "BertForMaskedLM is not a decoder-only"),
        (transformers.BertConfig(**SMALL), "BertLMHeadModel", "BertLMHeadModel is not a decoder-only"),
        (transformers.BertConfig(**SMALL), "BertModel", "BertModel is not a decoder-only"),
        (
            transformers.T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=300),
            "T5ForConditionalGeneration",
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        (
            transformers.ViTConfig(**{**SMALL, "image_size": 16, "patch_size": 8}),
            "ViTForImageClassification",
            "ViTForImageClassification is not a decoder-only",
        ),
        (transformers.LlamaConfig(**TINY), "LlamaForSequenceClassification", "is not a decoder-only.*with a head"),
    ],
)
def test_what_is_not_a_decoder_with_a_head_is_refused_by_name(tmp_path, config, model_class, match):
    getattr(transformers, model_class)(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, match)


def test_an_encoder_without_named_architecture_is_refused(tmp_path):
    transformers.BertConfig(**SMALL).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=None)
    refused(tmp_path, "bert is not a decoder-only")


def test_a_decoder_without_named_architecture_is_loaded(copy):
    edit_json(copy / "config.json", architectures=None)
    assert load_checkpoint(str(copy)).source["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_the_name_of_the_method(copy, settings, method):
    edit_json(copy / "config.json", quantization_config=settings)
    refused(copy, rf"already quantised \({method}\)")


# code and pickle
class Marker:
    """A pickle that writes a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_code_of_the_model_folder_never_runs_unasked(copy, tmp_path):
    (copy / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    edit_json(copy / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    refused(copy, "config.json: .*--trust-remote-code")
    edit_json(copy / "config.json", model_type="own")
    refused(copy, "config.json: .*--trust-remote-code")
    assert not (tmp_path / "ran").exists()


def test_code_of_the_tokenizer_never_runs_unasked(copy, tmp_path):
    (copy / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    edit_json(
        copy / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["tokenization_own.Own", None]},
    )
    refused(copy, "tokenizer_config.json: .*--trust-remote-code")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_never_opened_unasked_and_never_runs_code(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Marker(tmp_path / "ran")}))
    refused(copy, r"pickle files \(pytorch_model.bin\).*--allow-pickle")
    refused(copy, "cannot be loaded", allow_pickle=True)
    torch.save({"model.norm.weight": Marker(tmp_path / "ran")}, copy / "pytorch_model.bin")
    refused(copy, "cannot be loaded", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_a_name_that_transformers_does_not_read_is_refused(copy):
    (copy / "model.safetensors").rename(copy / "model.pth")
    refused(copy, "--allow-pickle")
    refused(copy, "found model.pth, which transformers does not read", allow_pickle=True)


# weights
def test_a_config_without_weights_is_refused(copy):
    (copy / "model.safetensors").unlink()
    refused(copy, "expected model.safetensors or model.safetensors.index.json, found no weights")


def test_a_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="200KB")
    byte_tokenizer().save_pretrained(tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, f"{shard.name} missing")


def test_an_index_without_shards_is_refused(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text("{}")
    refused(copy, "an empty weight_map")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (["model.safetensors"], "weight_map: expected names of files by tensor, found "),
        ({"model.norm.weight": 1}, "weight_map: expected names of files by tensor, found "),
        ({"model.norm.weight": "x" * 300}, "expected 1 shards, found x+... missing"),
    ],
)
def test_an_index_that_names_no_files_is_refused(copy, weight_map, message):
    (copy / "model.safetensors").unlink()
    edit_json(copy / "model.safetensors.index.json", weight_map=weight_map)
    refused(copy, f"model.safetensors.index.json.*{message}")


def test_weights_cut_by_one_byte_are_refused(copy):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-1])
    refused(copy, "cannot be loaded")


def test_missing_tensors_are_named_and_not_invented(copy):
    edit_weights(copy, **{"model.norm.weight": None, "model.layers.1.self_attn.k_proj.weight": None})
    refused(copy, "2 tensors are missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight$")


def test_a_long_list_of_missing_tensors_is_cut(copy):
    edit_weights(copy, **{f"model.layers.{layer}.mlp.up_proj.weight": None for layer in range(5)})
    refused(copy, "5 tensors are missing: .* and 2 more")


def test_a_head_that_is_missing_from_an_untied_model_is_not_invented(copy):
    edit_json(copy / "config.json", tie_word_embeddings=False)
    refused(copy, "1 tensors are missing: lm_head.weight")


def test_a_tensor_of_the_wrong_shape_is_named(copy):
    edit_weights(copy, **{"model.norm.weight": torch.ones(63)})
    refused(copy, "1 tensors are of the wrong shape: model.norm.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_with_the_tensor(copy, value):
    weight = load_file(copy / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    weight[3, 4] = value
    edit_weights(copy, **{"model.layers.2.mlp.down_proj.weight": weight})
    refused(copy, "model.layers.2.mlp.down_proj.weight holds NaN or infinite")


def test_huge_weights_whose_sum_overflows_are_not_mistaken_for_infinite(copy):
    edit_weights(copy, **{"model.layers.2.mlp.down_proj.weight": torch.full((64, 128), 3e38)})
    load_checkpoint(str(copy))


# tokenizer
def test_a_folder_without_tokenizer_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    refused(copy, "no tokenizer")


def test_a_damaged_tokenizer_is_refused(copy):
    (copy / "tokenizer.json").write_text('{"version": "1.0"')
    refused(copy, "the tokenizer cannot be loaded")


def test_a_tokenizer_that_cannot_become_tokenizer_json_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text(json.dumps({chr(97 + index): index for index in range(26)}))
    (copy / "merges.txt").write_text("#version: 0.2\n")
    edit_json(copy / "tokenizer_config.json", tokenizer_class="CTRLTokenizer", backend=None)
    refused(copy, "CTRLTokenizer cannot be written as tokenizer.json")


# what the runtime would refuse in a finished bundle
@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{{ messages[0] }", "{{ " + "(" * 300 + ")" * 300 + " }}"]
)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_is_no_jinja_is_named_with_its_file(copy, name, template):
    """It failed an export at its end, and named the staging folder that was gone by then."""
    (copy / "chat_template.jinja").unlink()
    if name == "chat_template.jinja":
        (copy / name).write_text(template)
    else:
        edit_json(copy / name, chat_template=template)
    refused(copy, rf"copy/{name}: expected a Jinja template, found .*; mend or remove the template$")


def test_a_template_that_is_no_text_is_refused(copy):
    (copy / "chat_template.jinja").unlink()
    edit_json(copy / "tokenizer_config.json", chat_template=5)
    refused(copy, "copy/tokenizer_config.json: expected the text of a chat template, found 5; mend the file")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": "hot"}, "temperature: expected a number of at least 0, found 'hot'"),
        ({"top_k": 2.5}, "top_k: expected a whole number"),
        ({"do_sample": "yes"}, "do_sample: expected true or false, found 'yes'"),
        ({"stop_strings": [""]}, "stop_strings: expected text that is not empty"),
    ],
)
def test_a_setting_of_generation_that_no_runtime_takes_is_named_with_its_file(copy, setting, message):
    edit_json(copy / "generation_config.json", **setting)
    refused(copy, f"copy/generation_config.json, {message}")


def test_a_setting_of_generation_may_lie_in_config_json(copy):
    (copy / "generation_config.json").unlink()
    edit_json(copy / "config.json", temperature="hot")
    refused(copy, "copy/config.json, temperature: expected a number of at least 0, found 'hot'")
