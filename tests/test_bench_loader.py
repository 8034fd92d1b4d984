"""scripts/bench/loader.py, and the waiting time that data.loader tells."""

import json
import time

import numpy as np
import pytest
import torch

from configurator import load
from data import loader as data_loader
from data.shards import open_dataset
from scripts.bench import __main__ as command
from scripts.bench import loader as bench

TINY = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--vocab_size=300", "--eval_tokens=16",
        "--micro_batch_size=2", "--global_batch_size=4"]
CPU = torch.device("cpu")


@pytest.fixture
def stream(tmp_path):
    for split in ("train", "val"):
        np.arange(300, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    return open_dataset(tmp_path).train


def test_the_plain_loop_gives_windows_of_the_same_shape(stream):
    config = load(TINY)
    x, y = next(bench.plain_batches(stream, config, CPU))
    ours = next(bench.make_loader(stream, config, CPU).batches())
    assert (x.shape, x.dtype) == (ours[0].shape, ours[0].dtype) == ((2, 16), torch.int64)
    assert torch.equal(x + 1, y) and torch.equal(x - x[:, :1], torch.arange(16).expand(2, 16))


def test_waiting_is_counted_where_the_thread_is_slow_and_only_once(stream, monkeypatch):
    tokens = data_loader._tokens

    def slow(*arguments):
        time.sleep(0.02)
        return tokens(*arguments)

    monkeypatch.setattr(data_loader, "_tokens", slow)
    with bench.make_loader(stream, load(TINY), CPU).batches() as batches:
        for _ in range(10):
            next(batches)
        assert 0.1 < batches.take_waited() and batches.take_waited() == 0


def test_no_waiting_where_the_thread_is_ahead(stream):
    with bench.make_loader(stream, load(TINY), CPU).batches() as batches:
        next(batches)
        time.sleep(0.1)
        batches.take_waited()
        next(batches)
        assert batches.take_waited() < 0.05


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "RANDOM_TOKENS", 5000)
    path = tmp_path / "loader.json"
    assert command.main(["loader", *TINY, "--batches=8", "--rounds=2", f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    assert list(record["loaders"]["arms"]) == ["loader", "memmap"] and len(record["loaders"]["speed_ratio"]) == 3
    step = record["step"]
    assert len(step["step_ms"]) == 2 and all(0 <= a < b for a, b in zip(step["data_ms"], step["step_ms"], strict=True))
    assert "share of a step" in capsys.readouterr().out


@pytest.mark.parametrize("argv, said", [(["--batches=0"], "--batches"), (["--block_size=5000"], "wanted below 5000 without"),
                                        (["--dataset=no/such"], "no/such"), (["--micro_batch_size=3"], "micro_batch_size")])
def test_bad_arguments_exit_2(argv, said, capsys, monkeypatch):
    monkeypatch.setattr(bench, "RANDOM_TOKENS", 5000)
    assert command.main(["loader", *TINY, "--eval_tokens=20000000", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err
