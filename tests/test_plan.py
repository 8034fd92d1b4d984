"""scripts/plan.py: its memory against what real steps keep and need, its arithmetic against the paper's figures."""

import json
from pathlib import Path

import pytest
import torch

from configurator import Config, load
from model import GPT
from presets import PRESETS
from scripts import plan

ROOT = Path(__file__).parents[1]
TINY = {"block_size": 64, "vocab_size": 512, "n_layer": 3, "n_head": 4, "n_embd": 96, "eval_tokens": 1024, "dtype": "float32"}


def kept_for_backward(config: Config, batch: int) -> int:
    """Bytes of the storages, other than parameters, that autograd keeps of a real forward pass up to the loss."""
    model = GPT(config.model_config(), seed=0)
    model.activation_checkpointing = config.activation_checkpointing
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage()  # held, so that no address is given out twice
        return t.detach()

    idx = torch.randint(config.vocab_size, (batch, config.block_size))
    half = config.dtype != "float32"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model._hidden(idx)
    return sum(storage.nbytes() for address, storage in held.items() if address not in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sa", "xsa"])
@pytest.mark.parametrize("shape", [
    {},
    {"n_kv_head": 2},
    {"head_dim": 48, "n_sink": 3},
    {"n_layer": 1, "n_embd": 192, "block_size": 96, "bias": True},
    {"activation_checkpointing": True},
], ids=str)
def test_activations_are_those_that_autograd_keeps(shape, attention, dtype):
    config = Config(**TINY | shape | {"attention": attention, "dtype": dtype})
    memory = plan.rehearse(config, micro_batch_size=8)
    kept = kept_for_backward(config, batch=8)
    copies = 0 if config.activation_checkpointing else memory.weight_copies  # there they live in autocast's cache alone
    last_hidden = 4 * 8 * config.block_size * config.n_embd  # held by the forward pass itself
    assert memory.activations + copies == pytest.approx(kept + last_hidden, rel=0.05)


@pytest.mark.parametrize("attention", PRESETS)
def test_activations_of_every_preset(attention):
    config = Config(**TINY | {"attention": attention, "micro_batch_size": 8})
    last_hidden = 4 * 8 * config.block_size * config.n_embd
    kept = kept_for_backward(config, batch=8) + last_hidden
    assert plan.rehearse(config, 8, "cpu").activations == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("attention", ["softcap", "sigmoid", "sink", "swa", "gemma2", "gpt_oss"])
def test_flex_attention_is_rehearsed_as_the_fused_one(attention):
    """Which keeps q, k, v, the output, and a number for each query and head, and nothing that grows with the square of T."""
    same = {"sigmoid": "qknorm", "gemma2": "gqa", "gpt_oss": "gqa"}.get(attention, "sa")
    found, fused = (plan.rehearse(Config(**TINY | {"attention": name}), 8) for name in (attention, same))
    assert found.activations == fused.activations
    dropped = plan.rehearse(Config(**TINY | {"attention": "swa", "dropout": 0.1}), 8)  # FlexAttention has no dropout
    assert dropped.activations > plan.rehearse(Config(**TINY | {"dropout": 0.1}), 8).activations


@pytest.mark.parametrize("attention", ["sa", "xsa"])
def test_activations_against_a_count_by_hand(attention):
    """Per token and layer the backward pass reads: two residuals, two LayerNorms' outputs, q, k, v, y, and the MLP's hidden
    state before GELU, 12 C in all at H d = C; what is kept beyond that is at most a tenth."""
    config = Config(**TINY | {"attention": attention, "n_layer": 8})
    tokens = 4 * config.block_size
    floor = 4 * tokens * config.n_embd * 12 * config.n_layer
    assert floor <= plan.rehearse(config, micro_batch_size=4).activations <= 1.1 * floor


def test_xsa_keeps_no_activation_more_than_sa():
    sa, xsa = (plan.rehearse(Config(**TINY | {"attention": a}), 8) for a in ("sa", "xsa"))
    assert xsa.activations == sa.activations
    assert xsa.weights == sa.weights


def test_activations_grow_with_the_batch_and_nothing_else_of_the_state_does():
    config = Config(**TINY)
    small, large = (plan.rehearse(config, size) for size in (4, 16))
    assert large.activations == pytest.approx(4 * small.activations, rel=0.02)
    assert (large.weights, large.gradients, large.optimizer) == (small.weights, small.gradients, small.optimizer)


def test_dropout_adds_its_masks_alone():
    without, with_masks = (plan.rehearse(Config(**TINY | {"dropout": p}), 4) for p in (0.0, 0.1))
    assert with_masks.activations - without.activations == 4 * 64 * 96 * (1 + 2 * 3)


PEAKS = {
    "activations": ["--n_layer=4", "--n_embd=64", "--n_head=4", "--block_size=256", "--vocab_size=512", "--micro_batch_size=16",
                    "--attention=xsa"],
    "checkpointing": ["--n_layer=4", "--n_embd=64", "--n_head=4", "--block_size=256", "--vocab_size=512", "--micro_batch_size=16",
                      "--activation_checkpointing=true"],
    "vocabulary": ["--n_layer=1", "--n_embd=64", "--n_head=4", "--block_size=128", "--vocab_size=50304", "--micro_batch_size=4"],
    "half": ["--n_layer=1", "--n_embd=64", "--n_head=4", "--block_size=128", "--vocab_size=50304", "--micro_batch_size=4",
             "--dtype=bfloat16"],
}


@pytest.mark.slow  # real training steps in processes of their own
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory from /proc")
@pytest.mark.parametrize("case", PEAKS)
def test_peak_of_a_real_step(case, tmp_path):
    """Peak resident memory of a process that trains, beside the prediction."""
    out = tmp_path / "plan.json"
    arguments = [*PEAKS[case], "--global_batch_size=16", "--eval_tokens=1024", "--device=cpu", "--n_gpus=1", "--measure"]
    assert plan.main([*arguments, f"--json={out}"]) == 0
    measured = json.loads(out.read_text())["measured"]
    assert measured["predicted_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.12)


@pytest.mark.parametrize(("file", "n_params", "total"), [
    ("config/0.7b.py", 0.679e9, 0.757e9), ("config/1.4b.py", 1.409e9, 1.512e9), ("config/2.7b.py", 2.684e9, 2.813e9),
])
def test_the_papers_sizes(file, n_params, total):
    numbers = plan.make_plan(load([str(ROOT / file)]), "B200", 8, 0.4)
    assert numbers["n_params"] == pytest.approx(n_params, rel=1e-3)
    assert numbers["n_params_total"] == pytest.approx(total, rel=1e-3)
    assert numbers["tokens"] == pytest.approx(104.86e9, rel=1e-4)
    assert numbers["memory_bytes"]["weights"] == 4 * numbers["n_params_total"]


def run_folder(folder: Path, device: str, peak_gb: float) -> Path:
    """A run on two devices, 1000 tokens/s but for the first line."""
    config = Config(**TINY)
    info = {"config": vars(config), "world_size": 2, "hardware": {"device": device},
            "flops_per_token": GPT(config.model_config(), seed=0).flops_per_token()}
    (folder / "config.json").write_text(json.dumps(info))
    lines = [{"split": "val"}]
    lines += [{"split": "train", "tokens_per_s": speed, "peak_memory_gb": peak_gb} for speed in (1, 900, 1000, 1100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_calibration_from_a_run(tmp_path):
    config = Config(**TINY)
    predicted = plan.rehearse(config, config.micro_batch_size).total
    found = plan.calibrate(run_folder(tmp_path, "NVIDIA H200", 1.2 * predicted / 1e9))
    assert found.flops_per_s == pytest.approx(500 * GPT(config.model_config(), seed=0).flops_per_token())
    assert found.memory_factor == pytest.approx(1.2)
    assert plan.calibrate(run_folder(tmp_path, "cpu (2 threads)", 3.0)).memory_factor == 1


def test_calibration_carries_to_another_shape(tmp_path, capsys):
    """What was measured comes out again for the same shape; twice the layers take twice the blocks' FLOPs."""
    out = tmp_path / "plan.json"
    shape = ["--block_size=32", "--vocab_size=64", "--n_head=2", "--n_embd=32", "--eval_tokens=32", "--micro_batch_size=2",
             "--global_batch_size=2", "--n_gpus=1", "--device=cpu", "--dtype=float32"]
    assert plan.main([*shape, "--n_layer=1", "--measure", f"--json={out}"]) == 0
    measured = json.loads(out.read_text())["measured"]
    seconds = {}
    for n_layer in (1, 2, 3):
        assert plan.main([*shape, f"--n_layer={n_layer}", f"--calibrate={out}", f"--json={tmp_path / 'c.json'}"]) == 0
        numbers = json.loads((tmp_path / "c.json").read_text())
        seconds[n_layer] = numbers["step_s"]
        assert numbers["memory_factor"] == pytest.approx(measured["peak_bytes"] / measured["predicted_bytes"])
    assert seconds[1] == pytest.approx(measured["micro_step_s"])
    assert seconds[3] - seconds[2] == pytest.approx(seconds[2] - seconds[1])
    text = capsys.readouterr().out
    assert "calibration" in text and "(measured; bf16)" in text
    assert plan.main([*shape, "--n_layer=2", "--measure", f"--calibrate={out}"]) == 0
    text = capsys.readouterr().out
    assert "by calibration" in text and "not fused" not in text


@pytest.mark.parametrize("unfused", [False, True])
def test_a_cpu_with_dropout_is_said_to_need_more(unfused):
    measured = {"device": "cpu", "dtype": "float32", "peak_bytes": 3, "predicted_bytes": 2, "micro_step_s": 1.0,
                "tokens_per_s": 8.0, "mfu": None, "unfused": unfused}
    assert ("with dropout a CPU's attention is not fused" in plan.render_measured(measured)) == unfused


def test_memory_that_was_measured_decides_what_fits():
    config = load([str(ROOT / "config/1.4b.py")])
    plain, larger = (plan.make_plan(config, "H200", 8, 0.4, factor) for factor in (1.0, 3.0))
    assert plain["fits"] and not larger["fits"] and larger["micro_batch_size_that_fits"] < config.micro_batch_size


def test_hours_by_hand():
    config = load([str(ROOT / "config/1.4b.py")])
    numbers = plan.make_plan(config, "H100", 8, 0.5)
    flops_per_token = 6 * 1.512e9 + 12 * 24 * 3072 * 2048
    hours = flops_per_token * 524288 * 200_000 / (8 * 989e12 * 0.5) / 3600
    assert numbers["hours"] == pytest.approx(hours, rel=1e-3)
    assert numbers["gpu_hours"] == pytest.approx(8 * hours, rel=1e-3)
    assert numbers["micro_steps"] == 256 // 8 // config.micro_batch_size
    assert numbers["checkpoint_bytes"] == pytest.approx(12 * 1.512e9, rel=1e-3)


def test_advice_is_the_largest_size_that_fits():
    config = Config(**TINY | {"global_batch_size": 96, "micro_batch_size": 96})
    room = plan.rehearse(config, 20).total
    size = plan.largest_that_fits(config, n_gpus=2, room=room)
    assert size == 16  # of the divisors of 48
    assert plan.rehearse(config, 16).total <= room < plan.rehearse(config, 24).total
    assert plan.largest_that_fits(config, n_gpus=2, room=1) is None


def test_a_step_that_does_not_fit_is_said_to(capsys):
    assert plan.main([str(ROOT / "config/2.7b.py"), "--n_layer=4", "--micro_batch_size=32", "--gpu=rtx 4090"]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    size = int(text.split("--micro_batch_size=")[1].split()[0])
    assert plan.main([str(ROOT / "config/2.7b.py"), "--n_layer=4", f"--micro_batch_size={size}", "--gpu=RTX 4090"]) == 0
    assert "DOES NOT FIT" not in capsys.readouterr().out


def test_fsdp_shares_the_state_and_adds_what_is_whole_for_a_time(capsys):
    """What training itself finds: tests/test_fsdp.py."""
    arguments = [str(ROOT / "config/2.7b.py"), "--n_layer=4"]
    ddp, fsdp = (load([*arguments, f"--parallel={parallel}"]) for parallel in ("ddp", "fsdp"))
    whole, shared = (plan.rehearse(config, 4, n_ranks=8) for config in (ddp, fsdp))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(shared, part) == pytest.approx(getattr(whole, part) / 8, rel=1e-3)
    for part in ("weight_copies", "activations", "loss", "backward"):
        assert getattr(shared, part) == getattr(whole, part)
    block, embedding = 4 * 2560 * (4 * 3072 + 8 * 2560), 4 * 2560 * 50304  # attention is 3072 wide
    assert whole.gathered == 0 and shared.gathered == pytest.approx(4 * block + embedding, rel=1e-3)
    assert plan.rehearse(fsdp, 4, n_ranks=1) == plan.rehearse(ddp, 4, n_ranks=1) == whole
    assert plan.main([*arguments, "--parallel=fsdp", "--n_gpus=8"]) == 0
    assert "a share of 1/8 (FSDP)" in capsys.readouterr().out


def test_memory_of_an_evaluation_with_fsdp_has_all_weights():
    """Of a step with hardly an activation, on many ranks."""
    config = Config(**TINY | {"n_layer": 24, "n_embd": 512, "parallel": "fsdp"})
    memory = plan.rehearse(config, 1, n_ranks=64)
    whole = plan.rehearse(config, 1).weights
    assert memory.total == pytest.approx(whole + memory.weights + memory.optimizer, rel=1e-6)


def test_table_is_narrow_and_json_has_the_numbers(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = [str(ROOT / "config/1.4b.py"), str(ROOT / "config/seq16k.py"), "--n_layer=2", "--n_sink=4", "--n_kv_head=8"]
    assert plan.main([*arguments, f"--json={out}", "--mfu=0.3"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    numbers = json.loads(out.read_text())
    assert f"{numbers['n_params']:,}" in text
    assert "fused (SDPA)" in text and f"{2 * 2 * 8 * 128 * 2:,} bytes a token" in text
    assert sum(numbers["memory_bytes"].values()) == numbers["memory_total_bytes"]
    assert numbers["config"]["block_size"] == 16384
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(("argument", "wanted"), [
    ("--gpu=abacus", "H100"), ("--n_gpus=0", "n_gpus"), ("--n_gpus=x", "n_gpus"), ("--mfu=40", "mfu"), ("--mfu=nan", "mfu"),
    ("--n_gpus=7", "global_batch_size"), ("--n_layers=3", "n_layer"), ("--json=/no/such/folder/x.json", "json"),
    ("--measure=yes", "measure"), ("--calibrate=no/such/run", "calibrate"), ("--calibrate=tests", "calibrate"),
])
def test_bad_arguments(argument, wanted, capsys):
    assert plan.main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and wanted in captured.err


def test_help(capsys):
    assert plan.main(["--help"]) == 0
    assert "--gpu=NAME" in capsys.readouterr().out
