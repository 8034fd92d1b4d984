"""scripts/bench/presets.py: that its checks see what is wrong, and its table says what was measured."""

import json
from dataclasses import replace

import pytest
import torch

from configurator import Config
from model import CausalSelfAttention
from presets import PRESETS
from scripts.bench import __main__ as command
from scripts.bench import presets as bench
from scripts.bench import step as step_bench
from tests.test_bench import gpu_check

CONFIG = Config(n_layer=2, n_head=8, n_embd=64, head_dim=8, vocab_size=61, block_size=24, eval_tokens=24, global_batch_size=2,
                micro_batch_size=2, device="cpu", dtype="float32")
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes(name):
    found = bench.check(bench.variants([name], CONFIG)[0][name])
    assert not bench.faults(found) and max(found[key] for key in bench.LIMITS) < 1e-5


@pytest.mark.parametrize("name, method, change", [
    ("gated", "gates", lambda attn, x: 1.01 * attn.gates(x)),
    ("softcap", "scores", lambda attn, q, k, start=0: attn.scores(q, k, start).clamp(max=1.5)),
    ("swa", "mask", lambda attn, T, device: attn.mask(T, device).tril(-1) | torch.eye(T, dtype=torch.bool).roll(1, 0)),
    ("xsa", "output", lambda attn, y, v, x: attn.c_proj(y.transpose(1, 2).flatten(2))),
])
def test_a_preset_that_is_wrong_is_found(name, method, change, monkeypatch):
    """In fp32; what is wrong by more than bf16's rounding also in training's dtype."""
    original = getattr(CausalSelfAttention, method)

    def wrong(attn, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(CausalSelfAttention, method, original)
            return change(attn, *arguments)

    monkeypatch.setattr(CausalSelfAttention, method, wrong)
    assert any("logits differ" in fault for fault in bench.faults(bench.check(bench.variants([name], CONFIG)[0][name])))


def test_bf16_is_within_its_limit():
    found = bench.check(replace(CONFIG.with_attention("gsxa"), dtype="bfloat16"))
    assert not bench.faults(found) and 1e-3 < found["as_trained"] < bench.LIMITS["as_trained"]


def test_faults_are_said():
    good = {"logits": 1e-5, "gradients": 1e-4, "as_trained": 0.01}
    assert bench.faults(good) == [] and bench.faults("ValueError: x") == ["ValueError: x"]
    assert bench.faults(good | {"gradients": float("nan")}) == ["gradients differ by nan, at most 5e-03 wanted"]


def test_arms_are_the_presets_at_the_given_shape():
    arms, refused = bench.variants(["gsxa", "diff"], replace(CONFIG, n_kv_head=1))
    assert list(arms) == ["sa", "gsxa", bench.WITHOUT_CLIP] and "n_kv_head" in refused["diff"]
    assert arms["gsxa"].qk_clip == 100.0 and arms[bench.WITHOUT_CLIP] == replace(arms["gsxa"], qk_clip=0.0)
    assert bench.Arm("gsxa", arms[bench.WITHOUT_CLIP], bench.distributed.start(CONFIG)).run.model.config.qk_clip == 0.0


def test_what_fails_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(step_bench, "measure_memory", lambda *_: 1000)
    monkeypatch.setattr(bench, "GROUP", 1)
    step = step_bench.Arm.step
    monkeypatch.setattr(step_bench.Arm, "step", lambda arm: 1 / 0 if arm.name == "xsa" else step(arm))
    arms, _ = bench.variants(["xsa", "gqa", "swa"], CONFIG)
    costs = bench.measure(arms, 2, bench.time.monotonic() + 600)
    assert costs["xsa"] == {"error": "ZeroDivisionError: division by zero"} and len(costs["gqa"]["ms"]) == 2
    assert costs["gqa"]["sa_ms"] != costs["swa"]["sa_ms"]  # measured beside it
    assert bench.measure(arms, 2, bench.time.monotonic() - 1) == {}


def test_table_from_known_numbers():
    arms, _ = bench.variants(["qkclip", "gsxa", "xsa"], CONFIG)
    cost = {"ms": [10.0, 10.0], "sa_ms": [10.0, 10.0], "peak_memory_bytes": 2**20}
    costs = {"sa": cost, "qkclip": cost | {"ms": [11.0, 12.0], "peak_memory_bytes": 3 * 2**20},
             "gsxa": cost | {"ms": [16.5, 16.5]}, bench.WITHOUT_CLIP: cost | {"ms": [15.0, 15.0]}}
    checks = {"sa": {"logits": 1e-6, "gradients": 2e-6, "as_trained": 0.01, "seconds": 1.0}, "gsxa": "RuntimeError: no"}
    result = bench.summarize(arms, checks, costs, 1e12, CPU)
    assert result["qkclip"]["tokens_per_s"] == pytest.approx(2 * 24 / 0.0115) and result["qkclip"]["mfu"] > 0
    assert bench.clip_cost(result) == "QK-Clip's share of a step's time: qkclip / sa 1.150, gsxa / gsxa without it 1.100"
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in bench.table(result).splitlines()}
    assert rows["sa"][1:] == ["1e-06", "2e-06", "1e-02", "10.0", "4,800", "1", "1 MiB", "1.000"]
    assert rows["qkclip"][1] == "not checked" and rows["qkclip"][6:] == ["1.150 (1.125 - 1.175)", "3 MiB", "3.000"]
    without = bench.summarize(arms, checks, {"sa": cost | {"peak_memory_bytes": 0}, "gsxa": cost}, 1e12, CPU)
    assert without["gsxa"]["memory_to_sa"] is None and "| n/a " in bench.table(without)
    assert rows["gsxa"][1] == "failed" and rows["xsa"][4] == "not measured"


@pytest.mark.slow  # the command with its processes
def test_gpu_check_of_presets_on_cpu(tmp_path):
    result = gpu_check("--cpu", "--presets", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out" / "results.md").read_text().strip() in result.stdout
    record = json.loads((tmp_path / "out" / "presets.json").read_text())
    assert set(record["arms"]) == {*PRESETS, bench.WITHOUT_CLIP} and not record["wrong"] and not record["refused"]
    assert all(arm["peak_memory_bytes"] > 0 and len(arm["ms"]) == 2 for arm in record["arms"].values())


@pytest.mark.parametrize("argv, said", [
    (["--presets=gsxa,gpt"], "found 'gpt'"), (["--minutes=0"], "--minutes"), (["--rounds=1"], "--rounds"),
    (["--dtype=float16"], "float16"), (["--nlayer=2"], "did you mean n_layer"), (["--json=no/such/folder.json"], "no folder"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, capsys):
    assert command.main(["presets", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err
    assert command.main(["presets", "--help"]) == 0
