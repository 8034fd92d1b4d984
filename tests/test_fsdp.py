"""--parallel=fsdp on real gloo ranks: DDP's numbers and checkpoints, in shares; and what travels when, in both."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distributed
import train
from command_line import InputError
from configurator import load
from model import GPT
from scripts import plan
from tests.faults.driver import ROOT, Fault, Job, free_port, run
from tests.test_train import SMALL, curve, dataset, metrics  # noqa: F401 - a fixture

# Of gsxa, value_mix has two rows: none of them on the last two of four ranks.
VARIANTS = {"sa": [], "gsxa": ["--qk_clip=1.2", "--n_head=4"], "qkclip": ["--qk_clip=0.5", "--bias=True", "--n_sink=2"]}

CALM = ["--learning_rate=3e-3"]  # at a higher one training makes a rounding grow


def run_all(folder: Path, arguments: list[str], ranks: int, **more) -> Job:
    job = run([*arguments, f"--out_dir={folder}"], folder.parent / "jobs", ranks=ranks, **more)
    assert job.statuses == [0] * ranks, job.text()
    return job


def assert_close(ours: list[dict], theirs: list[dict]) -> None:
    """Equal but for rounding of losses and norms, and for times."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        exact = ("step", "tokens", "split", "lr", "bad_steps", "spikes", "data_hash", "acc")
        assert [a.get(key) for key in exact] == [b.get(key) for key in exact]
        if a["split"] == "train":
            assert a.get("qk_clips") == b.get("qk_clips")
        for key, rel in {"loss": 1e-5, "grad_norm": 1e-4, "max_logit": 1e-4}.items():
            assert a.get(key) == (b.get(key) and pytest.approx(b[key], rel=rel)), (key, a, b)


def last_state(folder: Path) -> dict:
    return torch.load(max(folder.glob("ckpt_*.pt")), weights_only=True)


def tensors(state: dict) -> dict[str, torch.Tensor]:
    moments = {f"{i}.{key}": value for i, moment in state["optimizer"]["state"].items() for key, value in moment.items()}
    return state["model"] | moments


# --- the same training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def three(request, dataset, tmp_path_factory) -> Path:  # noqa: F811
    """Thirty steps, the gradient clipped in most: of one rank, and of two with DDP and with FSDP, in two micro-steps each."""
    folder = tmp_path_factory.mktemp(request.param)
    common = [*SMALL, *CALM, f"--dataset={dataset}", f"--attention={request.param}", *VARIANTS[request.param], "--max_iters=30"]
    for name, ranks in (("one", 1), ("ddp", 2), ("fsdp", 2)):
        run_all(folder / name, [*common, f"--parallel={name.replace('one', 'ddp')}"], ranks)
    return folder


@pytest.mark.parametrize("other", ["one", "ddp"])
def test_numbers_are_those_of_ddp_and_of_one_rank(three, other):
    found = metrics(three / "fsdp")
    assert_close(found, metrics(three / other))
    assert sum(m["grad_norm"] > 1 for m in found if m["split"] == "train") > 10
    assert found[-1].get("qk_clips", 1) or found[-2]["qk_clips"] > 5


def test_checkpoint_is_that_of_ddp(three):
    ddp, fsdp = last_state(three / "ddp"), last_state(three / "fsdp")
    assert list(ddp["model"]) == list(fsdp["model"])
    assert ddp["optimizer"]["param_groups"] == fsdp["optimizer"]["param_groups"]
    ours, theirs = tensors(fsdp), tensors(ddp)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert type(value) is torch.Tensor and value.dtype == theirs[name].dtype, name
        assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes, name  # no more than itself in the file
        assert torch.allclose(value, theirs[name], rtol=1e-3, atol=1e-5), name
    model = GPT.from_checkpoint(max((three / "fsdp").glob("ckpt_*.pt")))
    assert all(torch.equal(p, fsdp["model"][name]) for name, p in model.named_parameters())
    differ = {key for key in ddp if key not in ("model", "optimizer") and not same(ddp[key], fsdp[key])}
    assert differ <= {"config", "best_val_loss"}
    assert {key for key in ddp["config"] if ddp["config"][key] != fsdp["config"][key]} == {"parallel", "out_dir"}


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("extra", [
    ["--dtype=float16"], ["--dtype=bfloat16", "--activation_checkpointing=True"], ["--dropout=0.1", "--skip_spikes=6"],
], ids=lambda extra: extra[0])
def test_options(dataset, tmp_path, extra):  # noqa: F811
    """With a step whose loss is NaN on one rank, which both skip; a fp16 scaler that they do not agree on would end in other
    numbers. In half precision two ways to add up gradients part by more than in fp32."""
    common = [*SMALL, *CALM, *extra, f"--dataset={dataset}", "--attention=gsxa"]
    for name in ("ddp", "fsdp"):
        run_all(tmp_path / name, [*common, f"--parallel={name}"], 2, fault=Fault("nan", "step", 6, rank=1))
    found, expected = metrics(tmp_path / "fsdp"), metrics(tmp_path / "ddp")
    assert [m["step"] for m in found if m["split"] == "train" and m["loss"] is None] == [3]
    if "--dtype" not in extra[0]:
        return assert_close(found, expected)
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == (b["loss"] and pytest.approx(b["loss"], rel=2e-3))
    scales = [last_state(tmp_path / name)["scaler"] for name in ("ddp", "fsdp")]
    assert scales[0] == scales[1]


@pytest.mark.slow  # four processes import lm-eval
def test_evaluations_that_differ_in_number_by_rank_and_diagnostics_of_one(dataset, task_data, tmp_path):  # noqa: F811
    common = [*SMALL, *CALM, f"--dataset={dataset}", "--attention=gsxa", "--max_iters=6", "--diagnostics_interval=2",
              "--eval_interval=3", "--eval_tasks=hellaswag,lambada_openai", "--eval_tasks_limit=3",
              f"--eval_tasks_data={task_data}", "--eval_tokens=32"]
    for name in ("ddp", "fsdp"):
        run_all(tmp_path / name, [*common, f"--parallel={name}"], 2)
    found, expected = metrics(tmp_path / "fsdp"), metrics(tmp_path / "ddp")
    assert {m["split"] for m in found} == {"train", "val", "diagnostics", "eval/hellaswag", "eval/lambada_openai"}
    assert_close(found, expected)
    for a, b in zip(found, expected, strict=True):
        if a["split"] == "diagnostics":
            assert a.keys() == b.keys()
            assert all(a[key] == pytest.approx(b[key], rel=1e-3) for key in a if isinstance(a[key], list))


# --- the same checkpoints ----------------------------------------------------------------------------------------------------


def test_elastic_between_numbers_of_ranks_and_both_ways(dataset, tmp_path):  # noqa: F811
    """1, 2, 4 and 2 ranks, from DDP to FSDP to DDP, to one rank: the straight run, but for rounding."""
    common = [*SMALL, *CALM, f"--dataset={dataset}", "--attention=gsxa", "--micro_batch_size=1", "--lr_decay_iters=12",
              "--eval_interval=2", "--init_from=auto"]
    run_all(tmp_path / "straight", common, 1)
    parts = [(1, "fsdp"), (2, "fsdp"), (4, "fsdp"), (2, "ddp"), (2, "fsdp"), (1, "ddp")]
    for number, (ranks, parallel) in enumerate(parts, 1):
        job = run_all(tmp_path / "parts", [*common, f"--max_iters={2 * number}", f"--parallel={parallel}"], ranks)
        assert ("note: parallel=fsdp changes nothing on one rank" in job.text()) == (number == 1)
    assert_close(metrics(tmp_path / "parts"), metrics(tmp_path / "straight"))
    ours, theirs = tensors(last_state(tmp_path / "parts")), tensors(last_state(tmp_path / "straight"))
    assert all(torch.allclose(value, theirs[name], rtol=1e-3, atol=1e-5) for name, value in ours.items())


def test_resumed_run_equals_the_straight_one_bit_for_bit(dataset, tmp_path):  # noqa: F811
    """Through a checkpoint written while training goes on, after which the run is killed."""
    common = [*SMALL, f"--dataset={dataset}", "--attention=gsxa", "--parallel=fsdp", "--init_from=auto", "--dropout=0.1"]
    run_all(tmp_path / "straight", common, 2)
    arguments = [*common, f"--out_dir={tmp_path}/parts"]
    job = run(arguments, tmp_path / "jobs", ranks=2, fault=Fault("kill", "optimizer", 8, saved="ckpt_00000006.pt"))
    assert job.statuses[0] < 0 and job.statuses[1] == 1 and "another rank is gone" in job.last_line(1), job.text()
    job = run_all(tmp_path / "parts", common, 2)
    assert re.search(r"continuing from .*ckpt_00000006.pt", job.text())
    assert curve(tmp_path / "parts") == curve(tmp_path / "straight")
    ours, theirs = tensors(last_state(tmp_path / "parts")), tensors(last_state(tmp_path / "straight"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_stop_request_saves(dataset, tmp_path):  # noqa: F811
    common = [*SMALL, f"--dataset={dataset}", "--parallel=fsdp", "--init_from=auto"]
    job = run_all(tmp_path / "run", common, 2, fault=Fault("term", "step", 9, rank=1))
    assert "stopped on request at step 5 with a checkpoint" in job.text()
    run_all(tmp_path / "run", common, 2)
    run_all(tmp_path / "straight", common, 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


# --- arguments ---------------------------------------------------------------------------------------------------------------


def test_bad_value_is_refused(dataset, tmp_path, capsys):  # noqa: F811
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--parallel=zero"]) == 2
    assert "--parallel on the command line wants ddp | fsdp, found 'zero'" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_gpus_over_gloo_are_refused_before_anyone_waits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="parallel=fsdp on GPUs needs backend=nccl"):
        distributed.start(load(["--device=cuda", "--backend=gloo", "--parallel=fsdp"]))


# --- traffic -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_travel_during_backward_and_with_ddp_once_a_step(dataset, tmp_path, parallel):  # noqa: F811
    """By rank 0's profile of five steps of four micro-steps each: 12.6 MB of gradients, two of DDP's buckets (1 and 25 MB)."""
    micro_steps = 4
    arguments = [*SMALL, f"--dataset={dataset}", "--n_layer=4", "--n_embd=256", "--micro_batch_size=1", "--eval_tokens=32",
                 "--profile=2", "--max_iters=8", f"--parallel={parallel}"]
    run_all(tmp_path / "run", arguments, 2)
    trace = json.loads((tmp_path / "run" / "profile_trace.json").read_text())["traceEvents"]
    begins = {name: sorted(event["ts"] for event in trace if event.get("name") == name) for name in (
        "c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::_allgather_base_", "aten::embedding_dense_backward")}
    reductions = begins["c10d::allreduce_"] if parallel == "ddp" else begins["c10d::_reduce_scatter_base_"]
    ends = begins["aten::embedding_dense_backward"]  # the last operation of a backward pass
    assert len(ends) == 5 * micro_steps
    if parallel == "ddp":
        ends = ends[micro_steps - 1 :: micro_steps]
        assert len(reductions) == 5 * 2
        assert all(first < end < second for first, end, second in zip(reductions[::2], ends, reductions[1::2], strict=True))
    else:
        assert len(begins["c10d::_allgather_base_"]) == 5 * micro_steps * (2 * 4 + 1)  # twice a block, once what is outside
        assert len(reductions) == 5 * micro_steps * (4 + 1)
        assert all(sum(begin < end for begin in reductions) == 5 * i + 4 for i, end in enumerate(ends))


def without_compiler() -> None:
    """--compile then compiles nothing, at once."""
    torch._dynamo.config.disable = True


@pytest.mark.parametrize("extra, count, in_time", [
    (["--compile=True"], 1, True), (["--compile=True"], 3, False), (["--compile=False"], 1, False),
], ids=["first step compiles", "later step", "nothing to compile"])
def test_ranks_wait_for_one_that_compiles_and_for_no_other(dataset, tmp_path, extra, count, in_time):  # noqa: F811
    """One that takes four seconds longer, where dist_timeout is two."""
    arguments = [*SMALL, *extra, f"--dataset={dataset}", "--max_iters=2", "--dist_timeout=2", f"--out_dir={tmp_path}/run"]
    job = run(arguments, tmp_path / "jobs", ranks=2, fault=Fault("wait", "step", count, rank=1), prepare=without_compiler)
    if in_time:
        assert job.statuses == [0, 0], job.text()
    else:
        assert job.statuses[0] == 1 and "did not answer within dist_timeout" in job.last_line(0), job.text()


# --- memory ------------------------------------------------------------------------------------------------------------------

STEPS = """
import json, sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
import distributed
from configurator import load
from model import GPT
from scripts.bench.memory import process_status
from train import configure_optimizer

config = load(sys.argv[1:])
ranks = distributed.start(config)
events = []

def work(config):
    model = GPT(config.model_config(), seed=0)
    parallel = ranks.wrap(model, model.h)
    optimizer = configure_optimizer(model, config)
    idx = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size))
    for step in range(2):
        for micro_step in range(2):
            if parallel is not model:
                parallel.require_backward_grad_sync = micro_step == 1
            parallel(idx, idx)[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=parallel is model)
    return model, optimizer

small = ["--n_layer=1", "--n_embd=32", "--n_head=1", "--vocab_size=64", "--block_size=16", "--eval_tokens=16"]
work(load([*sys.argv[1:], *small]))  # loads what a first step loads
before = process_status("VmRSS")
model, optimizer = work(config)
peak = process_status("VmHWM") - before
state = [*model.parameters(), *(value for moments in optimizer.state.values() for value in moments.values())]
held = sum(distributed.local(t.detach()).untyped_storage().nbytes() for t in state if t.ndim)
settled = process_status("VmRSS") - before
ranks.close()
print("FOUND", json.dumps({"peak": peak, "held": held, "settled": settled}))
"""


def on_two_ranks(script: str, arguments: list[str]) -> list[dict]:
    place = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
                          "MALLOC_MMAP_THRESHOLD_": "65536"}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True, env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(output.partition("FOUND ")[2]) for output, _ in outputs]


@pytest.mark.slow  # the system maps every tensor's memory anew
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_memory_is_as_planned(parallel):
    """Of the state by its tensors and by the process that holds it; and of the process at its peak."""
    arguments = ["--n_layer=6", "--n_embd=384", "--n_head=4", "--block_size=64", "--vocab_size=4096", "--micro_batch_size=2",
                 "--eval_tokens=64", "--device=cpu", "--dtype=float32", f"--parallel={parallel}"]
    planned = plan.rehearse(load(arguments), 2, "cpu", 2)
    for found in on_two_ranks(STEPS, arguments):
        assert found["held"] == pytest.approx(planned.weights + planned.optimizer, rel=1e-3)
        kept = planned.gradients if parallel == "ddp" else 0  # in DDP's buckets
        assert found["settled"] == pytest.approx(found["held"] + kept, rel=0.1)
        assert found["peak"] == pytest.approx(planned.total, rel=0.15)
