"""Where calibration text comes from: `.txt` and `.jsonl` files, Hugging Face data sets, or the default corpus."""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pop_export.quiet import first_line
from pop_runtime.errors import UsageError

EXPECTED = "expected a .txt file, a .jsonl file or a Hugging Face data set id (id[@config][:split[:column]])"
# With much to say of themselves; benchmarks/texts.py measures on other modules.
DOCSTRING_MODULES = (
    "configparser", "datetime", "gettext", "imaplib", "inspect", "locale", "optparse", "pathlib", "pydoc", "random",
    "shutil", "smtplib", "statistics", "subprocess", "tarfile", "textwrap", "turtle", "typing", "uuid", "zipfile",
)  # fmt: skip
MAX_DATASET_ROWS = 2000  # read from the start of a data set, streamed: 48 samples need far fewer


@dataclass(frozen=True)
class Text:
    """One document: plain text or a rendered conversation."""

    text: str
    with_bos: bool  # every window of it begins with a bos token (which `text` does not hold)


@dataclass(frozen=True)
class Source:
    """Distinct documents from one place."""

    name: str  # as the user wrote it
    texts: tuple[Text, ...]


def read_source(item: str, tokenizer: Any, *, offline: bool = False) -> Source:
    """Return the documents of one `--calibration-data` item.

    - `.txt`: UTF-8 text, one document;
    - `.jsonl`: one JSON object per line, with `text` (a string) or `messages` (a list of objects with `role` and
      `content`, rendered with the tokenizer's chat template); `text` wins;
    - else a data set id, `id[@config][:split[:column]]`: split "train" and rows as in `.jsonl` unless given. The first
      `MAX_DATASET_ROWS` rows are read.

    Raises:
        UsageError: it cannot be read or holds no text (one line: place, expected, found, next step).
    """
    suffix = Path(item).suffix.lower()
    if suffix == ".txt":
        texts = [_plain(_read_text(item), tokenizer)]
    elif suffix == ".jsonl":
        texts = _jsonl(item, tokenizer)
    elif _looks_like_a_path(item):
        raise UsageError(f"--calibration-data {item}: {EXPECTED}, found another kind of file")
    else:
        texts = _dataset(item, tokenizer, offline)
    texts = [text for text in dict.fromkeys(texts) if text.text.strip()]
    if not texts:
        raise UsageError(f"--calibration-data {item}: expected text, found none; give another file")
    return Source(item, tuple(texts))


def default_source(tokenizer: Any) -> Source:
    """Return the documentation text that ships inside CPython.

    Raises:
        UsageError: this Python was packaged without it.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UsageError(
            "the default calibration corpus is missing: this Python ships no pydoc_data; give --calibration-data"
        ) from error
    name = f"default corpus: documentation text shipped in CPython {platform.python_version()} (pydoc_data.topics)"
    return Source(name, tuple(_plain(topics[topic], tokenizer) for topic in sorted(topics)))


def docstring_source(tokenizer: Any) -> Source:
    """Return what modules of Python's standard library say of themselves, a text per module.

    Raises:
        UsageError: this Python was packaged without their source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{module}.py" for module in DOCSTRING_MODULES]
    texts = [_plain(_docstrings(file), tokenizer) for file in files if file.is_file()]
    if not texts:
        raise UsageError(
            "the default text to fit on is missing: this Python ships no source of its library; give --calibration-data"
        )
    name = f"default corpus: docstrings of the standard library of CPython {platform.python_version()}"
    return Source(name, tuple(texts))


def _docstrings(file: Path) -> str:
    """Return the docstrings of a module, its classes and functions, a paragraph each."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def _looks_like_a_path(item: str) -> bool:
    """Tell a file of another kind from a data set id: `org/name`, or a name whose last part may hold `v1.5`."""
    try:
        exists = Path(item).exists()
    except OSError:  # a name that no file can have
        exists = False
    return (
        exists
        or item.startswith((".", "~", "/"))
        or item.count("/") > 1
        or re.fullmatch(r"\.[A-Za-z]\w*", Path(item).suffix) is not None
    )


def _read_text(item: str) -> str:
    """Return a file's text; a byte order mark is dropped."""
    try:
        data = Path(item).read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"--calibration-data {item}: no such file") from error
    except OSError as error:
        raise UsageError(f"--calibration-data {item}: cannot be read ({error.strerror})") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--calibration-data {item}: expected UTF-8, found byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert the file"
        ) from error


def _jsonl(item: str, tokenizer: Any) -> list[Text]:
    """Return the documents of a `.jsonl` file; blank lines are passed over."""
    texts = []
    # Not splitlines(): JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(_read_text(item).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON; too many digits; nested too deep
            found = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise UsageError(f"{item}:{number}: expected one JSON object, found bad JSON ({found})") from error
        texts.append(_row(row, f"{item}:{number}", tokenizer))
    return texts


def _row(row: Any, place: str, tokenizer: Any) -> Text:
    """Return the document of one row."""
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        text = _plain(row["text"], tokenizer)
    elif isinstance(row, dict) and isinstance(row.get("messages"), list):
        text = _conversation(row["messages"], place, tokenizer)
    else:
        found = f"keys {', '.join(map(str, row)) or '(none)'}" if isinstance(row, dict) else type(row).__name__
        raise UsageError(f'{place}: expected an object with "text" (a string) or "messages" (a list), found {found}')
    if re.search("[\ud800-\udfff]", text.text):  # JSON can spell it; UTF-8 and tokenizers cannot
        raise UsageError(f"{place}: expected text, found half a surrogate pair in it; mend or drop the row")
    return text


def _plain(text: str, tokenizer: Any) -> Text:
    """Return plain text, which begins as the tokenizer begins any text."""
    bos = tokenizer.bos_token_id
    return Text(text, with_bos=bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos])


def _conversation(messages: list[Any], place: str, tokenizer: Any) -> Text:
    """Return a conversation as the chat template renders it."""
    if not tokenizer.chat_template:
        raise UsageError(
            f'{place}: "messages" needs a chat template, and the tokenizer has none; give rows with "text"'
        )
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template may raise anything
        raise UsageError(f'{place}: "messages" does not fit the chat template ({first_line(error)})') from error
    bos = tokenizer.bos_token
    begins = bool(bos) and rendered.startswith(bos)
    return Text(rendered.removeprefix(bos) if begins else rendered, with_bos=begins)


def _dataset(item: str, tokenizer: Any, offline: bool) -> list[Text]:
    """Return the documents of the first rows of a Hugging Face data set."""
    if offline:
        raise UsageError(
            f"--calibration-data {item}: no such file, and a Hugging Face data set cannot be fetched with --offline; "
            "give a .txt or .jsonl file"
        )
    match = re.fullmatch(r"([\w.\-]+(?:/[\w.\-]+)?)(?:@([\w.\-]+))?(?::([^:]+)(?::([^:]+))?)?", item)
    if match is None:
        raise UsageError(f"--calibration-data {item}: {EXPECTED}")
    name, config, split, column = match.groups()
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"--calibration-data {item}: no such file, and data sets need one more package; pip install datasets"
        ) from error
    try:
        stream: Iterable[dict[str, Any]] = datasets.load_dataset(name, config, split=split or "train", streaming=True)
        rows = list(islice(stream, MAX_DATASET_ROWS))
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--calibration-data {item}: the data set cannot be read ({first_line(error)})") from error
    return [_dataset_row(row, column, f"{item}, row {number}", tokenizer) for number, row in enumerate(rows)]


def _dataset_row(row: dict[str, Any], column: str | None, place: str, tokenizer: Any) -> Text:
    """Return the document of one row; a named column holds text or messages, whatever it is called."""
    if column is None:
        return _row(row, place, tokenizer)
    if column not in row:
        raise UsageError(f"{place}: no column {column}; there are {', '.join(row)}")
    value = row[column]
    return _row({"text": value} if isinstance(value, str) else {"messages": value}, place, tokenizer)
