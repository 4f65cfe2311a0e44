"""What a loader of bytes reads, as text."""

from titan_moe.data.loader import Loader


def read_text(loader: Loader, num_steps: int) -> str:
    """The sequences of some steps, one after the other."""
    return "".join(
        "".join(map(chr, sequence))
        for _ in range(num_steps)
        for sequence in loader.next_step().tokens_MBN.flatten(0, 1)
    )
