"""Peak memory on a CPU: the largest resident set of a process of its own, less that before the model is built."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

# glibc keeps freed blocks that are smaller than a threshold which grows as it goes: what a step has freed would count as well.
# glibc reads this when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
# Steps of this size load what a first step loads, libraries and thread pools, before memory is counted.
TINY_SHAPE = {"n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "head_dim": 32, "vocab_size": 64, "block_size": 16,
              "micro_batch_size": 1, "global_batch_size": 1, "compile": False}


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a new process that gives freed memory back at once: a copy of one that has torch and training's
    modules loaded and has done nothing yet; where another has started a fork server here without MALLOC, one that loads them."""
    before = {key: os.environ.get(key) for key in MALLOC}
    os.environ.update(MALLOC)
    try:
        for method in ("forkserver", "spawn"):
            context = multiprocessing.get_context(method)
            if method == "forkserver":
                context.set_forkserver_preload(["train", "torch._dynamo"])  # the first optimizer would load it, for seconds
            with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
                if pool.submit(_gives_memory_back).result():
                    return pool.submit(function, *arguments).result()
        raise RuntimeError(f"no process has {MALLOC} in its environment")
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def end_with_parent() -> None:
    """For a process of multiprocessing, before its work: when its parent is killed it ends too, or it would go on, or wait,
    unseen. A fork server is no help: it ends after its children do."""
    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _gives_memory_back() -> bool:
    """Whether this process was started with MALLOC; a fork server's children have the server's environment."""
    return MALLOC.items() <= os.environ.items()


def process_status(key: str) -> int:
    """Bytes, of VmRSS or VmHWM. Not getrusage: its maximum has the parent's memory in it, from between fork and exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key + ":")).split()[1])
