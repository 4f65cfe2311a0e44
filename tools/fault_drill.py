"""Disturb small runs over gloo at random moments, resume them, and compare them with undisturbed ones.

    python tools/fault_drill.py --kills 100 --rank-kills 20 --stops 10 --bits 20 --full-disks 3 --launcher-kills 6

A run that a fault has ended must leave no process behind, end within its limit, and go on from its newest checkpoint. A
run that is finished after all of its faults must have the losses of an undisturbed run, bit for bit. The table has a
row for each kind of fault and number of ranks; the exit code is 1 if anything was lost. Linux only.

    fault          what is done                                            expected
    kill           SIGKILL to all processes of a run                       no process left
    rank kill      SIGKILL to one rank                                     all others end, the launcher names it
    stop           SIGSTOP to one rank                                     all end within the limit, naming the rank
    launcher kill  SIGKILL to the launcher                                 its ranks end
    full disk      room for less than the run's checkpoints                exit code 1, one sentence; goes on with room
    flipped bit    in a file of the newest checkpoint of a finished run    refused, with the name of the file
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

RECIPE = Path(__file__).parents[1] / "tests" / "training" / "tiny.toml"
STEPS = {1: 240, 2: 120, 4: 60}
"""Number of ranks -> steps of a run: some seconds of training, with a save every SAVE_STEPS."""
SAVE_STEPS = 4
LONGEST_DELAY_S = 4.0
"""Between a run's first new step and its fault."""
START_SHARE = 0.15
"""Of faults that come before the first step: while the run imports, builds or loads."""
SHUTDOWN_S = 5
"""Torchrun's time for ranks that do not end (torch 2.13; 30 s before)."""
SLACK_S = 120.0
"""For a busy machine: a fault must end its run within its limit and this."""
ROOM_BYTES = 1_000_000
MARK = "TITAN_MOE_DRILL"


@dataclass
class Row:
    """The results of one kind of fault on one number of ranks."""

    fault: str
    num_ranks: int
    num_faults: int = 0
    num_in_saves: int = 0
    longest_s: float = 0.0
    """From the fault to the end of the last process."""
    num_resumed: int = 0
    num_runs: int = 0
    """Runs that were compared with an undisturbed one."""
    problems: list[str] = field(default_factory=list)

    def cells(self) -> str:
        """A line of the table."""
        runs = f"{self.num_runs} of {self.num_runs}" if not self.problems else f"{len(self.problems)} problems"
        words = (self.fault, self.num_ranks, self.num_faults, self.num_in_saves, f"{self.longest_s:.1f}", runs)
        return "| " + " | ".join(map(str, words)) + " |"


HEADER = """\
| fault | ranks | faults | of them in a save | longest time to the end, s | runs equal to an undisturbed one |
|---|---|---|---|---|---|"""


class Run:
    """A run folder and the processes that train in it."""

    def __init__(self, folder: Path, num_ranks: int, *words: str) -> None:
        self.folder, self.num_ranks, self.mark = folder, num_ranks, uuid4().hex
        self.errors = folder.with_suffix(".stderr")
        saves = (f"--train.steps={STEPS[num_ranks]}", f"--checkpoint.every_steps={SAVE_STEPS}")
        self.words = [f"--run.folder={folder}", "--train.micro_batch_sequences=1", *saves, *words]

    def start(self, *words: str, before: Callable[[], None] | None = None) -> None:
        """Start or resume it."""
        variables = {name: os.environ[name] for name in os.environ if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        variables |= {MARK: self.mark, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        if before is limit_files:  # it would cut off compiled modules too, which other processes read
            variables["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, "-m", "titan_moe", "train", str(RECIPE), "--nproc", str(self.num_ranks)]
        self.size_before = self._size()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *self.words, *words],
                stdout=subprocess.DEVNULL, stderr=errors, env=variables, start_new_session=True, preexec_fn=before,
            )  # fmt: skip

    def wait_for_step(self) -> None:
        """Wait until this process has logged a step, or has ended."""
        while self.process.poll() is None and self._size() <= self.size_before:
            time.sleep(0.01)

    def wait_for_end(self, seconds: float) -> float:
        """Wait until no process is left; returns the seconds that it took. Kills what is left then.

        Raises: TimeoutError if something was left.
        """
        begin = time.monotonic()
        while self.pids() and time.monotonic() < begin + seconds:
            self.process.poll()
            time.sleep(0.05)
        left, words = self.pids(), []
        for pid in left:
            with suppress(OSError):
                words.append((Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " "))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if left:
            raise TimeoutError(
                f"{len(left)} processes were left after {seconds:.0f} s: {'; '.join(words)}\n{self.said}"
            )
        return time.monotonic() - begin

    def pids(self, rank: int | None = None) -> list[int]:
        """The processes of the run, or of one of its ranks; without the ended ones."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")  # empty for an ended process
                if needle in variables and (rank is None or f"RANK={rank}".encode() in variables):
                    found.append(int(folder.name))
        return sorted(found)

    @property
    def complete_steps(self) -> list[int]:
        """The steps with complete checkpoints."""
        files = (self.folder / "checkpoints").glob("step-*/.metadata")
        return sorted(int(file.parent.name.removeprefix("step-")) for file in files)

    @property
    def is_in_save(self) -> bool:
        """Whether a checkpoint is incomplete."""
        steps = list((self.folder / "checkpoints").glob("step-*"))
        return any(not (step / ".metadata").exists() for step in steps)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        records = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    @property
    def said(self) -> str:
        """What the last process has printed on standard error."""
        return self.errors.read_text()

    def _size(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.stat().st_mtime_ns if path.exists() else 0


class Drill:
    """Faults on one number of ranks, and their results."""

    def __init__(self, folder: Path, num_ranks: int, limit_minutes: float, chance: random.Random) -> None:
        self.folder, self.num_ranks, self.limit_minutes, self.chance = folder, num_ranks, limit_minutes, chance
        self.num_folders = 0
        straight = self.new_run()
        straight.start()
        straight.wait_for_end(300)
        if straight.process.returncode:
            raise SystemExit(f"the undisturbed run on {num_ranks} ranks has failed:\n{straight.said}")
        self.straight, self.expected = straight, straight.losses

    def new_run(self, folder: Path | None = None) -> Run:
        """A run in a folder of its own. Every second one saves asynchronously."""
        self.num_folders += 1
        words = [f"--run.step_timeout_minutes={self.limit_minutes}"]
        if self.num_folders % 2 == 0:
            words.append("--checkpoint.is_async=true")
        return Run((folder or self.folder) / f"ranks-{self.num_ranks}-{self.num_folders}", self.num_ranks, *words)

    def disturb(self, row: Row, num_faults: int, strike: Callable[[Run], str]) -> None:
        """Strike so many times, and finish each run that was struck. `strike` returns a word that the run must say."""
        run = self.new_run()
        while row.num_faults < num_faults:
            run.start()
            if self.chance.random() >= START_SHARE:
                run.wait_for_step()
                time.sleep(self.chance.uniform(0, LONGEST_DELAY_S))
            else:
                time.sleep(self.chance.uniform(0.5, LONGEST_DELAY_S))
            if run.process.poll() is not None:  # it was finished before
                self.compare(row, run)
                run = self.new_run()
                continue
            saved = run.complete_steps[-1:]
            word = strike(run)
            row.num_faults += 1
            row.num_in_saves += run.is_in_save
            try:
                row.longest_s = max(row.longest_s, run.wait_for_end(60 * self.limit_minutes + SHUTDOWN_S + SLACK_S))
            except TimeoutError as error:
                row.problems.append(str(error))
            if run.process.returncode == 0 and run.complete_steps[-1:] != [STEPS[self.num_ranks]]:
                row.problems.append(f"exit code 0 after a {row.fault}")
            if word and run.process.returncode != 0 and word not in run.said:
                row.problems.append(f"{word!r} was not said, but: {run.said[-300:]}")
            if run.complete_steps[-1:] < saved:
                row.problems.append(f"the checkpoint of step {saved[0]} was lost")
        self.finish(row, run)

    def finish(self, row: Row, run: Run) -> None:
        """Run to the end without a fault, and compare."""
        run.start()
        with suppress(TimeoutError):
            run.wait_for_end(600)
        self.compare(row, run)

    def compare(self, row: Row, run: Run) -> None:
        """Compare a finished run with the undisturbed one."""
        row.num_runs += 1
        if run.process.returncode:
            row.problems.append(f"exit code {run.process.returncode}: {run.said[-500:]}")
        elif run.losses != self.expected:
            differ = [step for step, loss in self.expected.items() if run.losses.get(step) != loss]
            row.problems.append(f"{len(differ)} losses differ from the undisturbed run, the first at step {differ[:1]}")
        shutil.rmtree(run.folder, ignore_errors=True)

    def kill(self, run: Run) -> str:
        """SIGKILL all processes of a run."""
        for pid in run.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ""

    def kill_rank(self, run: Run) -> str:
        """SIGKILL one rank."""
        rank = self._strike_rank(run, signal.SIGKILL)
        return f"rank {rank} was ended by SIGKILL"

    def stop_rank(self, run: Run) -> str:
        """SIGSTOP one rank once it trains."""
        run.wait_for_step()
        rank = self._strike_rank(run, signal.SIGSTOP)
        return f"rank {rank} "

    def kill_launcher(self, run: Run) -> str:
        """SIGKILL the launcher alone."""
        run.process.kill()
        return ""

    def _strike_rank(self, run: Run, number: int) -> int:
        rank = self.chance.randrange(self.num_ranks)
        while run.process.poll() is None and not run.pids(rank):
            time.sleep(0.05)
        for pid in run.pids(rank):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return rank

    def fill_disk(self, row: Row, num_faults: int) -> None:
        """Leave too little room for the checkpoints, then enough: on a small file system, or by a limit of files."""
        for _ in range(num_faults):
            with small_disk(self.folder / "disk") as disk:
                run = self.new_run(disk)
                room, filler, before = self.chance.randrange(ROOM_BYTES // 8, ROOM_BYTES), None, None
                if disk is not None:
                    filler = disk / "filler"
                    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - room)))
                else:
                    before = limit_files
                run.start("--checkpoint.keep_latest=0", before=before)
                try:
                    row.longest_s = max(row.longest_s, run.wait_for_end(600))
                except TimeoutError as error:
                    row.problems.append(str(error))
                row.num_faults += 1
                row.num_in_saves += run.is_in_save
                last_line = run.said.strip().splitlines()[-1:]
                if run.process.returncode != 1 or "free some space" not in str(last_line):
                    row.problems.append(f"exit code {run.process.returncode}, last line {last_line}")
                if filler is not None:
                    filler.unlink()
                self.finish(row, run)

    def flip_bits(self, row: Row, num_faults: int) -> None:
        """Flip one bit in a file of the newest checkpoint of a finished run."""
        step = self.straight.complete_steps[-1]
        files = sorted(
            file.relative_to(self.straight.folder)
            for file in (self.straight.folder / "checkpoints" / f"step-{step}").rglob("*")
            if file.is_file()
        )
        for _ in range(num_faults):
            run = self.new_run()
            shutil.copytree(self.straight.folder, run.folder)
            name = self.chance.choice(files)
            content = bytearray((run.folder / name).read_bytes())
            position = self.chance.randrange(len(content) * 8)
            content[position // 8] ^= 1 << position % 8
            (run.folder / name).write_bytes(content)
            run.start(f"--train.steps={STEPS[self.num_ranks] + SAVE_STEPS}")
            try:
                row.longest_s = max(row.longest_s, run.wait_for_end(600))
            except TimeoutError as error:
                row.problems.append(str(error))
            row.num_faults += 1
            if run.process.returncode == 0:
                row.problems.append(f"trained on bit {position} flipped in {name}")
            elif name.name not in run.said:
                row.problems.append(f"refused without the name {name}: {run.said[-300:]}")
            else:
                row.num_runs += 1
            shutil.rmtree(run.folder, ignore_errors=True)


def limit_files() -> None:
    """Limit the size of each file below that of a checkpoint: its writes fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of some megabytes, where this user may mount one; else None."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def run_drill(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Run all faults; prints each row when it is done."""
    rows, chance = [], random.Random(args.seed)
    print(f"seed {args.seed}\n{HEADER}", flush=True)
    several = [number for number in args.ranks if number > 1]
    for num_ranks in args.ranks:
        drill = Drill(folder, num_ranks, args.limit_minutes, chance)
        struck = {
            "kill": (args.kills, args.ranks, drill.kill),
            "rank kill": (args.rank_kills, several, drill.kill_rank),
            "stop": (args.stops, several, drill.stop_rank),
            "launcher kill": (args.launcher_kills, several, drill.kill_launcher),
        }
        once = {"full disk": (args.full_disks, drill.fill_disk), "flipped bit": (args.bits, drill.flip_bits)}
        for fault, (total, counts, strike) in struck.items():
            if num_ranks in counts and (share := share_of(total, counts, num_ranks)):
                rows.append(Row(fault, num_ranks))
                drill.disturb(rows[-1], share, strike)
                print(rows[-1].cells(), flush=True)
        for fault, (total, act) in once.items():
            if share := share_of(total, args.ranks, num_ranks):
                rows.append(Row(fault, num_ranks))
                act(rows[-1], share)
                print(rows[-1].cells(), flush=True)
    return rows


def share_of(total: int, counts: list[int], num_ranks: int) -> int:
    """The faults of one number of ranks: equal shares, the first ones take the rest."""
    return total // len(counts) + (counts.index(num_ranks) < total % len(counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, purpose in {
        "kills": "SIGKILL to all processes",
        "rank-kills": "SIGKILL to one rank",
        "stops": "SIGSTOP to one rank",
        "launcher-kills": "SIGKILL to the launcher",
        "full-disks": "full disks",
        "bits": "flipped bits in a checkpoint",
    }.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"{purpose}, over all numbers of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=sorted(STEPS))
    parser.add_argument("--limit-minutes", type=float, default=0.15, help="run.step_timeout_minutes of the runs")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fault_drill-", dir=args.folder) as folder:
        rows = run_drill(args, Path(folder))
    problems = [f"{row.fault} on {row.num_ranks} ranks: {problem}" for row in rows for problem in row.problems]
    print("\n".join(["", *problems, f"{sum(row.num_faults for row in rows)} faults, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
