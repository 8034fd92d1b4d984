"""scripts/bench/sizes.py: what it decides to measure, that it keeps to its time and what it has, and the command at CPU size."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from configurator import Config
from scripts.bench import __main__ as command
from scripts.bench import sizes as bench
from scripts.plan import rehearse
from tests.test_bench import gpu_check

CONFIG = Config(n_layer=5, n_head=8, n_embd=64, vocab_size=512, block_size=64, global_batch_size=16, micro_batch_size=1,
                eval_tokens=64, device="cpu", dtype="bfloat16")
CPU = torch.device("cpu")


def test_the_sizes_are_the_papers():
    found = bench.sizes(["--dtype=bfloat16"], torch.device("cuda"))
    shapes = {name: (c.n_layer, c.n_embd, c.n_head, c.head_dim, c.block_size, c.global_batch_size) for name, c in found.items()}
    assert shapes == {"1.4B": (24, 2048, 24, 128, 2048, 32), "0.7B": (24, 1536, 6, 256, 2048, 32),
                      "2.7B": (32, 2560, 24, 128, 2048, 32), "1.4B long": (24, 2048, 24, 128, 8192, 8)}
    assert {c.block_size * c.global_batch_size for c in found.values()} == {65536}


@pytest.mark.parametrize("n", [1, 4, 16])
def test_memory_of_all_layers_and_sequences_follows_from_few(n, monkeypatch):
    monkeypatch.setattr(bench, "KEEPS", {False: 1.0})
    config = replace(CONFIG, block_size=512, eval_tokens=512)  # as many tokens in two sequences as the loss takes at a time
    whole = rehearse(config, n, "cpu")
    expected = whole.total - whole.weights - whole.optimizer
    assert bench.memory_beside_state(config, False)(n) == pytest.approx(expected, rel=0.08)


def test_arms_share_memory_where_that_leaves_half_of_the_micro_batch(monkeypatch):
    monkeypatch.setattr(bench, "state_bytes", lambda config: 20)
    monkeypatch.setattr(bench, "memory_beside_state", lambda *_: lambda n: 10 * n)

    def chosen(room: float) -> list[tuple[str, int]]:
        return [(" ".join(group), arm["sa"].micro_batch_size) for group, arm in
                ((group, group) for group in bench.groups(CONFIG, bench.ARMS, room, False))]

    assert chosen(1000) == [("sa xsa gsxa", 16)]  # the whole batch
    assert chosen(100) == [("sa xsa gsxa", 4)]  # 60 and 40
    assert chosen(90) == [("sa xsa gsxa", 2)]  # 60 and 20; in pairs 4
    assert chosen(71) == [("sa xsa gsxa", 1)]  # in pairs 2
    assert chosen(65) == [("sa xsa", 2), ("sa gsxa", 2)]
    assert chosen(45) == []


def test_a_process_of_its_own():
    soon = time.monotonic() + 300
    assert bench.apart(len, "abc", deadline=soon) == 3
    assert bench.apart(int, "x", deadline=soon)["failed"].startswith("ValueError: invalid literal")
    assert bench.apart(os._exit, 3, deadline=soon) == {"failed": "its process ended with exit code 3"}
    start = time.monotonic()
    assert bench.apart(time.sleep, 60, deadline=start + 1) == {"failed": "no time left"}
    assert time.monotonic() - start < 50


@pytest.mark.parametrize("call", [
    "sizes.apart(exec, told, deadline=time.monotonic() + 99)", "memory.in_fresh_process(exec, told)",
])
def test_what_measures_ends_with_the_command(call):
    """Killed by a signal that leaves the command no time for anything."""
    script = f"""
import time
from scripts.bench import memory, sizes
told = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
if __name__ == "__main__":
    {call}
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        start = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == ""  # which ends when the last process that has it open does
    assert time.monotonic() - start < 50


class Now:
    """apart, without processes; a part that would run out of memory above `fits`."""

    def __init__(self, fits: int):
        self.fits, self.asked = fits, []

    def __call__(self, function, *arguments, deadline):
        self.asked.append((function, arguments))
        if function is bench.xsa.measure:
            return {"failed": "ValueError: no"}
        if function is bench.measure_loss:
            return {"ours": {"ms": [1.0, 1.0], "ms_quartiles": [1.0, 1.0, 1.0], "peak_memory_bytes": 1, "loss_error": 0.0,
                             "memory_to_ours": 1.0, "time_to_ours": [1.0, 1.0, 1.0]}}
        configs, rounds, *_ = arguments
        if configs["sa"].micro_batch_size > self.fits:
            return {"arms": {}, "ratios": {}, "errors": {"xsa": "OutOfMemoryError: CUDA out of memory"}}
        times = {name: [100.0 + i, 102.0 + i] for i, name in enumerate(configs)}
        return {**bench.step.summarize(times, dict.fromkeys(times, 10**9), configs["sa"], 1e12), "errors": {}}


@pytest.fixture
def work(tmp_path, monkeypatch):
    def make(fits: int, minutes: float = 8.0) -> tuple[bench.Measurement, Now]:
        own, configs, device = bench.parse(["--device=cpu", f"--minutes={minutes}", f"--out={tmp_path}"])
        made = bench.Measurement(own, configs, device, speed=1e12)
        now = Now(fits)
        monkeypatch.setattr(bench, "apart", now)
        return made, now

    return make


def test_half_of_the_micro_batch_where_memory_runs_out_and_what_fails_is_named(work, tmp_path):
    made, now = work(fits=1)
    made.run()
    tried = [arguments[0]["sa"].micro_batch_size for function, arguments in now.asked if function is bench.measure_arms]
    assert tried == [4, 2, 1, 4, 2, 1, 4, 2, 1, 1]
    record = json.loads((tmp_path / "sizes.json").read_text())
    assert list(record["sizes"]) == list(bench.SIZES) and record["waiting"] == []
    assert record["failed"] == {"XSA's pass": "ValueError: no"}
    assert {arm["micro_batch_size"] for arm in record["sizes"]["1.4B"]["arms"].values()} == {1}
    text = (tmp_path / "results.md").read_text()
    assert "not measured: XSA's pass: ValueError: no" in text and "1.4B: step time, xsa / sa" in text and "bfloat16  ours" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert [row[3] for row in rows] == ["sa", "xsa", "gsxa"] * 4 and rows[1][8] == "1.010 (1.010 - 1.010)"


def test_what_there_is_no_time_for_is_named_and_what_is_done_is_kept(work, tmp_path, monkeypatch, capsys):
    made, _ = work(fits=99)
    monkeypatch.setattr(made, "deadline", time.monotonic() + made.seconds("1.4B") + 1)
    original, written = bench.Measurement.write, []
    monkeypatch.setattr(bench.Measurement, "write", lambda made: (original(made), written.append(made.text())))
    made.run()
    assert "not measured yet: 0.7B" in written[0] and "| 1.4B |" in written[0]
    record = json.loads((tmp_path / "sizes.json").read_text())
    assert list(record["sizes"]) == list(bench.SIZES)
    assert record["failed"] == dict.fromkeys(["XSA's pass", "the loss"], "no time left")  # which would take longer
    assert "not measured: the loss: no time left" in written[-1]
    told = [line.partition(", ")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["1.4B: measured", "XSA's pass: no time left", "the loss: no time left", "0.7B: measured", "2.7B: measured",
                    "1.4B long: measured"]


@pytest.mark.slow  # the command with its processes
def test_gpu_check_of_speed_on_cpu(tmp_path):
    out = tmp_path / "out"
    result = gpu_check("--cpu", "--speed", f"--out={out}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1.4B long, 2 layers, width 64, T 256" in result.stdout and "at most 8.5\n" in result.stdout
    assert "\nthe loss: measured, " in result.stdout
    assert (out / "results.md").read_text().strip() in result.stdout
    record = json.loads((out / "sizes.json").read_text())
    assert not record["failed"] and not record["waiting"] and list(record["sizes"]) == list(bench.SIZES)
    for cell in record["sizes"].values():
        assert list(cell["arms"]) == list(bench.ARMS) and {"xsa/sa", "gsxa/sa"} <= set(cell["ratios"])
        assert all(len(arm["step_ms"]) == 2 and arm["peak_memory_bytes"] > 0 for arm in cell["arms"].values())
    assert record["xsa"]["copy_gb_per_s"] > 0 and record["loss"]["ours"]["peak_memory_bytes"] > 0


@pytest.mark.parametrize("argv, said", [
    (["--minutes=0"], "--minutes"), (["--rounds=1"], "--rounds"), (["config/0.7b.py"], "found 'config/0.7b.py'"),
    (["--dtype=float16"], "float16"), (["--nlayer=2"], "did you mean n_layer"), (["--json=no/such/folder.json"], "no folder"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, tmp_path, capsys):
    assert command.main(["sizes", "--device=cpu", *argv, f"--out={tmp_path / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err
    assert command.main(["sizes", "--help"]) == 0 and not (tmp_path / "out").exists()
