"""train.py --profile: what it writes, and that training is not changed by it."""

import json
from dataclasses import replace

import pytest
import torch

import train
from configurator import load
from tests.test_train import SMALL, curve, dataset  # noqa: F401 - a fixture
from tracker import Profile


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("profile")
    for name, flags in (("plain", []), ("profiled", ["--profile=4"]), ("short", ["--profile=10"])):
        assert train.main([*SMALL, *flags, f"--dataset={dataset}", f"--out_dir={folder / name}"]) == 0
    return folder


def test_trace_and_table(runs):
    text = (runs / "profiled" / "profile.txt").read_text()
    assert text.splitlines()[1].endswith("in these numbers too: evaluation at step 8, saving at step 6")
    assert text.startswith("steps 5 to 9 on cpu") and text.count("Self CPU %") == 2 and "aten::mm" in text
    trace = json.loads((runs / "profiled" / "profile_trace.json").read_text())
    optimizer = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(optimizer) == 5
    assert "profile of steps 5 to 9" in (runs / "profiled" / "log.txt").read_text()
    assert not list((runs / "profiled").glob("*.tmp"))


def test_a_run_that_ends_earlier_leaves_what_there_is(runs):
    assert (runs / "short" / "profile.txt").read_text().startswith("steps 11 to 12 on cpu")


def test_what_else_is_in_it_is_named(tmp_path):
    config = load(["--profile=2", "--max_iters=9", "--eval_interval=3", "--save_interval=7", "--diagnostics_interval=2",
                   f"--out_dir={tmp_path}"])

    def head() -> list[str]:
        return (tmp_path / "profile.txt").read_text().split("\n\n")[0].splitlines()[1:]

    profile = Profile(config, torch.device("cpu"))
    profile.before(2)
    assert profile.after(6) is None and profile.after(7) is not None
    assert head() == ["Not of these steps, but in these numbers too: evaluation at step 3 and 6, diagnostics at step 4 and 6"]
    profile = Profile(replace(config, eval_interval=100, diagnostics_interval=0, profile=7), torch.device("cpu"))
    profile.before(7)
    profile.close(8)
    assert head() == ["Not of these steps, but in these numbers too: what the run's end took"]
    profile = Profile(replace(config, profile=7), torch.device("cpu"))
    profile.before(7)
    assert profile.after(8) is None and profile.after(9) is not None  # before the last evaluation and checkpoint
    assert head() == ["Not of these steps, but in these numbers too: diagnostics at step 8"]


def test_training_is_the_same(runs):
    assert curve(runs / "profiled") == curve(runs / "plain")
    assert not list((runs / "plain").glob("profile*"))


def test_a_negative_step_is_refused():
    with pytest.raises(train.InputError, match="profile must be finite and not negative"):
        load(["--profile=-1"])


def test_a_step_that_never_comes_is_refused():
    with pytest.raises(train.InputError, match="profile must be below max_iters=12, found 12"):
        load(["--profile=12", "--max_iters=12"])
