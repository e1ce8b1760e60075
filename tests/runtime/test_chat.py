import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

import pop_runtime
from pop_runtime.chat import compile_template, render_chat, special_tokens
from pop_runtime.errors import ModelError, UsageError
from tests.runtime.conftest import CHAT_TEMPLATE, byte_tokenizer_json, chat_files
from tests.runtime.tiny_bundle import make_bundle

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Hé\nllo"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Who?"},
]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "bos": "{{ bos_token }}" + CHAT_TEMPLATE,
    "blocks": "{%- for m in messages %}\n  {% if loop.last %}\n[{{ m['role'] | upper }}]\n  {% endif %}\n"
    "{{ m.content | trim }}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "optional": "{% if tools is not none %}T{% endif %}{% if documents %}D{% endif %}"
    "{% if thinking is defined %}X{% endif %}{{ pad_token }}{{ strftime_now('%%') }}",
}


def _reference(template: str, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **TOKENS)
    reference.chat_template = template
    return reference


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("open_turn", [True, False])
def test_a_rendered_chat_is_that_of_transformers(name: str, open_turn: bool) -> None:
    wanted = _reference(TEMPLATES[name]).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=open_turn)
    assert render_chat(compile_template(TEMPLATES[name], name), MESSAGES, TOKENS, open_turn) == wanted


def test_special_tokens_are_strings_or_objects() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": None, "other": "x"}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_ids_hold_one_bos_when_both_template_and_tokenizer_would_add_it(tmp_path: Path) -> None:
    reference = _reference(TEMPLATES["bos"], adds_bos=True)
    files = {**chat_files(TEMPLATES["bos"]), "tokenizer.json": reference.backend_tokenizer.to_str()}
    model = pop_runtime.load(make_bundle(tmp_path, text_files=files), threads=1)
    ids = model.encode_prompt(MESSAGES)
    assert ids == list(reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))
    assert ids.count(256) == 1
    assert model.encode_prompt("hi", raw=True) == reference("hi")["input_ids"]
    assert model.encode_prompt("", raw=True) == [256]
    assert model.encode_prompt("hi", raw=True, is_first_turn=False) == reference("hi")["input_ids"][1:]


def test_text_is_one_user_message(chat_model: pop_runtime.Model) -> None:
    assert chat_model.encode_prompt("hi") == chat_model.encode_prompt([{"role": "user", "content": "hi"}])
    assert chat_model.encode_prompt("hi") != chat_model.encode_prompt("hi", raw=True)


def test_without_a_template_text_is_raw_and_messages_are_refused(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, text_files=chat_files(None)), threads=1)
    assert model.encode_prompt("hi") == model.encode_prompt("hi", raw=True)
    with pytest.raises(UsageError, match="expected a chat template for messages, found none"):
        model.encode_prompt(MESSAGES)


def test_without_a_tokenizer_text_is_refused(model: pop_runtime.Model) -> None:
    with pytest.raises(UsageError, match="expected a tokenizer for a text prompt, found none"):
        model.encode_prompt("hi")


def test_messages_cannot_be_raw(chat_model: pop_runtime.Model) -> None:
    with pytest.raises(UsageError, match="raw: expected text or token ids, found messages"):
        chat_model.encode_prompt(MESSAGES, raw=True)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_a_prompt_without_tokens_is_refused(chat_model: pop_runtime.Model, prompt: Any) -> None:
    with pytest.raises(UsageError, match="expected at least one token, found none"):
        chat_model.encode_prompt(prompt, raw=True)


@pytest.mark.parametrize("message", ["text", {"role": "user"}, {"content": "x"}])
def test_a_message_without_role_or_content_is_refused(message: Any) -> None:
    with pytest.raises(UsageError, match="message 1: expected role and content"):
        render_chat(compile_template("x", "x"), [MESSAGES[0], message], {})


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[9].role.x }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_refuses_gives_one_line(template: str) -> None:
    with pytest.raises(UsageError, match="chat template: expected messages it accepts") as caught:
        render_chat(compile_template(template, "x"), MESSAGES, {})
    assert "\n" not in str(caught.value)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(UsageError, match="unsafe"):
        render_chat(compile_template("{{ ''.__class__.__mro__[1].__subclasses__() }}", "x"), MESSAGES, {})


def test_a_template_that_is_none_is_named() -> None:
    with pytest.raises(ModelError, match=r"chat_template.jinja: expected a Jinja template, found"):
        compile_template("{% for %}", "chat_template.jinja")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_damaged_text_file_is_named(tmp_path: Path, text: str) -> None:
    folder = make_bundle(tmp_path, text_files=chat_files())
    (folder / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    model = pop_runtime.load(folder, threads=1, verify=False)
    with pytest.raises(ModelError, match=r"tokenizer_config.json: expected"):
        model.encode_prompt("hi")


def test_the_template_file_is_read_as_it_is(chat_bundle: Path) -> None:
    config = json.loads((chat_bundle / "tokenizer_config.json").read_text())
    assert special_tokens(config)["eos_token"] == "<eos>"


def test_a_prompt_is_rendered_as_it_is_encoded(chat_model: pop_runtime.Model, model: pop_runtime.Model) -> None:
    assert chat_model.render_prompt("hi") == "<turn>user:hi<eos><turn>assistant:"
    assert chat_model.encode_prompt("hi") == chat_model.tokenizer.encode(chat_model.render_prompt("hi")).ids  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="expected a chat template for messages, found none"):
        model.render_prompt("hi")
