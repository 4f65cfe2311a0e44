"""Console output: the line of a step, and the progress bar."""

import io
import os
import subprocess
import sys

import pytest

from titan_moe.metrics.console import Console, TimeLeft, format_start, line_words

RECORD = {
    "step": 20,
    "loss": 2.34567,
    "aux_loss": 0.012,
    "grad_norm": 1.5,
    "lr": 3e-4,
    "tokens_seen": 1,
    "skipped_steps": 0,
    "rerun_steps": 0,
    "rerun_share": 0.0,
    "tokens_per_second_per_gpu": 12345.6,
    "tflops_per_gpu": 284.0,
    "mfu": 0.2871,
    "memory_gib": 91.234,
    "step_ms": 654.3,
    "expert_load": {"layers.0": 1.2, "layers.1": 2.25},
    "idle_experts": {"sum": 0, "max": 0},
}


def format_line(record, total_steps, unit):
    return "  ".join(line_words(record, total_steps, unit))


def test_console_line():
    assert format_line(RECORD, 1000, "GPU") == (
        "step   20/1000    2%  loss 2.3457  aux 1.20e-02  norm 1.500  lr 3.00e-04  12,346 tokens/s/GPU  284 TFLOP/s  "
        "MFU 28.7%  91.23 GiB  654 ms  expert load 2.25"
    )


def test_console_line_omits_missing_values():
    line = format_line(RECORD | {"mfu": None, "aux_loss": 0.0, "expert_load": {}}, 20, "process")
    assert "MFU" not in line and "aux" not in line and "load" not in line and "tokens/s/process" in line


def test_console_line_counts_skipped_and_repeated_steps() -> None:
    line = format_line(RECORD | {"skipped_steps": 2, "rerun_steps": 1, "rerun_share": 0.05}, 20, "GPU")
    assert line.endswith("SKIPPED 2 steps, where gradients were not finite  1 step rerun (5.0%)")


def test_console_line_has_idle_experts_and_overload() -> None:
    overload = {"avg": 1.1, "max": 1.4, "cum": 1.05}
    line = format_line(RECORD | {"idle_experts": {"sum": 3, "max": 2}, "overload": overload}, 20, "GPU")
    assert line.endswith("expert load 2.25  3 idle experts  overload 1.40")


def test_console_start_line() -> None:
    record = RECORD | {"idle_experts": {"sum": 3, "max": 2}, "busiest_rank": 5}
    record["overload"] = {"avg": 1.1, "max": 1.4, "cum": 1.05}
    assert format_start(record, 1024) == (
        "routing at the start: busiest expert 2.25 times the mean (layers.1); 3 of 1,024 experts idle; "
        "overload of ranks avg 1.10, max 1.40, cum 1.05, busiest rank 5"
    )


def test_console_line_warns_of_a_forced_load():
    assert format_line(RECORD | {"forced_load": "skewed"}, 20, "GPU").endswith("FORCED LOAD: SKEWED")


def test_console_validation_line():
    assert format_line({"step": 5, "validation_loss": 1.25}, 10, "GPU") == "step  5/10   50%  validation loss 1.2500"


def test_console_line_has_the_time_left() -> None:
    assert line_words(RECORD, 1000, "GPU", "1:02:03 left")[0] == "step   20/1000    2%, 1:02:03 left"
    left = TimeLeft(100)
    assert left.after(1, 50.0) == "", "the first step compiles"
    assert [left.after(step, 50.0 + 2 * step) for step in (11, 99, 100)] == ["0:03:16 left", "0:00:02 left", ""]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_console_has_colours_on_a_terminal_alone(monkeypatch):
    for stream, variables, has_colours in (
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            for name, value in variables.items():
                patch.setenv(name, value)
            console = Console(10, 4, "GPU", has_bar=False)
            console.write(RECORD | {"skipped_steps": 2})
            console.write(RECORD)
        first, second = stream.getvalue().splitlines()
        assert ("\x1b" in first) == has_colours
        if has_colours:
            assert "  \x1b[1mloss 2.3457\x1b[0m  aux 1" in first and "\x1b[33mSKIPPED 2 steps" in first


def test_console_bar_only_on_a_terminal(monkeypatch, capsys):
    for stream, has_bar, expected in (
        (io.StringIO(), True, False),
        (Terminal(), False, False),
        (Terminal(), True, True),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        console = Console(10, 4, "GPU", has_bar=has_bar)
        assert (console.bar is not None) == expected
        console.advance()
        console.write(RECORD)
        console.close()
        assert capsys.readouterr().out == format_line(RECORD, 10, "GPU") + "\n"
    assert "5/10" in stream.getvalue() and "loss 2.346" in stream.getvalue()


def test_console_has_no_bar_beside_a_pipe_or_on_a_dumb_terminal(monkeypatch):
    """What reads the pipe, such as `tee`, writes to the same terminal."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert Console(10, 4, "GPU", has_bar=True).bar is None
    os.close(reader)
    monkeypatch.setenv("TERM", "dumb")
    assert Console(10, 4, "GPU", has_bar=True).bar is None


@pytest.mark.slow
def test_console_that_is_lost_does_not_end_a_run() -> None:
    """A closed pipe, as of `titan-moe train ... | head`; the process then ends without an error."""
    program = (
        "import logging\n"
        "from titan_moe.metrics.console import Console\n"
        "RECORD = {record!r}\n"
        "logging.basicConfig(format='%(message)s')\n"
        "console = Console(20, 0, 'GPU', has_bar=False)\n"
        "for _ in range(3):\n"
        "    console.write(RECORD)\n"
    )
    program = program.replace("{record!r}", repr(RECORD))
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("standard output is lost ([Errno 32] Broken pipe); the run goes on") == 1
