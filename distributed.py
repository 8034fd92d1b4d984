"""Everything that knows of more than one process: the process group, values gathered over ranks, the stop request.

A single process is a world of one rank, with the same calls and no process group.
"""

import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from command_line import InputError, StopRequest
from configurator import Config


def world_size() -> int:
    """Ranks of this run, from torchrun's environment. Raises InputError."""
    return _from_environment("WORLD_SIZE", 1, 1, math.inf)


def is_local_master() -> bool:
    """Whether this process is the one of its node that speaks before the process group exists."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return not local_rank.isdecimal() or int(local_rank) == 0


def _from_environment(name: str, default: int, low: int, below: float) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not low <= int(text) < below:
        wanted = f"{low} or more" if below == math.inf else f"{low} to {below - 1}"
        raise InputError(f"{name}={text!r} in the environment, wanted {wanted}; torchrun sets it, without torchrun unset it")
    return int(text)


@dataclass
class Ranks:
    """This process's place among the ranks of a run."""

    rank: int
    world_size: int
    device: torch.device
    stop: StopRequest | None = None  # of this process; stop_requested() is what all agree on

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was; the others may not know yet."""
        return self.stop is not None and self.stop.signal is not None

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Everyone's `values`, by rank, the same on all ranks. All must call it."""
        if self.world_size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).tolist()

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Everyone's largest, element by element, in place of `values` on this rank's device. All must call it."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather_objects(self, value: object) -> list:
        """Everyone's picklable `value`, by rank. All must call it; not for hot paths."""
        if self.world_size == 1:
            return [value]
        everyone: list = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank where any rank came with an error: the own one, or the first other's. All must call it, so
        that no rank waits in a collective for one that has failed."""
        messages = self.gather_objects(None if error is None else (type(error) is InputError, str(error)))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                kind = InputError if message[0] else RuntimeError
                raise kind(f"rank {rank}: {message[1]}")

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop. All must call it."""
        return any(asked for (asked,) in self.gather([self.asked_to_stop]))

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as forward and backward of a training step use it. Broadcasts rank 0's weights. Evaluation goes through
        the bare module: a forward pass of DDP on some ranks only would wait for the others."""
        if self.world_size == 1:
            return model
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 announces a new name for broadcast_buffers
            return DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False, gradient_as_bucket_view=True)

    def close(self) -> None:
        """Leaves the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            # A gloo thread may still hold the last collective's tensors and wait for the GIL to drop them; where it gets it only
            # when Python is on its way out, the process ends in SIGABRT (pytorch/pytorch#179291). DDP keeps the threads alive.
            time.sleep(0.1)


def lost_rank(error: BaseException) -> str | None:
    """What an error of torch.distributed says of another rank, in plain words; None for any other error. Its own words name
    sockets, and the cause is what the other rank has said."""
    text = str(error)
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and "/gloo/" in text):
        return None
    if "imed out" in text or "imeout" in text:
        return "another rank did not answer within dist_timeout: it hangs or its node is gone, or dist_timeout is too short"
    return "another rank is gone; its error is the cause"


def start(config: Config, stop: StopRequest | None = None) -> Ranks:
    """Picks the device and joins the other ranks, if any. Raises InputError for a device that is not there."""
    ranks = world_size()
    for name in ("RANK", "LOCAL_RANK") if ranks > 1 else ():
        if name not in os.environ:
            raise InputError(f"WORLD_SIZE={ranks} but no {name} in the environment; torchrun sets both, without it unset them")
    rank, local_rank = (_from_environment(name, 0, 0, ranks) for name in ("RANK", "LOCAL_RANK"))
    device = _device(config.device, local_rank, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = config.backend if config.backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and device.type != "cuda":
            raise InputError(f"backend=nccl needs device=cuda, found {device.type}; use --backend=gloo")
        try:
            dist.init_process_group(
                backend,
                timeout=timedelta(seconds=config.dist_timeout),
                device_id=device if backend == "nccl" else None,
            )
        except ValueError as error:  # MASTER_ADDR or MASTER_PORT is not there, or no such thing
            raise InputError(f"the ranks cannot find each other: {error}; start them with torchrun") from None
    return Ranks(rank, ranks, device, stop)


def _device(name: str, local_rank: int, ranks: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if ranks > 1 or device.index is None else device.index
        if index >= count:
            raise InputError(f"device={name}: wanted GPU {index} for LOCAL_RANK {local_rank}, found {count} GPUs on this node")
        return torch.device("cuda", index)
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("device=mps: this machine or this torch has no MPS")
        if ranks > 1:
            raise InputError(f"device=mps serves one rank, found {ranks}; use --device=cpu")
    return device
