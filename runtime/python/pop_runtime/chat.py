"""Chat messages to text, by the bundle's Jinja template, in the environment that templates are written for.

The environment is that of transformers (`transformers/utils/chat_template_utils.py`): a sandbox with trimmed blocks,
loop controls, `tojson` that does not escape HTML, `raise_exception`, `strftime_now` and `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pop_runtime.errors import ModelError, UsageError
from pop_runtime.text import check_text

Message = Mapping[str, Any]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def is_messages(prompt: object) -> bool:
    """Return whether a prompt is a list of messages, and not text or token ids."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


class _GenerationTag(Extension):
    """Lets `{% generation %}...{% endgeneration %}`, which marks text for training, through as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared an instance variable in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may name, from the content of `tokenizer_config.json`."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        token = token.get("content") if isinstance(token, dict) else token  # either a string or an AddedToken
        if isinstance(token, str):
            found[name] = token
    return found


def compile_template(source: str, place: str, next_step: str = "re-run pop-export") -> jinja2.Template:
    """Return the template, ready to render.

    Args:
        source: its text.
        place: where that lies, for messages.
        next_step: what mends it.

    Raises:
        ModelError: it is not a Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # not of jinja2 alone: Python compiles what it makes of a template
        found = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{place}: expected a Jinja template, found {found}; {next_step}") from error


def render_chat(
    template: jinja2.Template,
    messages: Sequence[Message],
    tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a conversation, ending where the assistant's answer begins.

    Args:
        template: from `compile_template`.
        messages: each with `role` and `content`.
        tokens: from `special_tokens`.
        add_generation_prompt: whether to open the assistant's turn.

    Raises:
        UsageError: a message lacks role or content, or the template refuses the conversation.
    """
    check_messages(messages)
    try:
        return template.render(
            **tokens, messages=[dict(message) for message in messages], tools=None, documents=None,
            add_generation_prompt=add_generation_prompt,
        )  # fmt: skip
    except Exception as error:  # a template is a program and may fail in any way
        reason = " ".join(str(error).split())
        raise UsageError(
            f"chat template: expected messages it accepts, found {reason}; change roles or order"
        ) from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UsageError unless every message has a role and a content, which if it is text is UTF-8."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UsageError(f"prompt, message {index}: expected role and content, found {message!r}")
        if isinstance(message["content"], str):
            check_text(message["content"], f"prompt, message {index}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON without HTML escapes, which is what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """Let a template refuse a conversation."""
    raise jinja2.TemplateError(message)
