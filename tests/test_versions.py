"""Every command says which version it is of."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import pop_export.cli
import pop_export.eval_cli
import pop_runtime.bench.cli
import pop_runtime.cli
import pop_runtime.compile.cli

MAINS = {
    "pop-export": pop_export.cli.main, "pop-eval": pop_export.eval_cli.main,
    "pop-bench": pop_runtime.bench.cli.main, "pop-compile": pop_runtime.compile.cli.main,
    "pop-run": pop_runtime.cli.main,
}  # fmt: skip


@pytest.mark.parametrize("command", MAINS)
def test_a_command_tells_its_version(command, capsys):
    with pytest.raises(SystemExit) as stop:
        MAINS[command](["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{command} {version('pop-export')}\n"
