"""Host memory that weights need on their way from a Hugging Face checkpoint, and into one (checkpoint/hf.py)."""

from collections.abc import Iterator
from typing import NamedTuple

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import modules_of, parameters_of_an_expert
from titan_moe.config.parallel import ranks_of_a_node, resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import counted
from titan_moe.plan.cost.count import count_parameters

MAX_FILE_BYTES = 5_000_000_000
"""Of a file of weights, as transformers has it. A rank has one such file in host memory, twice while it is written."""
READ_THREADS = 4
"""Files that a rank reads at a time, a slice of each."""
MAX_READ_BYTES = 1 << 27
"""Of a tensor in another layout than ours, in fp32, that a thread reads at a time: some experts, one at least."""
COPIES_OF_A_READ = 3
"""In host memory, of blocks in MXFP4, which need most: their codes as numbers, the values, and these with scales."""
BYTES_ON_DISK = 2
"""Of a weight: bf16, as nearly all checkpoints have it."""


class HostBytes(NamedTuple):
    """Bytes of host memory at a time, beside those of the model and of the system's cache of files."""

    part: int  # the slice that is read, or the file that is written
    rank: int  # on the rank that needs most
    host: int  # all ranks of a host


def import_bytes(recipe: Recipe, world_size: int) -> HostBytes:
    """What `checkpoint.load_from = "hf:..."` needs: slices as they are on disk, and in the dtype of the model.

    Each expert is a tensor, or several. `fused_import_bytes` is for families that have one for all experts.
    """
    model, sizes = recipe.model, resolve(recipe.parallel, world_size)
    modules = modules_of(model, recipe.parallel)
    slices = [it.own_parameters / sizes.fsdp for it in modules if it.region != "experts"]
    if model.num_moe_layers:
        slices.append(parameters_of_an_expert(model, sizes.etp) / 3)
    largest = round(max(slices))
    rank = READ_THREADS * largest * (BYTES_ON_DISK + BYTES_OF_DTYPE[recipe.precision.parameters])
    return HostBytes(largest * BYTES_ON_DISK, rank, rank * min(world_size, ranks_of_a_node(world_size)))


def fused_import_bytes(recipe: Recipe, world_size: int) -> int:
    """What a rank needs where all experts of a layer are one tensor on disk, as in gpt-oss and Granite-MoE."""
    sizes = resolve(recipe.parallel, world_size)
    gate_up = 4 * 2 * parameters_of_an_expert(recipe.model, sizes.etp) // 3  # in fp32
    of_rank = gate_up * recipe.model.moe.num_experts // sizes.ep
    return READ_THREADS * COPIES_OF_A_READ * max(gate_up, min(of_rank, MAX_READ_BYTES))


def export_bytes(recipe: Recipe, world_size: int) -> HostBytes:
    """What `checkpoint.export_hf_at_end` needs: every rank writes some of the files, one after the other."""
    total = count_parameters(recipe.model).total * BYTES_ON_DISK
    file, num_files = min(MAX_FILE_BYTES, total), -(-total // MAX_FILE_BYTES)
    writers = min(world_size, ranks_of_a_node(world_size), num_files)
    return HostBytes(file, 2 * file, min(2 * file * writers, 2 * total))


def describe_weights(recipe: Recipe, world_size: int) -> Iterator[str]:
    """What `check` says of both. A class of the user's without a table is not known."""
    if recipe.model.class_ != ModelConfig.class_ and not recipe.model.table:
        return
    of_host = counted(min(world_size, ranks_of_a_node(world_size)), "rank")

    def line(what: str, need: HostBytes) -> str:
        part, rank, host = (f"{size / 2**30:.3g} GiB" for size in need)
        return f"{what} {part}; about {rank} of host memory a rank, {host} a host of {of_host}"

    if recipe.checkpoint.load_from.startswith("hf:"):
        slices = f"import: {READ_THREADS} slices at a time, of bf16 weights up to"
        need, fused = import_bytes(recipe, world_size), fused_import_bytes(recipe, world_size)
        is_more = recipe.model.num_moe_layers > 0 and fused > need.rank
        more = f"; {fused / 2**30:.3g} GiB a rank where all experts of a layer are one tensor on disk"
        yield line(slices, need) + more * is_more
    if recipe.checkpoint.export_hf_at_end:
        yield line("export: in bf16, files of up to", export_bytes(recipe, world_size))
