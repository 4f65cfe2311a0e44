"""Where the time of a step goes: python tools/examples/trace_a_run.py [RECIPE.toml] [--section.key=value ...]

`titan-moe trace` profiles a few steady steps and writes RUN/trace/report.html; this prints the same parts.
"""

import sys
from pathlib import Path

from titan_moe.cli import main as titan_moe
from titan_moe.profile.breakdown import Breakdown, break_down
from titan_moe.profile.trace_parsing import read_trace

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def main(*words: str) -> Breakdown:
    recipe, overrides = (words[0], words[1:]) if words and not words[0].startswith("--") else (str(RECIPE), words)
    run_folder = Path("runs/traced")
    if code := titan_moe(["trace", recipe, f"--run.folder={run_folder}", *overrides]):
        sys.exit(code)
    (trace,) = (run_folder / "trace" / "traces").iterdir()  # one a rank
    times = break_down(read_trace(trace))
    print(f"{times.step_ms:.1f} ms a step under the profiler, {times.idle_ms:.1f} ms of it idle")
    for name, part in sorted(times.parts.items(), key=lambda item: -item[1].total_ms):
        print(f"{name:24} forward {part.forward_ms:8.2f} ms  backward {part.backward_ms:8.2f} ms")
    return times


if __name__ == "__main__":
    main(*sys.argv[1:])
