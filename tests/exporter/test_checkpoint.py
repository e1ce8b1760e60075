"""Loading Hugging Face folders: what is accepted, and what the Checkpoint says of it."""

import json
import shutil
import socket

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from pop_export.checkpoint import load_checkpoint
from pop_runtime.manifest import sha256_of
from tests.tiny_models import TINY, byte_tokenizer, save_checkpoint, tiny_model

IDS = torch.tensor([[72, 101, 108, 108, 111]])


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


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_folder_gives_the_model_frozen_in_fp32_with_eager_attention(folder):
    checkpoint = load_checkpoint(str(folder), offline=True)
    model = checkpoint.model
    assert torch.equal(logits(model), logits(tiny_model()))
    assert not model.training and model.config._attn_implementation == "eager"
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters())
    assert checkpoint.tokenizer("Hi").input_ids == byte_tokenizer()("Hi").input_ids


def test_the_source_says_where_the_model_came_from(copy):
    (copy / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n")
    assert load_checkpoint(str(copy)).source == {
        "name": "copy",
        "source": str(copy),
        "revision": None,
        "sha256": sha256_of(copy / "model.safetensors"),
        "license": "apache-2.0",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_loaded_as_fp32(tmp_path, dtype):
    model = tiny_model().to(dtype)
    save_checkpoint(tmp_path / "half", model)
    loaded = load_checkpoint(str(tmp_path / "half")).model
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight.float())


def test_sharded_weights_are_loaded_and_all_shards_are_in_the_sha256(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    checkpoint = load_checkpoint(str(tmp_path))
    assert torch.equal(logits(checkpoint.model), logits(model))
    before = checkpoint.source["sha256"]
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    tensors = transformers.modeling_utils.load_state_dict(shard)
    from safetensors.torch import save_file

    save_file({name: value + 1 for name, value in tensors.items()}, shard, metadata={"format": "pt"})
    assert load_checkpoint(str(tmp_path)).source["sha256"] != before


def test_a_hub_cache_of_links_into_blobs_is_loaded_with_its_revision(folder, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = tmp_path / "snapshots" / revision, tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{index:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{index:040x}")
    checkpoint = load_checkpoint(str(snapshot))
    assert torch.equal(logits(checkpoint.model), logits(tiny_model()))
    assert checkpoint.source["revision"] == revision


@pytest.mark.parametrize("name", ["with space", "accenté", "模型", "trailing/"])
def test_folders_of_any_name_are_loaded(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / name)
    assert load_checkpoint(f"{tmp_path}/{name}").source["name"] == name.rstrip("/")


def test_a_relative_folder_is_loaded_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert load_checkpoint(".").source["name"] == "tiny"


def test_transformers_prints_nothing_while_a_folder_is_loaded(folder, capfd):
    load_checkpoint(str(folder))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# B09: the end id is declared in any of several places
@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "expected"),
    [
        ([260, 70], 70, "<eos>", (260, 70, 257)),
        (None, 70, "<eos>", (70, 257)),
        (None, None, "F", (37,)),
        (70, [71, 72], "<eos>", (70, 71, 72, 257)),
    ],
)
def test_end_ids_are_the_union_of_all_places(tmp_path, generation, config, tokenizer_eos, expected):
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.eos_token = tokenizer_eos
    save_checkpoint(tmp_path, tokenizer=tokenizer)
    edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    assert load_checkpoint(str(tmp_path)).eos_token_ids == expected


def test_an_end_id_outside_the_vocabulary_is_dropped_with_a_warning(copy, caplog):
    edit_json(copy / "generation_config.json", eos_token_id=[257, 300, -1])
    assert load_checkpoint(str(copy)).eos_token_ids == (257,)
    assert "end token id 300 is outside the vocabulary of 300 tokens" in caplog.text
    assert "end token id -1 is outside" in caplog.text


def test_the_token_after_an_answer_in_the_chat_template_ends_a_turn(tmp_path):
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m['role'] + m['content'] + '<turn>' }}{% endfor %}")
    save_checkpoint(tmp_path, tokenizer=tokenizer)
    assert load_checkpoint(str(tmp_path)).eos_token_ids == (257, 259)


def test_a_generation_config_that_lists_its_end_ids_is_not_added_to_by_the_template(tmp_path):
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m['role'] + m['content'] + '<turn>' }}{% endfor %}")
    save_checkpoint(tmp_path, tokenizer=tokenizer, eos_token_id=[257, 258])
    assert load_checkpoint(str(tmp_path)).eos_token_ids == (257, 258)


def test_a_chat_template_that_fails_is_a_warning_not_an_error(tmp_path, caplog):
    save_checkpoint(tmp_path, tokenizer=byte_tokenizer("{{ raise_exception('no') }}"))
    assert load_checkpoint(str(tmp_path)).eos_token_ids == (257,)
    assert "does not render" in caplog.text


def test_bos_and_pad_come_from_the_tokenizer_or_else_from_the_config(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.pad_token = None
    save_checkpoint(tmp_path, tokenizer=tokenizer)
    edit_json(tmp_path / "config.json", pad_token_id=None)
    edit_json(tmp_path / "generation_config.json", pad_token_id=None, bos_token_id=None)
    checkpoint = load_checkpoint(str(tmp_path))
    assert (checkpoint.bos_token_id, checkpoint.pad_token_id) == (256, None)


def test_more_tokens_than_embedding_rows_are_a_warning(tmp_path, caplog):
    save_checkpoint(tmp_path, tiny_model(transformers.LlamaConfig(**{**TINY, "vocab_size": 259})))
    load_checkpoint(str(tmp_path))
    assert "the tokenizer has 260 tokens, the embedding 259 rows" in caplog.text


def test_a_tensor_that_nothing_uses_is_a_warning(copy, caplog):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.zeros(2)}, copy / "model.safetensors", metadata={"format": "pt"})
    load_checkpoint(str(copy))
    assert "tensors that the model does not use: extra.weight" in caplog.text


def test_a_pickle_of_tensors_is_loaded_when_allowed(copy):
    (copy / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), copy / "pytorch_model.bin")
    assert torch.equal(logits(load_checkpoint(str(copy), allow_pickle=True).model), logits(tiny_model()))


def test_safetensors_are_preferred_to_a_pickle(copy):
    (copy / "pytorch_model.bin").write_bytes(b"not read")
    for allow_pickle in (False, True):
        assert load_checkpoint(str(copy), allow_pickle=allow_pickle).source["sha256"] == sha256_of(
            copy / "model.safetensors"
        )


def test_allowed_code_of_the_folder_runs(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (copy / "modeling_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nfrom transformers import LlamaForCausalLM as Own\n"
        "class OwnForCausalLM(Own):\n    pass\n"
    )
    edit_json(copy / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    checkpoint = load_checkpoint(str(copy), trust_remote_code=True)
    assert checkpoint.source["architecture"] == "OwnForCausalLM" and (tmp_path / "ran").exists()


def test_the_loaded_tokenizer_equals_what_transformers_loads(folder):
    text = "Hello <turn> wörld 日本"
    assert (
        load_checkpoint(str(folder)).tokenizer(text).input_ids == AutoTokenizer.from_pretrained(folder)(text).input_ids
    )


def test_a_hub_id_in_the_local_cache_is_loaded_offline(folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--some--model"
    shutil.copytree(folder, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    source = load_checkpoint("some/model", offline=True).source
    assert (source["name"], source["source"], source["revision"]) == ("model", "some/model", revision)


def test_loading_from_this_machine_never_asks_the_network(folder, monkeypatch):
    asked = []

    def record(*address, **_options):
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(socket.socket, "connect", record)
    load_checkpoint(str(folder), offline=True)
    load_checkpoint(str(folder))
    assert asked == []
