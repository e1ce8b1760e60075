from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from pop_export.interrupts import held_interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_comes_when_the_block_has_ended(number):
    seen: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), held_interrupts("work"):
            signal.raise_signal(number)
            seen.append("the block went on")
        assert seen and signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


@pytest.fixture
def heeded():
    """SIGINT as a terminal delivers it: a shell starts background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_comes_in_the_place_of_the_blocks_own_error(heeded):
    with pytest.raises(KeyboardInterrupt), held_interrupts("work"):
        signal.raise_signal(signal.SIGINT)
        raise ValueError


def test_a_second_interrupt_ends_the_process():
    script = """
import signal
from pop_export.interrupts import held_interrupts
with held_interrupts("work"):
    signal.raise_signal(signal.SIGINT)
    print("held", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("never")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs start with it ignored
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "held\n")
    assert done.stderr == "interrupted; ends after work; interrupt again to end at once\n"


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts("work"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_use_it():
    done = []

    def work() -> None:
        with held_interrupts("work"):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
