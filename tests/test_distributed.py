"""distributed.py: one rank without a process group, two real ones over gloo, devices that are not there, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from command_line import STOP_SIGNALS, InputError, StopRequest
from configurator import load
from distributed import Ranks

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def cpu_rank() -> Ranks:
    return Ranks(rank=0, world_size=1, device=torch.device("cpu"))


# --- one rank ----------------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group():
    ranks = distributed.start(load(["--device=cpu", "--backend=nccl"]))  # the backend has nothing to say here
    assert (ranks.rank, ranks.world_size, ranks.is_master, ranks.device) == (0, 1, True, torch.device("cpu"))
    assert not dist.is_initialized()
    assert ranks.gather([1.5, 2]) == [[1.5, 2]] and ranks.gather([]) == [[]]
    assert ranks.gather_objects({"a": None}) == [{"a": None}]
    assert ranks.agree(None) is None and ranks.stop_requested() is False
    model = nn.Linear(2, 2)
    assert ranks.wrap(model) is model
    ranks.close(), ranks.close()


@pytest.mark.parametrize("error", [InputError("bad"), ValueError("worse"), OSError(28, "full")])
def test_one_rank_s_error_comes_back_as_it_is(error):
    with pytest.raises(type(error)) as caught:
        cpu_rank().agree(error)
    assert caught.value is error


def test_place_comes_from_the_launcher_s_environment(monkeypatch):
    assert distributed.world_size() == 1 and distributed.is_local_master()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert distributed.world_size() == 16 and distributed.is_local_master()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert not distributed.is_local_master()


# --- devices -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that this node has so many GPUs."""
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    return pretend


@pytest.mark.parametrize("name, count, local_rank, ranks, device", [
    ("auto", 0, 0, 1, "cpu"), ("auto", 2, 0, 1, "cuda:0"), ("auto", 8, 5, 8, "cuda:5"), ("cuda", 2, 0, 1, "cuda:0"),
    ("cuda:1", 2, 0, 1, "cuda:1"), ("cuda:99", 100, 0, 1, "cuda:99"), ("cuda", 8, 7, 16, "cuda:7"),
    ("cuda:0", 8, 3, 8, "cuda:3"),  # else all ranks would share one GPU
    ("cpu", 8, 3, 8, "cpu"),
])
def test_device(gpus, name, count, local_rank, ranks, device):
    gpus(count)
    assert distributed._device(name, local_rank, ranks) == torch.device(device)


@pytest.mark.parametrize("name, count, local_rank, ranks, message", [
    ("cuda", 0, 0, 1, "wanted GPU 0 for LOCAL_RANK 0, found 0 GPUs"), ("cuda:2", 2, 0, 1, "wanted GPU 2"),
    ("cuda:99", 8, 0, 1, "wanted GPU 99"), ("auto", 4, 4, 8, "wanted GPU 4 for LOCAL_RANK 4, found 4 GPUs"),
])
def test_device_that_is_not_there_is_bad_input(gpus, name, count, local_rank, ranks, message):
    gpus(count)
    with pytest.raises(InputError, match=message):
        distributed._device(name, local_rank, ranks)


def test_mps_is_checked_and_serves_one_rank(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="no MPS"):
        distributed.start(load(["--device=mps"]))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert distributed._device("mps", 0, 1) == torch.device("mps")
    with pytest.raises(InputError, match="one rank, found 2"):
        distributed._device("mps", 0, 2)


def test_nccl_without_gpus_is_bad_input_before_anyone_waits(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match="--backend=gloo"):
        distributed.start(load(["--device=cpu", "--backend=nccl"]))
    assert not dist.is_initialized()


@pytest.mark.parametrize("arguments, gpu_count, backend, device_id", [
    (["--device=cpu"], 0, "gloo", None), (["--device=cuda"], 2, "nccl", torch.device("cuda:1")),
    (["--device=cuda", "--backend=gloo"], 2, "gloo", None),
])
def test_process_group_gets_backend_device_and_timeout(monkeypatch, gpus, arguments, gpu_count, backend, device_id):
    """Without the timeout a rank would wait half an hour for one that is gone."""
    given, current = {}, []
    gpus(gpu_count)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    ranks = distributed.start(load([*arguments, "--dist_timeout=45"]))
    assert given == {"backend": backend, "timeout": timedelta(seconds=45), "device_id": device_id}
    assert (ranks.rank, ranks.world_size, ranks.is_master) == (1, 2, False)
    assert current == ([ranks.device] if gpu_count else [])  # before the group: NCCL takes the current device


# --- signals -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """The handlers before a test, put back after it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_signal_is_noted_and_handlers_come_back(handlers, number):
    mine = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ranks = cpu_rank()
    ranks.stop = StopRequest()
    try:
        assert not ranks.stop_requested()
        os.kill(os.getpid(), number)
        assert ranks.stop_requested() and ranks.stop.signal == signal.Signals(number).name
        os.kill(os.getpid(), number)  # an impatient user's second one
        assert ranks.stop_requested()
        ranks.close()
        os.kill(os.getpid(), number)  # one that comes when the run is over already
    finally:
        ranks.stop.restore()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    ranks.stop.restore()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_nohup_is_respected(handlers):
    """`nohup python train.py &` and a log-out: the terminal's SIGHUP, which nohup has set to be ignored, stops nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ranks = cpu_rank()
    ranks.stop = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not ranks.stop_requested()
    finally:
        ranks.stop.restore()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


# --- two ranks ---------------------------------------------------------------------------------------------------------------

TWO_RANKS = """
import json, math, os, signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import distributed
from command_line import InputError, StopRequest
from configurator import load

ranks = distributed.start(load(["--device=cpu", "--dist_timeout=60"]), StopRequest())
me, found = ranks.rank, {}

found["place"] = [ranks.rank, ranks.world_size, ranks.is_master, str(ranks.device), dist.get_backend()]
found["gather"] = ranks.gather([me + 0.1, True, 2**53 - 1 - me, math.inf if me else 0])
found["nan"] = [math.isnan(value) for (value,) in ranks.gather([math.nan if me else 1.0])]
found["maximum"] = ranks.maximum(torch.tensor([[1.0, me - 3.0], [-math.inf, 2.0 * me]])).tolist()
found["objects"] = ranks.gather_objects({"rank": me, "text": "x" * (1 + 1000 * me), "none": None})

def outcome(error):
    try:
        return ranks.agree(error)
    except Exception as raised:
        return [type(raised).__name__, str(raised), raised is error]

found["agree"] = [
    outcome(None), outcome(InputError("one") if me == 1 else None), outcome(InputError("zero") if me == 0 else None),
    outcome(ValueError("one") if me == 1 else None), outcome(InputError(f"both {me}")), outcome(KeyError("k") if me else None),
    outcome(None),
]

found["stop"] = [ranks.stop_requested()]
if me == 1:
    os.kill(os.getpid(), signal.SIGTERM)
found["stop"] += [ranks.stop_requested(), ranks.stop.signal]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(me)
        self.linear = nn.Linear(3, 1)
        self.register_buffer("table", torch.full((2,), float(me)))
    def forward(self, x):
        return self.linear(x).sum() + 0 * self.table.sum()

model = Model()
wrapped = ranks.wrap(model)
found["weights"] = ranks.gather(model.linear.weight.flatten().tolist())
found["wrapped"] = isinstance(wrapped, DistributedDataParallel)
x = torch.full((2, 3), float(me + 1))
model.table.fill_(me + 5.0)
if me == 0:  # evaluation on one rank: neither the bare module nor the wrapper waits for the other
    with torch.no_grad():
        model(x), wrapped(x)
found["buffers"] = ranks.gather(model.table.tolist())
wrapped(x).backward()
found["buffers after"] = ranks.gather(model.table.tolist())
found["gradient"] = model.linear.weight.grad.flatten().tolist()

ranks.close()
found["closed"] = not dist.is_initialized()
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def two() -> list[dict]:
    """What each of two ranks found, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0 and "Warning" not in errors, errors
            found.append(json.loads(output.partition("FOUND ")[2]))
    finally:
        for process in processes:
            process.kill()
    return found


def test_two_ranks_know_their_places(two):
    assert [found["place"] for found in two] == [[0, 2, True, "cpu", "gloo"], [1, 2, False, "cpu", "gloo"]]


def test_gather_is_by_rank_exact_and_the_same_everywhere(two):
    for found in two:
        assert found["gather"] == [[0.1, 1.0, 2**53 - 1, 0.0], [1.1, 1.0, 2**53 - 2, float("inf")]]
        assert found["nan"] == [False, True]
        assert found["objects"] == [{"rank": 0, "text": "x", "none": None}, {"rank": 1, "text": "x" * 1001, "none": None}]


def test_maximum_is_over_ranks_and_by_element(two):
    assert all(found["maximum"] == [[1.0, -2.0], [float("-inf"), 2.0]] for found in two)


def test_one_rank_s_error_is_raised_by_all(two):
    zero, one = (found["agree"] for found in two)
    assert zero == [None, ["InputError", "rank 1: one", False], ["InputError", "zero", True], ["RuntimeError",
    "rank 1: one", False],
                    ["InputError", "both 0", True], ["RuntimeError", "rank 1: 'k'", False], None]
    assert one == [None, ["InputError", "one", True], ["InputError", "rank 0: zero", False], ["ValueError", "one", True],
                   ["InputError", "both 1", True], ["KeyError", "'k'", True], None]


def test_stop_request_of_one_rank_is_everyone_s(two):
    assert [found["stop"] for found in two] == [[False, True, None], [False, True, "SIGTERM"]]


def test_wrapped_model_has_rank_0_s_weights_mean_gradients_and_own_buffers(two):
    torch.manual_seed(0)
    expected = nn.Linear(3, 1).weight.flatten().tolist()
    for found in two:
        assert found["wrapped"] and found["weights"] == [expected, expected]
        assert found["buffers"] == found["buffers after"] == [[5.0, 5.0], [6.0, 6.0]]  # a broadcast would have made them equal
        assert found["gradient"] == pytest.approx([3.0] * 3)  # the mean of 2 x 1 and 2 x 2


def test_close_leaves_the_group(two):
    assert [found["closed"] for found in two] == [True, True]
