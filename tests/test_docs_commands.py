"""The commands in README.md and docs/ are ones that can be run: programs, flags and files of those names exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import pop_export.cli
import pop_export.eval_cli
import pop_runtime.bench.cli
import pop_runtime.compile.cli
import pop_runtime.flags

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PARSERS: dict[str, argparse.ArgumentParser] = {
    "pop-export": pop_export.cli.parser(),
    "pop-eval": pop_export.eval_cli.parser(),
    "pop-run": pop_runtime.flags.make_parser(),
    "pop-bench": pop_runtime.bench.cli._parser(),
    "pop-compile": pop_runtime.compile.cli._parser(),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"(pop-[a-z]+|python benchmarks/\w+\.py)(?= |$)([^|#]*)")
INNER = re.compile(r"\$\(([^)]*)\)")  # a command whose output is an argument


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Return the program and the flags of every command in indented blocks and in code spans."""
    whole = page.replace("\\\n", " ")
    blocks = re.findall(r"^ {4}(.*)$", whole, re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page)]
    lines = [part for line in (*blocks, *spans) for part in (INNER.sub("", line), *INNER.findall(line))]
    found = [COMMAND.match(line) for line in lines]
    return [(match[1], FLAG.findall(match[2])) for match in found if match]


def test_commands_are_found_in_blocks_over_lines_and_in_spans():
    page = (
        '    pop-bench out --ep cpu \\\n        --peers "$(python benchmarks/peer_models.py --out X)" --json  # --no\n'
        "\nor `python benchmarks/plans.py --model\nX`, `pop_run -x`\n"
    )
    assert commands_of(page) == [
        ("pop-bench", ["--ep", "--peers", "--json"]),
        ("python benchmarks/peer_models.py", ["--out"]),
        ("python benchmarks/plans.py", ["--model"]),
    ]
    assert sum(len(commands_of(page.read_text())) for page in PAGES) > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_takes_the_flags_that_it_shows(page):
    for program, flags in commands_of(page.read_text()):
        if program in PARSERS:
            known = set(PARSERS[program]._option_string_actions)
        else:
            script = ROOT / program.removeprefix("python ")
            assert script.is_file(), f"{page.name}: {program}"
            known = set(FLAG.findall(" ".join(re.findall(r'"(--[^"]+)"', script.read_text()))))
        assert set(flags) <= known, f"{page.name}: {program}: {set(flags) - known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_one_of_some_program(page):
    known = {flag for parser in PARSERS.values() for flag in parser._option_string_actions}
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'"(--[^"]+)"', script.read_text()))
    spans = [span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text()) if span.startswith("--")]
    assert {flag for span in spans for flag in FLAG.findall(span)} <= known
