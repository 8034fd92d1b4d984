"""scripts/bench/compare.py: two results side by side."""

import json

import pytest

from scripts.bench import __main__ as command
from scripts.bench import compare as bench


def record(sa: list[float], memory: int, **more) -> dict:
    arm = {"step_ms": [1.0, 2.0, 3.0], "step_ms_quartiles": sa, "mfu": None, "peak_memory_bytes": memory}
    return {"arms": {"sa": arm}, "ratios": {}, "config": {"n_embd": 32, "seed": 1}, "rounds": 3, "command": ["a"],
            "versions": {"torch": "2.13"}} | more


def test_figures_are_found_wherever_they_lie():
    assert bench.figures(record([9, 10, 11], 100)) == {"arms / sa / step_ms": [9, 10, 11], "arms / sa / peak_memory_bytes": [100]}
    assert bench.figures({"cells": [{"T": 8, "arms": {"sa": {"ms": 2}}}], "config": {"x": 1}, "dtypes": {"bf": {"ms": 3}}}) == {
        "cells / 0 / T": [8], "cells / 0 / arms / sa / ms": [2], "dtypes / bf / ms": [3]}


def test_ratio_and_spread():
    found = bench.compare(record([9, 10, 11], 100), record([10.5, 12, 13], 50))
    assert found["arms / sa / step_ms"] == {"a": [9, 10, 11], "b": [10.5, 12, 13], "ratio": 1.2, "within_spread": True}
    memory = found["arms / sa / peak_memory_bytes"]
    assert memory["ratio"] == 0.5 and memory["within_spread"] is None
    assert not bench.compare(record([9, 10, 11], 1), record([11.5, 12, 13], 1))["arms / sa / step_ms"]["within_spread"]
    assert bench.compare(record([0, 0, 0], 1), record([1, 1, 1], 1))["arms / sa / step_ms"]["ratio"] is None


def test_command(tmp_path, capsys):
    a, b, out = (tmp_path / name for name in ("a.json", "b.json", "out.json"))
    a.write_text(json.dumps(record([9, 10, 11], 100)))
    b.write_text(json.dumps(record([9, 10.1, 11], 120, config={"n_embd": 64, "seed": 1}, command=["b"], git_commit="f")))
    assert command.main(["compare", str(a), str(b), f"--json={out}"]) == 0
    said = capsys.readouterr().out
    assert "config.n_embd: 32 -> 64" in said and "git_commit: None -> f" in said and "['b']" not in said and "seed" not in said
    assert "1.010  within the spread" in said and "1.200" in said
    assert json.loads(out.read_text())["figures"]["arms / sa / step_ms"]["ratio"] == pytest.approx(1.01)


@pytest.mark.parametrize("text, said", [
    (None, "cannot be read"), ("{", "cannot be read"), ("[1]", "not what a benchmark"), ("{}", "not what a benchmark"),
    ('{"config": {}}', "no figure in common"), ('{"config": {}, "a_quartiles": "x"}', "no figure in common"),
    ('{"config": {}, "a_quartiles": [null, 1, 2]}', "no number"), ('{"config": {}, "a_quartiles": ["x", 1, 2]}', "no number"),
    ('{"config": {}, "a": 1' + 400 * "0" + "}", "no number"), ('{"config": {}, "arms": [1, {}, null]}', "no figure in common"),
 ("[" * 100_000, "cannot be read"),
])
def test_bad_files_exit_2(text, said, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(record([9, 10, 11], 100)))
    if text is not None:
        bad.write_text(text)
    assert command.main(["compare", str(good), str(bad)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err and "bad.json" in err


@pytest.mark.parametrize("argv", [["a.json"], ["a.json", "b.json", "c.json"], ["a.json", "b.json", "--json=no/such/folder.json"]])
def test_bad_arguments_exit_2(argv, capsys):
    assert command.main(["compare", *argv]) == 2
    assert capsys.readouterr().err.startswith("error: ")
