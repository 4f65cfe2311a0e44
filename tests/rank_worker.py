"""One rank of the pool that tests/conftest.py keeps: waits for functions, runs each in a process group of its own."""

import importlib.util
import io
import os
import sys
import traceback
from multiprocessing.connection import Client

import torch
import torch.distributed as dist


def main(address: str, rank: int) -> None:
    torch.set_num_threads(1)
    modules = {}
    with Client(address) as pipe:
        pipe.send(rank)
        while (job := pipe.recv()) is not None:
            path, name, args, num_ranks, store = job
            try:
                if path not in modules:
                    spec = importlib.util.spec_from_file_location(f"job_{len(modules)}", path)
                    modules[path] = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(modules[path])
                dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
                answer = io.BytesIO()
                torch.save(getattr(modules[path], name)(*args), answer)
                pipe.send((True, answer.getvalue()))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], int(sys.argv[2]))
