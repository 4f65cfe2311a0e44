"""How fast a rank reads its lanes of a stream: python tools/bench_lanes.py [--ranks 64] [--megabytes 300]

Each rank runs alone, in this process: the only one of a run, before and after some of many. Their batch is the same, so
one of 64 reads a 64th of it. Tokens of the rank itself are counted, after steps in which all of its lanes were opened;
also by seconds of the CPU, on a machine that others use. Rows are pieces of the sources of this Python. `--tokenizer
FOLDER` takes the place of bytes, of which tokenising costs almost nothing.
"""

import argparse
import json
import logging
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from titan_moe.config import Recipe
from titan_moe.data.loader import build_loader

CHARACTERS = 4000
"""Of a row."""


def main(words: Sequence[str] | None = None) -> list[tuple[float, float]]:
    """Tokens/s of each rank, by the clock and by the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=300, help="of the data")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--sequences", type=int, default=512, help="of a step, of all ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=2, help="of a timing, in which no lane may begin again")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "rows.jsonl", int(1e6 * args.megabytes))
        recipe = _recipe(f"{folder}/rows.jsonl", args)
        speeds: list[tuple[float, float]] = []
        for rank, num_ranks in ((0, 1), (0, args.ranks), (args.ranks // 2 + 1, args.ranks), (0, 1)):
            speeds.append(tokens_per_second(recipe, rank, num_ranks, folder, args.seconds))
            words = (
                f"{speed:12,.0f} ({speed / first:.2f})" for speed, first in zip(speeds[-1], speeds[0], strict=True)
            )
            print(f"rank {rank:3} of {num_ranks:3} {' tokens/s, a second of the CPU '.join(words)}", flush=True)
    return speeds


def write_rows(file: Path, num_bytes: int) -> None:
    """Write JSON lines of about so many bytes."""
    with file.open("w") as out:
        while out.tell() < num_bytes:
            for text in _pieces():
                out.write(json.dumps({"text": text}) + "\n")
                if out.tell() >= num_bytes:
                    return


def _pieces() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from (text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))


def _recipe(path: str, args: argparse.Namespace) -> Recipe:
    recipe = Recipe()
    data = replace(recipe.data, source="auto", path=path, tokenizer=args.tokenizer, is_streamed=True)
    data = replace(data, stream_has_worker=False)  # which would read on while the clock is read
    sizes = {"global_batch_sequences": args.sequences, "micro_batch_sequences": 1, "seq_len_tokens": args.tokens}
    model = replace(recipe.model, vocab_size=1 << 18)
    return replace(recipe, data=data, train=replace(recipe.train, **sizes), model=model)


def tokens_per_second(recipe: Recipe, rank: int, num_ranks: int, folder: str, seconds: float) -> tuple[float, float]:
    """Of a rank that runs alone, after all of its lanes are open and their first blocks are read."""
    loader = build_loader(recipe, rank, num_ranks, folder, barrier=lambda: None)
    per_step = recipe.train.global_batch_sequences // num_ranks * recipe.train.seq_len_tokens
    for _ in range(-(-2 * recipe.data.stream_lanes // recipe.train.global_batch_sequences) + 1):
        loader.next_step()
    start, start_of_cpu, num_steps = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        loader.next_step()
        num_steps += 1
    return num_steps * per_step / elapsed, num_steps * per_step / (time.process_time() - start_of_cpu)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
