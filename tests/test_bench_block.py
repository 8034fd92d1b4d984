"""scripts/bench/block.py: that the block is the one that a model runs, the numbers are right, and what fails is marked."""

import json
from dataclasses import replace

import pytest
import torch

from configurator import Config
from model import GPT
from presets import PRESETS
from scripts.bench import __main__ as command
from scripts.bench import block as bench

CONFIG = Config(n_head=4, n_embd=32, head_dim=8, block_size=16, micro_batch_size=2, device="cpu", dtype="float32")
CPU = torch.device("cpu")
TINY = ["block", "--device=cpu", "--n_head=2", "--n_embd=16", "--head_dim=8", "--block_size=16", "--micro_batch_size=2",
        "--rounds=2"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_block_gets_what_a_model_gives_it(name):
    """And makes steps; dtypes as autocast has them in training."""
    config = replace(CONFIG, dtype="bfloat16")
    arm = bench.Arm(name, config, bench.make_inputs(config, CPU))
    model = GPT(replace(config, n_layer=2, vocab_size=7).with_attention(name).model_config(), seed=0)
    calls = []
    for block in model.h:
        block.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    x, rope, v1, mask, *_ = calls[int(model.config.value_residual)]
    ours = arm.inputs
    assert (ours[0].shape, ours[0].dtype) == (x.shape, x.dtype) and all(map(torch.equal, ours[1], rope))
    assert (ours[2] is None) == (v1 is None) and (v1 is None or (ours[2].shape, ours[2].dtype) == (v1.shape, v1.dtype))
    assert (ours[3] is None) == (mask is None) and (mask is None or torch.equal(ours[3], mask))
    assert {key: p.shape for key, p in arm.block.named_parameters()} == {
        key: p.shape for key, p in model.h[int(model.config.value_residual)].named_parameters()}
    assert arm.step() > 0 and arm.step() > 0
    assert arm.x.grad is None and all(p.grad is None for p in arm.block.parameters())


def test_a_step_is_forward_and_backward(monkeypatch):
    arm = bench.Arm("xsa", CONFIG, bench.make_inputs(CONFIG, CPU))
    out = arm.block(*arm.inputs)[0]
    expected = torch.autograd.grad(out, [arm.x, *arm.block.parameters()], arm.dout)
    found = []
    for tensor in (arm.x, *arm.block.parameters()):
        tensor.register_hook(lambda gradient: found.append(gradient))
    arm.step()
    assert {tuple(g.shape) for g in found} == {tuple(g.shape) for g in expected} and len(found) == len(expected)
    assert sum(g.double().square().sum() for g in found) == pytest.approx(sum(g.double().square().sum() for g in expected).item())


def test_a_gradient_that_is_not_finite_ends_the_measurement():
    arm = bench.Arm("sa", CONFIG, bench.make_inputs(CONFIG, CPU))
    arm.dout[0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="sa is not finite"):
        arm.step()


def test_sizes():
    config = replace(CONFIG, n_kv_head=2)
    found = [(c.block_size, c.n_embd, c.n_head, c.n_kv_head, c.head_dim) for c in bench.sizes(config, [8, 16, 64], [16, 32, 48])]
    assert found == [(16, 16, 2, 1, 8), (8, 32, 4, 2, 8), (16, 32, 4, 2, 8), (16, 48, 6, 3, 8), (64, 32, 4, 2, 8)]
    with pytest.raises(bench.InputError, match="--widths: 20 would have 2.5 heads"):
        bench.sizes(CONFIG, [16], [20])
    windows = [c.window for c in bench.sizes(Config(**vars(CONFIG) | {"attention": "swa", "window": None}), [8, 16, 64], [32])]
    assert windows == [2, 4, 16]


def test_memory_is_that_of_one_block():
    """By hand, in floats per token and channel: input and the gradients at both ends 3, kept by the forward pass 13 (two norms'
    outputs, q, k, v, y, the stream between, h), and some of h's size in passing."""
    config = replace(CONFIG, n_embd=256, head_dim=64, block_size=1024, micro_batch_size=4)
    memory = bench.in_fresh_process(bench.peak_memory_on_cpu, "xsa", config)
    per_channel = 4 * 4 * 1024 * 256
    assert 18 * per_channel < memory < 32 * per_channel


@pytest.fixture
def fast(monkeypatch):
    """Without processes."""
    monkeypatch.setattr(bench, "in_fresh_process", lambda function, name, config: 1000 * config.block_size + len(name))


def test_command(tmp_path, capsys):
    argv = [*TINY, "--lengths=16", "--widths=16", f"--out={tmp_path / 'out'}"]
    assert command.main(argv) == 0
    out = capsys.readouterr().out
    assert bench.CPU_FORM in out  # and in the title of the picture
    assert "minutes" in out and "time, xsa / sa, T 16, d_model 16" in out and "peak memory, xsa / sa" in out
    record = json.loads((tmp_path / "out" / "block.json").read_text())
    assert (record["dtype"], record["compiled"], record["rounds"], record["arms"]) == ("float32", False, 2, ["sa", "xsa"])
    assert record["versions"]["torch"] == torch.__version__ and record["hardware"]["device"].startswith("cpu")
    (cell,) = record["cells"]
    assert (cell["T"], cell["n_embd"], cell["n_head"]) == (16, 16, 2) and list(cell["ratios"]) == ["xsa/sa"]
    for arm in cell["arms"].values():
        assert len(arm["step_ms"]) == 2 and min(arm["step_ms"]) > 0 and arm["peak_memory_bytes"] > 0
    assert (tmp_path / "out" / "block.png").stat().st_size > 10_000


def test_several_presets_and_another_place_for_the_json(fast, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    argv = [*TINY, "--lengths=8,16", "--widths=16,32", "--attention=gqa", "--compare=xsa,gsxa", f"--out={tmp_path}"]
    assert command.main([*argv, f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    assert record["arms"] == ["gqa", "xsa", "gsxa"]
    assert [(cell["T"], cell["n_embd"]) for cell in record["cells"]] == [(8, 16), (16, 16), (16, 32)]
    assert all(list(cell["ratios"]) == ["xsa/gqa", "gsxa/gqa"] for cell in record["cells"])
    assert "gsxa" in capsys.readouterr().out and not (tmp_path / "block.json").exists()


def test_out_of_memory_is_marked_and_the_rest_goes_on(fast, monkeypatch, tmp_path, capsys):
    step, make_inputs = bench.Arm.step, bench.make_inputs

    def short_of_memory(arm):
        if arm.name == "xsa" and arm.x.shape[1:] == (32, 16):
            raise torch.OutOfMemoryError("none left")
        return step(arm)

    def inputs(config, device):
        if config.block_size == 64:
            raise torch.OutOfMemoryError("none left")
        return make_inputs(config, device)

    monkeypatch.setattr(bench.Arm, "step", short_of_memory)
    monkeypatch.setattr(bench, "make_inputs", inputs)
    assert command.main([*TINY, "--lengths=16,32,64,128", "--widths=16", f"--out={tmp_path}"]) == 0
    cells = {cell["T"]: cell for cell in json.loads((tmp_path / "block.json").read_text())["cells"]}
    failed = {T: [name for name, arm in cell["arms"].items() if arm.get("failed") == "out of memory"]
              for T, cell in cells.items()}
    assert failed == {16: [], 32: ["xsa"], 64: ["sa", "xsa"], 128: []}
    assert {T: list(cell["ratios"]) for T, cell in cells.items()} == {16: ["xsa/sa"], 32: [], 64: [], 128: ["xsa/sa"]}
    assert len(cells[32]["arms"]["sa"]["step_ms"]) == 2
    assert capsys.readouterr().out.count("out of memory") == 3 and (tmp_path / "block.png").exists()


def test_no_new_size_after_the_limit(fast, tmp_path, capsys):
    assert command.main([*TINY, "--lengths=8,16,32", "--widths=16", "--minutes=1e-6", f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("no time left") == 4
    cells = json.loads((tmp_path / "block.json").read_text())["cells"]
    assert ["failed" in cell["arms"]["sa"] for cell in cells] == [False, True, True]


def test_figures_from_known_numbers():
    def cell(T, times, memory):
        arms = {"sa": {"step_ms": [10.0, 20.0, 10.0], "peak_memory_bytes": 100},
                "xsa": {"step_ms": times, "peak_memory_bytes": memory}}
        return {"T": T, "n_embd": 32, "n_head": 4, "arms": arms, "ratios": bench.ratios(arms, "sa")}

    record = {"arms": ["sa", "xsa"], "cells": [cell(16, [10.5, 20.2, 10.0], 101), cell(32, [30.0, 60.0, 30.0], 104)],
              "config": vars(CONFIG), "device": "cpu", "compiled": False}
    assert record["cells"][0]["ratios"]["xsa/sa"] == {"time": 1.01, "time_quartiles": [1.005, 1.01, 1.03], "memory": 1.01}
    time, memory = bench.figures(record)
    assert "T 16" in time and "held" in time and "within the spread" in time
    assert "T 32" in memory and "1.040" in memory and "missed" in memory
    assert "(the worst of 2 sizes)" in memory
    arms = {"sa": {"failed": "no time left"}, "xsa": {"failed": "no time left"}}
    more = [*record["cells"], {"T": 64, "n_embd": 32, "n_head": 4, "arms": arms, "ratios": {}}]
    assert "(the worst of the 2 measured of 3 sizes)" in bench.figures(record | {"cells": more})[1]
    assert len(bench.figures(record | {"device": "cuda"})) == 1  # eager code on a GPU is held to no time
    assert "missed by 0.0%" not in bench.figures(record | {"device": "cuda", "compiled": True})[0]


@pytest.mark.parametrize("arms, measured", [
    (["sa", "xsa"], lambda T, C, name: True), (["sa", "xsa"], lambda T, C, name: T < 2048 and (C < 3072 or name == "sa")),
    (["sa", "xsa", "gqa", "gsxa", "swa"], lambda T, C, name: T == 512),
    (["sa", "xsa", "gqa", "gsxa", "swa"], lambda T, C, name: T < 4096 and (name == "sa" or C < 3072)),
])
def test_the_picture_can_be_read(arms, measured, tmp_path, monkeypatch):
    """What is written at the points crosses neither each other nor an axis, and a panel without a number has no scale."""
    cells = []
    for T, C in [*((T, 2048) for T in (512, 1024, 2048, 4096, 8192, 16384)), *((2048, C) for C in (1024, 3072, 4096))]:
        ms = T * (C + T) / 1e5
        found = {name: {"step_ms": [ms, ms], "step_ms_quartiles": [ms, ms, ms], "peak_memory_bytes": 300 * T * C}
                 if measured(T, C, name) else {"failed": "no time left"} for name in arms}
        cells.append({"T": T, "n_embd": C, "n_head": 16, "arms": found, "ratios": bench.ratios(found, "sa")})
    record = {"arms": arms, "cells": cells, "config": {"block_size": 2048, "n_embd": 2048, "micro_batch_size": 32},
              "device": "cpu", "dtype": "float32", "compiled": False, "hardware": {"device": "cpu (2 threads)"}}
    drawn = []
    monkeypatch.setattr(bench, "save_picture", lambda figure, path: drawn.append(figure))
    bench.draw(record, tmp_path / "block.png")
    drawn[0].canvas.draw()
    assert bench.CPU_FORM in drawn[0].get_suptitle()
    for i, axis in enumerate(drawn[0].axes):
        boxes = [text.get_window_extent() for text in axis.texts]
        assert boxes and not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
        frame = axis.get_window_extent()
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
        key = "T" if i < 2 else "n_embd"
        shown = [cell for cell in cells if cell["n_embd" if key == "T" else "T"] == 2048]
        assert [tick.get_text() for tick in axis.get_xticklabels()] == [str(x) for x in sorted(cell[key] for cell in shown)]
        has_numbers = any("failed" not in arm for cell in shown for arm in cell["arms"].values())
        assert bool(axis.get_yticklabels()) == has_numbers and (axis.get_yscale() == "log") == has_numbers
    bench.pyplot().close(drawn[0])


def test_slopes_of_known_powers():
    def cell(T, C):
        arm = {"step_ms_quartiles": [0.0, 3.0 * T**1.5 * C, 0.0], "peak_memory_bytes": 7 * T * C**2}
        return {"T": T, "n_embd": C, "arms": {"sa": arm, "xsa": {"failed": "out of memory"} if T > 16 else arm}}

    record = {"arms": ["sa", "xsa"], "cells": [cell(16, 32), cell(64, 32), cell(128, 32), cell(16, 64)], "config": vars(CONFIG)}
    found = bench.slopes(record)
    assert found["T"] == {"sa": pytest.approx({"time": 1.5, "memory": 1.0})}
    assert found["n_embd"]["xsa"] == pytest.approx({"time": 1.0, "memory": 2.0})
    assert bench.slope_lines(record)[0] == "time grows as T to the power of 1.50 (sa)"


def test_no_memory_at_all_loses_no_other_figure(tmp_path):
    def cell(T):
        arm = {"step_ms": [1.0, 1.0], "step_ms_quartiles": [1.0, 1.0, 1.0], "peak_memory_bytes": 0}
        arms = {"sa": arm, "xsa": arm}
        return {"T": T, "n_embd": 32, "n_head": 4, "arms": arms, "ratios": bench.ratios(arms, "sa")}

    record = {"arms": ["sa", "xsa"], "cells": [cell(16), cell(24), cell(64)], "config": vars(CONFIG), "device": "cpu",
              "compiled": False, "dtype": "float32", "hardware": {"device": "cpu"}}
    assert bench.table(record).endswith("1.000 (1.000 - 1.000)     n/a") and "not measured" in bench.figures(record)[-1]
    assert bench.slope_lines(record)[1] == "memory grows as T to the power of n/a (sa), n/a (xsa)"
    bench.draw(record, tmp_path / "block.png")
    assert (tmp_path / "block.png").stat().st_size > 0


@pytest.mark.parametrize("argv, said", [
    (["--rounds=1"], "--rounds: wanted at least 2"),
    (["--minutes=0"], "--minutes"),
    (["--compare=nanogpt"], "found 'nanogpt'"),
    (["--compare=sa"], "other than the baseline"),
    (["--lengths=0,4"], "--lengths"),
    (["--widths=a"], "--widths"),
    (["--widths=100"], "heads"),
    (["--n_sink=4"], "n_sink"),
    (["--activation_checkpointing=True"], "activation_checkpointing"),
    (["--json=no/such/folder.json"], "no folder no/such"),
    (["--device=cuda:77"], "cuda:77"),
    (["--nlayer=2"], "did you mean n_layer"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, tmp_path, capsys):
    assert command.main(["block", "--device=cpu", *argv, f"--out={tmp_path / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err
    assert not (tmp_path / "out").exists()


def test_help(capsys):
    assert command.main(["block", "--help"]) == 0
    assert "--lengths=A,B" in capsys.readouterr().out
