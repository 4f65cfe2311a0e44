"""A process ends after its command, also if a thread of a user's class goes on, and names the thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from titan_moe import cli
from titan_moe.run import end_process

atexit.register(print, "exit functions ran")
def wait_for_ever():
    time.sleep({seconds})
def command(argv):
    threading.Thread(target=wait_for_ever, name="the user's thread").start()
    {end}
cli._command = command
cli.end_soon.__defaults__ = (0.3,)
sys.exit(cli.main())
"""


def ended(end: str, seconds: float = 60.0) -> tuple[int, str, str]:
    """Exit code and outputs of a process whose command ends so and leaves a thread of this many seconds."""
    program = PROGRAM.format(end=end, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("end", "expected"),
    [("return 0", 0), ("return 2", 2), ("raise SystemExit(130)", 130), ("raise ArithmeticError('words')", 1)],
)
def test_a_process_does_not_wait_for_ever(end: str, expected: int) -> None:
    code, out, error = ended(end)
    assert code == expected and out == "exit functions ran\n"
    assert "these threads went on for 0.3 seconds: the user's thread at <string>:8; the process ends" in error
    assert ("ArithmeticError: words" in error) == (expected == 1)


def test_a_thread_that_ends_soon_is_waited_for() -> None:
    assert ended("return 3", seconds=0.1) == (3, "exit functions ran\n", "")
