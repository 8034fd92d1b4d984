"""train.py --profile: what it writes, and that training is not changed by it."""

import json

import pytest

import train
from configurator import load
from tests.test_train import SMALL, curve, dataset  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("profile")
    for name, flags in (("plain", []), ("profiled", ["--profile=4"]), ("short", ["--profile=10"])):
        assert train.main([*SMALL, *flags, f"--dataset={dataset}", f"--out_dir={folder / name}"]) == 0
    return folder


def test_trace_and_table(runs):
    text = (runs / "profiled" / "profile.txt").read_text()
    assert text.startswith("steps 5 to 9 on cpu") and text.count("Self CPU %") == 2 and "aten::mm" in text
    trace = json.loads((runs / "profiled" / "profile_trace.json").read_text())
    optimizer = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(optimizer) == 5
    assert "profile of steps 5 to 9" in (runs / "profiled" / "log.txt").read_text()
    assert not list((runs / "profiled").glob("*.tmp"))


def test_a_run_that_ends_earlier_leaves_what_there_is(runs):
    assert (runs / "short" / "profile.txt").read_text().startswith("steps 11 to 12 on cpu")


def test_training_is_the_same(runs):
    assert curve(runs / "profiled") == curve(runs / "plain")
    assert not list((runs / "plain").glob("profile*"))


def test_a_negative_step_is_refused():
    with pytest.raises(train.InputError, match="profile must be finite and not negative"):
        load(["--profile=-1"])
