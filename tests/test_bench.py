"""scripts/bench/: that what it compares with computes what we compute, and that the command says what it should."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

import model
from configurator import Config
from distributed import Ranks
from scripts.bench import __main__ as command
from scripts.bench import common
from scripts.bench import step as bench
from train import Run

ROOT = Path(__file__).parents[1]
CONFIG = Config(n_layer=2, n_head=3, n_embd=32, head_dim=8, vocab_size=61, block_size=24, eval_tokens=24, global_batch_size=4,
                micro_batch_size=2, warmup_iters=0, learning_rate=1e-3, grad_clip=0.1, device="cpu", dtype="float32")
TINY = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--vocab_size=512", "--micro_batch_size=2",
        "--global_batch_size=4", "--rounds=2", "--device=cpu"]
# Their name: ours. Only the learned positions have none, and only the embedding's LayerNorm stands alone with us.
NAMES = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def ours(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


@pytest.fixture
def pair(monkeypatch) -> tuple[bench.NanoGPTRun, Run]:
    """NanoGPT's run and ours, made to agree: the same weights, in fp64; no positions, no LayerNorm after the embedding."""
    monkeypatch.setattr(model, "rotate", lambda x, rope: x)
    theirs = bench.NanoGPTRun(CONFIG, torch.device("cpu"))
    run = Run(CONFIG, Ranks(0, 1, torch.device("cpu")))
    run._build(None)
    theirs.model.double()
    run.model.double().ln_emb = nn.Identity()
    run.parameters = list(run.model.parameters())
    theirs.model.wpe.weight.requires_grad_(False).zero_()
    with torch.no_grad():
        for p in run.model.parameters():  # larger than at the start, and gains other than 1
            p.mul_(5) if p.ndim == 2 else p.add_(torch.linspace(-0.2, 0.2, len(p), dtype=p.dtype))
        for name, p in theirs.model.named_parameters():
            if name != "wpe.weight":
                p.copy_(run.model.get_parameter(ours(name)))
    return theirs, run


def batches(n: int) -> list[bench.Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocab_size, (n, CONFIG.micro_batch_size, CONFIG.block_size + 1), generator=generator)
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def test_nanogpt_restated_equals_our_blocks_where_they_agree(pair):
    theirs, run = pair
    (x, y), = batches(1)
    logits, their_loss = theirs.model(x, y)
    _, our_loss = run.model(x, y)
    torch.testing.assert_close(logits, run.model(x)[0], rtol=0, atol=1e-10)
    assert their_loss.item() == pytest.approx(our_loss.item(), abs=1e-10)
    their_loss.backward()
    our_loss.backward()
    compared = [name for name, p in theirs.model.named_parameters() if p.grad is not None]
    assert len(compared) == 2 + 6 * CONFIG.n_layer
    for name in compared:
        torch.testing.assert_close(theirs.model.get_parameter(name).grad, run.model.get_parameter(ours(name)).grad,
                                   rtol=1e-6, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_positions_and_causality_of_nanogpt():
    """What the comparison above switches off or cannot see: positions are added, and no position sees a later token."""
    torch.manual_seed(0)
    theirs = bench.NanoGPT(CONFIG)
    idx = torch.randint(CONFIG.vocab_size, (1, 10))
    logits, _ = theirs(idx, idx)
    changed = idx.clone()
    changed[0, 6] = (idx[0, 6] + 1) % CONFIG.vocab_size
    torch.testing.assert_close(theirs(changed, idx)[0][:, :6], logits[:, :6])
    same = theirs(torch.full_like(idx, 3), idx)[0]
    assert not torch.allclose(same[:, 1], same[:, 2])


def test_the_whole_optimizer_step_equals_ours(pair):
    """Micro-steps, clipping and AdamW's groups, over three steps."""
    theirs, run = pair
    before = run.model.wte.weight.detach().clone()
    left, right = cycle(batches(2)), cycle(batches(2))
    for _ in range(3):
        theirs.train_step(left)
        run.train_step(right)
    assert (run.model.wte.weight - before).abs().max() > 1e-3
    for name, p in theirs.model.named_parameters():
        if name != "wpe.weight":
            torch.testing.assert_close(p, run.model.get_parameter(ours(name)), rtol=1e-5, atol=1e-9)


def test_the_loss_of_a_step_is_that_of_one_micro_batch(pair):
    """Divided by the number of micro-batches once; neither the clipped gradient nor AdamW minds its scale."""
    theirs, run = pair
    expected = run.train_step(cycle(batches(1)))["loss"]
    assert theirs.train_step(cycle(batches(1)))["loss"] == pytest.approx(expected, rel=1e-6)


def test_arms_differ_in_attention_alone():
    ranks = Ranks(0, 1, torch.device("cpu"))
    sa, xsa = (bench.Arm(name, replace(CONFIG, attention="sa"), ranks) for name in ("sa", "xsa"))
    assert (sa.run.model.config.attention, xsa.run.model.config.attention) == ("sa", "xsa")
    for p, q in zip(sa.run.parameters, xsa.run.parameters, strict=True):
        assert torch.equal(p, q)
    x, _ = next(sa.batches)
    assert torch.equal(x, next(xsa.batches)[0]) and x.shape == (2, 24)
    assert sa.step() > 0 and xsa.step() > 0


def test_a_loss_that_is_not_finite_ends_the_measurement():
    arm = bench.Arm("sa", CONFIG, Ranks(0, 1, torch.device("cpu")))
    with torch.no_grad():
        arm.run.model.wte.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="sa is not finite"):
        arm.step()


@pytest.mark.slow  # measures two steps of 200 MB of logits each, in processes that load torch
def test_memory_is_the_arms_own():
    """Peak memory of a step whose size is known: with a wide vocabulary and hardly any layers, NanoGPT's four tensors of the
    logits' size lead; ours holds none. The parent's own memory must not count."""
    ballast = torch.ones(200_000_000, dtype=torch.uint8)
    config = replace(CONFIG, vocab_size=50304, block_size=256, eval_tokens=256, micro_batch_size=4, global_batch_size=4)
    logits = 4 * 256 * 50304 * 4
    weights = 4 * config.n_embd * config.vocab_size
    theirs = bench.measure_memory("nanogpt", config)
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ
    assert 3.5 * logits < theirs < 4.5 * logits + 6 * weights
    assert bench.measure_memory("sa", config) < 1.6 * logits + 6 * weights
    del ballast


def test_summary_from_known_numbers():
    config = replace(CONFIG, global_batch_size=10, micro_batch_size=10, block_size=100, eval_tokens=100)
    times = {"nanogpt": [100.0, 200.0, 100.0], "sa": [50.0, 200.0, 80.0], "xsa": [55.0, 210.0, 80.0]}
    result = bench.summarize(times, {"nanogpt": 1000, "sa": 600, "xsa": 606}, config, peak=1e12)
    assert result["ratios"]["sa/nanogpt"] == {"time": 0.8, "time_quartiles": [0.65, 0.8, 0.9], "memory": 0.6}
    assert result["ratios"]["xsa/sa"]["time"] == pytest.approx(1.05) and result["ratios"]["xsa/sa"]["memory"] == 1.01
    sa = result["arms"]["sa"]
    assert sa["tokens_per_s"] == pytest.approx(1000 / 0.080)
    flops = model.GPT(config.model_config(), seed=0).flops_per_token()
    assert sa["mfu"] == pytest.approx(flops * 12500 / 1e12)
    lines = bench.figures(result, replace(config, vocab_size=50304), "cpu", compiled=False)
    assert ["held" in line for line in lines] == [True, True, False, True]
    assert not any("within the spread" in line for line in lines)
    result["ratios"]["xsa/sa"]["time_quartiles"] = [0.9, 1.05, 1.2]
    assert "within the spread" in bench.figures(result, config, "cpu", compiled=False)[1]
    assert len(bench.figures(result, config, "cpu", compiled=False)) == 3  # no memory figure for another vocabulary


def test_no_memory_at_all_loses_no_other_figure():
    times = {"nanogpt": [100.0, 200.0], "sa": [50.0, 200.0], "xsa": [55.0, 210.0]}
    result = bench.summarize(times, {"nanogpt": 0, "sa": 0, "xsa": 8}, replace(CONFIG, vocab_size=50304), peak=None)
    assert result["ratios"]["xsa/sa"]["memory"] is None and result["ratios"]["xsa/sa"]["time"] > 1
    assert bench.table(result).endswith("peak memory n/a")
    lines = bench.figures(result, replace(CONFIG, vocab_size=50304), "cpu", compiled=False)
    assert [line.endswith("n/a  at most 0.70: not measured") for line in lines] == [False, True, False, False]


def test_whose_ratios_are_told_and_at_whose_flops():
    assert bench.pairs(["nanogpt", "sa", "gsxa", "diff"]) == [("sa", "nanogpt"), ("gsxa", "sa"), ("diff", "sa"), ("diff", "gsxa")]
    config = Config(n_layer=2, n_head=8, n_embd=64, vocab_size=61, block_size=24, eval_tokens=24, global_batch_size=2,
                    micro_batch_size=2)
    result = bench.summarize({"sa": [10.0, 10.0], "gsxa": [20.0, 22.0]}, {"sa": 100, "gsxa": 150}, config, peak=1e12)
    assert list(result["ratios"]) == ["gsxa/sa"] and result["ratios"]["gsxa/sa"]["memory"] == 1.5
    assert result["ratios"]["gsxa/sa"]["time_quartiles"] == pytest.approx([2.05, 2.1, 2.15])
    fewer = model.GPT(config.with_attention("gsxa").model_config(), seed=0).flops_per_token()
    assert fewer < bench.flops_per_token(config)  # its kv heads
    assert result["arms"]["gsxa"]["mfu"] == pytest.approx(fewer * 48 / 0.021 / 1e12)
    assert "gsxa/sa: time 2.100" in bench.table(result)


@pytest.mark.parametrize("argv, expected", [
    (["--compare", "xsa", "gsxa"], ["--compare=xsa,gsxa"]),
    (["--compare=xsa,gsxa", "config/1.4b.py"], ["--compare=xsa,gsxa", "config/1.4b.py"]),
    (["config/a.py", "--compare", "xsa", "gsxa,diff", "config/b.py", "more", "--rounds=2", "x"],
     ["config/a.py", "--compare=xsa,gsxa,diff", "config/b.py", "more", "--rounds=2", "x"]),
    (["--compare", "--rounds=2"], ["--compare", "--rounds=2"]),
    (["A.json", "B.json"], ["A.json", "B.json"]),
])
def test_what_to_compare_is_listed_with_spaces_or_commas(argv, expected):
    assert common.with_commas(argv) == expected


def test_memory_is_given_back_whatever_fork_server_there_was(monkeypatch):
    """One that another has started, without malloc's setting, is not taken."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "7")
    program = ("import multiprocessing, os\n"
               "from scripts.bench.memory import _gives_memory_back, in_fresh_process\n"
               "if __name__ == '__main__':\n"
               "    with multiprocessing.get_context('forkserver').Pool(1) as pool:\n"
               "        assert not pool.apply(_gives_memory_back)\n"
               "    assert in_fresh_process(_gives_memory_back) and os.environ['MALLOC_MMAP_THRESHOLD_'] == '7'\n")
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("device, compiled, expected", [
    ("NVIDIA H200", True, ["MFU, sa", "MFU, xsa"]), ("NVIDIA H200", False, []), ("NVIDIA A100-SXM4-80GB", True, []),
    ("cpu", True, []),
])
def test_the_mfu_figure_is_for_one_machine_and_shape(device, compiled, expected):
    config = Config(n_layer=24, n_embd=2048, n_head=24, head_dim=128)
    result = {"arms": {"sa": {"mfu": 0.5}, "xsa": {"mfu": 0.56}}, "ratios": {}}
    lines = bench.figures(result, config, device, compiled)
    assert [line.partition("  ")[0] for line in lines] == expected
    assert ["held" in line for line in lines] == [False, True][: len(lines)]


@pytest.mark.slow  # four processes that load torch
def test_command(tmp_path):
    path = tmp_path / "bench.json"
    result = subprocess.run([sys.executable, "-m", "scripts.bench", "step", *TINY, f"--json={path}"], cwd=ROOT,
                            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "minutes" in result.stdout.splitlines()[2]
    assert "step time, sa / nanogpt" in result.stdout and "peak memory, xsa / sa" in result.stdout
    record = json.loads(path.read_text())
    assert record["config"]["n_embd"] == 32 and record["rounds"] == 2
    assert (record["dtype"], record["compiled"]) == ("float32", False)
    assert record["versions"]["torch"] == torch.__version__ and record["hardware"]["device"].startswith("cpu")
    assert list(record["arms"]) == ["nanogpt", "sa", "xsa"] and list(record["ratios"]) == ["sa/nanogpt", "xsa/sa"]
    for arm in record["arms"].values():
        assert len(arm["step_ms"]) == 2 and min(arm["step_ms"]) > 0
        assert arm["peak_memory_bytes"] > 0 and arm["mfu"] is None


@pytest.mark.parametrize("argv, said", [
    ([], "wanted one of step, block, presets, sizes, xsa, decode, loss, optimizer, loader, peers, tokenize, checkpoint, compare, "
     "found none"),
    (["pace"], "compare, found 'pace'"),
    (["step", "--rounds=1"], "--rounds: wanted at least 2"),
    (["step", "--rounds=x"], "rounds"),
    (["step", "--compare=gpt2"], "wanted some of nanogpt, hf, sa, xsa, "),
    (["step", "--compare", "xsa", "gpt2", "--rounds=2"], "found 'gpt2'"),
    (["step", "--compare=sa"], "wanted something other than sa"),
    (["step", "--compare=diff", "--n_head=3"], "--compare: diff: n_head must be even"),
    (["optimizer", "--compare", "xsa", "diff"], "unknown setting compare"),
    (["step", "--json=no/such/folder.json"], "no folder no/such"),
    (["step", "--nlayer=2"], "did you mean n_layer"),
    (["step", "config/none.py"], "config/none.py"),
    (["step", "--micro_batch_size=3"], "--micro_batch_size="),
    (["step", "--n_kv_head=4"], "--compare=xsa"),
    (["step", "--n_sink=4"], "--compare=xsa"),
    (["step", "--dtype=float16"], "float16"),
    (["step", "--device=cuda:77"], "cuda:77"),
    (["checkpoint", "--rounds=1"], "--rounds: wanted at least 2"),
    (["checkpoint", "--dtype=float16"], "float16"),
    (["checkpoint", "--out_dir=no/such/folder"], "no folder no/such"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, capsys):
    assert command.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err


def test_help_that_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    for argument in ([], ["compare"]):
        command_line = [sys.executable, "-m", "scripts.bench", *argument, "--help"]
        assert subprocess.run(command_line, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True).stderr == ""
    os.close(write)


def test_help(capsys):
    assert command.main(["step", "--help"]) == 0
    assert "--rounds=N" in capsys.readouterr().out


def test_checkpoint_benchmark(tmp_path, capsys):
    """A state of 0.8 MB, by the parts of train.py; nothing is left but the JSON file."""
    shape = [argument for argument in TINY if "rounds" not in argument]
    arguments = ["checkpoint", *shape, "--n_embd=64", "--eval_tokens=32", "--rounds=3", f"--out_dir={tmp_path}/run"]
    assert command.main([*arguments, f"--json={tmp_path}/bench.json"]) == 0
    out = capsys.readouterr().out
    assert "copy to the host" in out and "step, writing / not" in out and "at most 1.10" in out
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    n = sum(p.numel() for p in model.GPT(Config(**{**vars(CONFIG), **record["config"]}).model_config()).parameters())
    assert 12 * n < record["bytes"] < 12 * n + 100_000 and len(record["rounds"]) == 3
    for one in record["rounds"]:
        assert one["ratio"] == pytest.approx(one["step_while_writing_ms"] / one["step_ms"])
        assert 0 < one["copy_s"] and 0 < one["write_s"] and one["steps_while_writing"] >= 0


def gpu_check(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "scripts/gpu_check.sh", *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("argument", ["--gpu", "--out=", "results", "--speed=1"])
def test_gpu_check_refuses_bad_arguments(argument):
    result = gpu_check(argument)
    assert result.returncode == 2 and result.stderr.startswith("error: ")


def test_gpu_check_keeps_an_earlier_result(tmp_path):
    result = gpu_check("--cpu", f"--out={tmp_path}")
    assert result.returncode == 2 and "exists already" in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow  # ten processes that load torch, and 300 steps
def test_gpu_check_on_cpu(tmp_path):
    result = gpu_check("--cpu", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result.stdout + result.stderr
    table = (tmp_path / "out" / "results.md").read_text()
    assert table in result.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {9} and [row[1] for row in rows[2:]] == ["nanogpt", "sa", "xsa", "sa", "xsa"]
    assert [row[6] for row in rows[2:]] == ["", "nanogpt", "sa", "", "sa"]
    steps = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["split"] == "train"] == list(range(1, 301))
