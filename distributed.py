"""Everything that knows of more than one process: the process group, values gathered over ranks, the stop request, and how the
model's state lies on the ranks: whole on each of them (DDP) or in shards (FSDP2).

A single process is a world of one rank, with the same calls and no process group.
"""

import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
    parallel: str = "ddp"

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was; the others may not know yet."""
        return self.stop is not None and self.stop.signal is not None

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimizer state are DTensors, of which each rank has some rows."""
        return self.parallel == "fsdp" and self.world_size > 1

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

    def wrap(self, model: nn.Module, parts: Iterable[nn.Module] = ()) -> nn.Module:
        """The model as forward and backward of a training step use it.

        DDP broadcasts rank 0's weights. Evaluation goes through the bare module: a forward pass of DDP on some ranks only would
        wait for the others.

        FSDP shards the model itself, whose weights must be equal on all ranks, in place; its parameters are others afterwards.
        Weights are whole on a rank only while one of `parts` uses them, and what belongs to no part in all of a micro-step;
        forward passes that not all ranks make are for `whole`. The weights travel in fp32, twice in a micro-step, and their
        gradients once, after every micro-step: in bfloat16 the gains of LayerNorm would no longer be DDP's, and anything that
        waits for the last micro-step is held whole until then.

        What that means for 2.7B (2.81e9 weights, 11.3 GB in fp32) on 8 GPUs: DDP holds 45.0 GB of weights, gradients and AdamW
        on each GPU and sends 2 x 7/8 x 11.3 = 19.7 GB a step; this holds 5.6 GB and the parts in work, and sends
        3 x 7/8 x 11.3 = 29.5 GB a micro-step, during which DDP sends nothing but in the last one. A micro-step of 4 x 2048 tokens
        has 158 TFLOP, 0.4 s at 40% of an H100's peak; in 0.4 s its NVLink could carry 180 GB each way (450 GB/s by the data
        sheet), InfiniBand of 400 Gbit/s 20 GB. Weights kept from forward to backward would save a third of the traffic and cost
        11.3 GB, and so would gradients kept for the last micro-step."""
        if self.world_size == 1:
            return model
        if self.sharded:
            return _shard(model, parts, self.world_size, self.device)
        # DDP makes views of its buckets of the gradients that there are, and of others only when it reduces them: in gradient
        # accumulation these would be there twice.
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 announces a new name for broadcast_buffers
            return DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False, gradient_as_bucket_view=True)

    def total_norm(self, norms: Sequence[float]) -> float:
        """The norm of the whole gradient, the same bits on all ranks, from the norms of what each has of it, by rank."""
        return math.hypot(*norms) if self.sharded else norms[0]

    @contextmanager
    def whole(self, model: nn.Module, shell: nn.Module) -> Iterator[nn.Module]:
        """The model for forward passes that wait for no other rank: `model`, or where that is sharded `shell`, a like one on the
        meta device, which has the weights whole for as long as this lasts. All must call it."""
        if not self.sharded:
            yield model
            return
        shell.load_state_dict({name: whole(value) for name, value in model.state_dict().items()}, assign=True)
        try:
            yield shell
        finally:
            shell.to_empty(device="meta")

    def replicated(self) -> AbstractContextManager:
        """In it, plain tensors that are equal on all ranks may be combined with sharded ones."""
        if not self.sharded:
            return nullcontext()
        from torch.distributed.tensor.experimental import implicit_replication

        return implicit_replication()

    def share_of(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A whole state dict of `optimizer` as this rank has it."""
        if not self.sharded:
            return state
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return state | {"state": {i: {key: self._share(value, parameters[i]) for key, value in moments.items()}
                                  for i, moments in state["state"].items()}}

    def _share(self, value: Any, like: torch.Tensor) -> Any:
        """This rank's rows of a whole tensor, as `like` is sharded: a copy, beside which the whole one can go."""
        if not isinstance(value, torch.Tensor) or value.shape != like.shape:
            return value
        share = torch.empty_like(like, dtype=value.dtype)
        rows = -(-len(like) // self.world_size)
        local(share).copy_(value[self.rank * rows : (self.rank + 1) * rows])
        return share

    def set_timeout(self, seconds: int) -> None:
        """How long the collectives from now on wait for other ranks."""
        if self.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Leaves the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            # A gloo thread may still hold the last collective's tensors and wait for the GIL to drop them; where it gets it only
            # when Python is on its way out, the process ends in SIGABRT (pytorch/pytorch#179291). DDP keeps the threads alive.
            time.sleep(0.1)


def _shard(model: nn.Module, parts: Iterable[nn.Module], world_size: int, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Values that a later layer reads; no one changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    mesh = init_device_mesh(device.type, (world_size,))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# Sharded tensors are told by their methods: to import torch.distributed.tensor takes half a second.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, gathered on every rank; all must call it. Any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor, any other tensor as it is; the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather_along(state: Any) -> None:
    """What the other ranks do while rank 0 makes a state of dicts and lists `whole`, tensor by tensor."""
    if isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            gather_along(part)
    elif isinstance(state, torch.Tensor):
        whole(state)


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
        if config.parallel == "fsdp" and device.type == "cuda" and backend != "nccl":
            raise InputError(f"parallel=fsdp on GPUs needs backend=nccl, found {backend}; use --backend=auto or --parallel=ddp")
        try:
            dist.init_process_group(
                backend,
                timeout=timedelta(seconds=config.dist_timeout),
                device_id=device if backend == "nccl" else None,
            )
        except ValueError as error:  # MASTER_ADDR or MASTER_PORT is not there, or no such thing
            raise InputError(f"the ranks cannot find each other: {error}; start them with torchrun") from None
    return Ranks(rank, ranks, device, stop, config.parallel)


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
