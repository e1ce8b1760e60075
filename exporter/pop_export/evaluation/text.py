"""Text to evaluate on: files read, encoded and cut into windows that do not overlap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pop_runtime.errors import UsageError
from pop_runtime.text import encode


@dataclass(frozen=True)
class Document:
    """The token ids of one file."""

    name: str  # as the user wrote it
    ids: np.ndarray  # [n] int64, no special tokens added
    first: tuple[int, ...]  # special tokens that the tokenizer puts before any text; every window begins with them


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; a byte order mark is dropped.

    Raises:
        UsageError: the file is missing, cannot be read, is not UTF-8 or holds nothing but white space.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"--data {path}: expected a text file, found none; check the path") from error
    except OSError as error:
        raise UsageError(f"--data {path}: cannot be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data {path}: expected UTF-8, found byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "convert the file"
        ) from error
    if not text.strip():
        raise UsageError(f"--data {path}: expected text, found an empty file; give another")
    return text


def encode_document(name: str, text: str, tokenizer: Tokenizer) -> Document:
    """Return a file's text as token ids, and what the tokenizer by itself puts before text."""
    bare, whole = encode(tokenizer, "a", False), encode(tokenizer, "a", True)
    at = whole.index(bare[0]) if bare and bare[0] in whole else 0
    return Document(name, np.array(encode(tokenizer, text, False), np.int64), tuple(whole[:at]))


def cut_windows(document: Document, length: int, num_windows: int, seed: int) -> np.ndarray:
    """Return windows of `length` token ids spread over the document, in its order, [n, length] int64.

    They do not overlap; every such placement is equally likely. There are fewer than `num_windows` where the document
    is too short for so many.

    Raises:
        UsageError: not one window fits.
    """
    own = length - len(document.first)  # tokens of text in each window
    fitting = len(document.ids) // own if own > 0 else 0
    if fitting == 0:
        raise UsageError(
            f"--data {document.name}: expected at least {own} tokens for one window, found {len(document.ids)}; "
            "give a longer file or lower --context or --continuation"
        )
    count = min(num_windows, fitting)
    slack = len(document.ids) - count * own
    gaps = np.sort(np.random.default_rng(seed).integers(0, slack + 1, count))  # [n], tokens left out before each
    starts = gaps + np.arange(count) * own
    rows = [np.concatenate([document.first, document.ids[start : start + own]]) for start in starts]
    return np.stack(rows).astype(np.int64)  # [n, length]
