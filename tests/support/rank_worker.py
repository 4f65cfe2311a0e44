"""One rank of the pool that tests/conftest.py keeps: waits for functions, runs each in a process group of its own."""

import faulthandler
import gc
import importlib.util
import io
import os
import runpy
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

COLLECTION_THRESHOLDS = (20_000, 10, 100)
"""A compilation makes many objects, few of them garbage: Python's own thresholds take a tenth of its time."""


def main(pipe: Connection, rank: int, stderr: int) -> None:
    for number in (1, 2):
        os.dup2(stderr, number)
    os.close(stderr)
    faulthandler.enable()  # who dies of a signal says where
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        runpy.run_path(str(Path(__file__).with_name("quick_interpreter.py")))
    gc.freeze()  # what was imported is no garbage: nobody looks through it again
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]  # where tests find `support`, and pickles the module of a test
    modules = {}
    while (job := pipe.recv()) is not None:
        path, name, args, num_ranks, store = job
        try:
            if path not in modules:
                spec = importlib.util.spec_from_file_location(f"job_{len(modules)}", path)
                modules[path] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[path])
            dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
            dist.barrier()  # a function may end without a message, and a peer that still connects would find nobody
            answer = io.BytesIO()
            torch.save(getattr(modules[path], name)(*args), answer)
            pipe.send((True, answer.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                has_meshes = len(dist.distributed_c10d._world.pg_map) > 1
                dist.destroy_process_group()
                if has_meshes:
                    release_groups()


def release_groups() -> None:
    """Let go of the process groups of meshes that PyTorch itself keeps, for strategies of DTensor above all: each group
    holds a dozen descriptors, and threads that wake a hundred times a second."""
    _clear_sharding_prop_cache()
    gc.collect()  # models and what was compiled for them refer to each other
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()


if __name__ == "__main__":
    main(PIPE, RANK, STDERR.detach())  # noqa: F821, given by whoever runs this file
