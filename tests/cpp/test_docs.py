"""What docs/cpp.md shows is what CI builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpp.conftest import PROGRAM, REPOSITORY, PopRun
from tests.runtime.tiny_bundle import make_bundle

CONSUMER = REPOSITORY / "tests" / "cpp" / "consumer"
CMAKE = Path(sys.executable).parent / "cmake"


@pytest.mark.parametrize("name", ["CMakeLists.txt", "main.cpp"])
def test_the_project_in_the_page_is_the_one_that_is_built(name: str) -> None:
    page = (REPOSITORY / "docs" / "cpp.md").read_text()
    shown = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert shown.group(1) == (CONSUMER / name).read_text()


def test_it_has_twenty_lines() -> None:
    lines = [line for path in CONSUMER.iterdir() for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 20


@pytest.mark.cpp
def test_a_project_of_a_user_builds_on_the_installed_package_and_runs(tmp_path: Path, pop_run: PopRun) -> None:
    built = PROGRAM.parent
    prefix = f"{built / 'installed'};{built / 'deps' / 'usr'}"
    environment = {**os.environ, "PATH": f"{CMAKE.parent}:{os.environ['PATH']}"}
    for command in (
        ["cmake", "-S", str(CONSUMER), "-B", str(tmp_path / "build"), f"-DCMAKE_PREFIX_PATH={prefix}"],
        ["cmake", "--build", str(tmp_path / "build")],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    bundle = make_bundle(tmp_path / "bundle")
    done = subprocess.run([tmp_path / "build" / "first_token", bundle], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = pop_run(bundle, "--ids", "5,6,7", "--json", "--max-new-tokens", 20).json["new_token_ids"]
    assert done.stdout.splitlines()[0].split() == [str(token) for token in ids]
    refused = subprocess.run([tmp_path / "build" / "first_token", tmp_path / "none"], capture_output=True, text=True)
    assert refused.returncode == 3 and "expected a bundle folder" in refused.stderr
