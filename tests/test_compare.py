"""scripts/compare.py on run folders written as train.py writes them, with losses whose differences are known."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from presets import GPTConfig
from scripts import compare

ROOT = Path(__file__).parents[1]
TOKENS_PER_STEP = 4096
SETTINGS = {
    "seed": 1, "attention": "sa", "dataset": "data/sotu", "max_iters": 100, "block_size": 256, "global_batch_size": 16,
    "learning_rate": 1e-3, "min_lr": 1e-4, "lr_decay_iters": 100, "n_head": 4, "n_kv_head": 4, "n_embd": 128, "head_dim": 32,
    "micro_batch_size": 8, "compile": None, "dtype": "float32", "out_dir": "x",
}


def train_loss(step: int) -> float:
    return 2.0 + 3.0 / (1 + step)


def write_run(folder: Path, gap: float = 0.0, steps: int = 100, log_interval: int = 1, eval_interval: int = 20,
              step_ms: float = 50.0, info: dict | None = None, **settings) -> Path:
    """A run whose training loss is train_loss + gap, and whose validation loss is 0.1 above."""
    folder.mkdir(parents=True)
    config = SETTINGS | {"max_iters": steps, "lr_decay_iters": steps} | settings
    described = {"config": config, "n_params": 830_000, "data": {"fingerprint": "f1"}, "hardware": {"device": "cpu"},
                 "world_size": 1}
    (folder / "config.json").write_text(json.dumps(described | (info or {})))
    tokens_per_step = config["block_size"] * config["global_batch_size"]
    lines = []
    for step in range(steps + 1):
        at = {"step": step, "tokens": step * tokens_per_step}
        if step > 0 and step % log_interval == 0:
            lines.append(at | {"split": "train", "loss": train_loss(step) + gap, "lr": 1e-3, "grad_norm": 1.0, "step_ms": step_ms,
                               "tokens_per_s": 80_000.0, "mfu": None, "peak_memory_gb": 1.5})
        if step % eval_interval == 0 or step == steps:
            lines.append(at | {"split": "val", "loss": train_loss(step) + gap + 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(capsys, *argv) -> tuple[int, str, str]:
    status = compare.main([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by variant, and the header under "variant"."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in cells}


def column(text: str, variant: str, name: str) -> str:
    table = rows(text)
    return table[variant][table["variant"].index(name)]


def test_seeds_are_paired_and_the_standard_error_is_of_the_differences(tmp_path, capsys):
    bases, gaps = [0.0, 0.3, -0.2], [0.02, 0.05, -0.01]  # seeds differ far more than the variants do
    folders = [write_run(tmp_path / f"sa{s}", bases[s], seed=s) for s in range(3)]
    folders += [write_run(tmp_path / f"xsa{s}", bases[s] + gaps[s], attention="xsa", seed=s, step_ms=51.0) for s in (2, 0, 1)]
    status, out, _ = run(capsys, *folders)
    assert status == 0
    expected = f"{np.mean(gaps):+.4f} ± {np.std(gaps, ddof=1) / math.sqrt(3):.4f} (3 seeds)"
    assert column(out, "xsa", "train difference") == column(out, "xsa", "val difference") == expected
    assert column(out, "sa", "train difference") == "baseline"
    last = np.mean([train_loss(step) for step in range(96, 101)])  # the last 5% of 100 logged steps
    assert float(column(out, "sa", "train loss")) == pytest.approx(last + np.mean(bases), abs=1e-4)
    assert float(column(out, "sa", "val loss")) == pytest.approx(train_loss(100) + 0.1 + np.mean(bases), abs=1e-4)
    assert column(out, "xsa", "ratio") == "1.020" and column(out, "xsa", "tokens") == "410k"
    assert column(out, "sa", "seeds") == "0, 1, 2" and column(out, "sa", "memory GB") == "1.50"
    assert "Warning" not in out
    assert (tmp_path / "comparison.md").read_text() in out
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_only_common_seeds_are_paired(tmp_path, capsys):
    folders = [write_run(tmp_path / f"sa{s}", gap=s, seed=s) for s in (1, 2)]
    one = write_run(tmp_path / "xsa", gap=2.25, attention="xsa", seed=2)
    assert column(run(capsys, *folders, one)[1], "xsa", "val difference") == "+0.2500, s.e. n/a (one seed)"
    none = write_run(tmp_path / "xsa3", gap=2.0, attention="xsa", seed=3)
    assert column(run(capsys, *folders, none)[1], "xsa", "val difference") == "+0.5000, s.e. n/a (no seed in common)"


def test_one_run_gives_its_curve(tmp_path, capsys):
    folder = write_run(tmp_path / "runs" / "sa")
    status, out, _ = run(capsys, folder, "--x=steps", "--smooth=0")
    assert status == 0 and list(rows(out)) == ["variant", "sa"]
    assert (tmp_path / "runs" / "comparison.png").exists()


def test_variants_are_named_by_what_differs(tmp_path, capsys):
    folders = [write_run(tmp_path / f"{a}{lr}", attention=a, learning_rate=lr, min_lr=lr / 10, micro_batch_size=size)
               for a in ("sa", "xsa") for lr, size in ((1e-3, 8), (2e-3, 4))]
    out = run(capsys, *folders)[1]
    names = [f"{a}, learning_rate={lr}" for a in ("sa", "xsa") for lr in ("0.001", "0.002")]
    assert list(rows(out)) == ["variant", *names]
    assert "not the same recipe: different learning_rate\n" in out.replace(".  \n", "\n")
    assert "not of the same set-up: different micro_batch_size" in out


def test_a_preset_s_switches_are_not_named_but_for_those_set_otherwise(tmp_path, capsys):
    def folder(name: str, **settings) -> Path:
        return write_run(tmp_path / name, **asdict(GPTConfig(**settings)))

    plain, gsxa = folder("sa"), folder("gsxa", attention="gsxa")
    assert list(rows(run(capsys, plain, gsxa)[1])) == ["variant", "sa", "gsxa"]
    ungated = folder("ungated", attention="gsxa", gate="off")
    assert list(rows(run(capsys, plain, gsxa, ungated)[1])) == ["variant", "sa, gate=off", "gsxa, gate=head", "gsxa, gate=off"]


def test_a_setting_that_others_explain_is_kept_where_it_says_more(tmp_path, capsys):
    folders = [write_run(tmp_path / f"{i}", learning_rate=lr, min_lr=1e-5) for i, lr in enumerate((1e-3, 2e-3))]
    folders.append(write_run(tmp_path / "2", learning_rate=1e-3, min_lr=0.0))
    out = run(capsys, *folders)[1]
    assert "sa, learning_rate=0.001, min_lr=1e-05" in rows(out) and "sa, learning_rate=0.001, min_lr=0.0" in rows(out)


def test_data_sets_are_told_apart_by_content(tmp_path, capsys):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2, dataset="/elsewhere/sotu")]
    assert "Warning" not in run(capsys, *folders)[1]
    folders.append(write_run(tmp_path / "c", attention="xsa", info={"data": {"fingerprint": "f2"}}))
    assert "not the same recipe: different dataset" in run(capsys, *folders)[1]


def test_the_same_seed_twice_makes_two_variants(tmp_path, capsys):
    out = run(capsys, write_run(tmp_path / "before"), write_run(tmp_path / "after", gap=0.5))[1]
    assert column(out, "sa (after)", "train difference") == "+0.5000, s.e. n/a (one seed)"


def test_an_unfinished_run_sets_the_end_for_all(tmp_path, capsys):
    base = write_run(tmp_path / "sa")
    short = write_run(tmp_path / "xsa", gap=0.5, steps=50, attention="xsa", max_iters=100, lr_decay_iters=100)
    out = run(capsys, base, short)[1]
    assert f"{short} is unfinished: step 50 of 100" in out
    assert f"compared up to {50 * TOKENS_PER_STEP:,} tokens" in out
    assert float(column(out, "sa", "val loss")) == pytest.approx(train_loss(40) + 0.1, abs=1e-4)  # 50 was evaluated by one only
    assert column(out, "xsa", "val difference") == column(out, "xsa", "train difference")
    assert float(column(out, "sa", "train loss")) == pytest.approx(np.mean([train_loss(s) for s in (48, 49, 50)]), abs=1e-4)


def test_other_steps_are_compared_at_equal_tokens(tmp_path, capsys):
    base = write_run(tmp_path / "sa", log_interval=2)
    other = write_run(tmp_path / "xsa", steps=50, eval_interval=10, attention="xsa", global_batch_size=32)
    status, out, _ = run(capsys, base, other, "--x=steps")
    assert status == 0 and "different global_batch_size, max_iters" in out and "unfinished" not in out
    name = "xsa, global_batch_size=32, max_iters=50"
    assert float(column(out, name, "val difference").split(",")[0]) == pytest.approx(train_loss(50) - train_loss(100), abs=1e-4)
    variants = compare.group([compare.read_run(base), compare.read_run(other)])
    gap = compare.difference_curve(variants[1], variants[0], "train", 100 * TOKENS_PER_STEP)
    assert gap.tokens.tolist() == [2 * step * TOKENS_PER_STEP for step in range(1, 51)]
    assert gap.values[0] == pytest.approx([train_loss(step) - train_loss(2 * step) for step in range(1, 51)])


def test_validation_without_a_common_step_is_not_compared(tmp_path, capsys):
    base = write_run(tmp_path / "sa", eval_interval=20)
    other = write_run(tmp_path / "xsa", attention="xsa", steps=15, eval_interval=7)
    out = run(capsys, base, other)[1]
    assert [cells[5] for name, cells in rows(out).items() if name != "variant"] == ["n/a", "n/a"]
    assert "no evaluation after the start is common to all runs" in out


def test_a_cut_off_last_line_and_skipped_steps_are_left_out(tmp_path, capsys):
    folder = write_run(tmp_path / "sa")
    metrics = folder / "metrics.jsonl"
    whole = run(capsys, folder)[1]
    with open(metrics, "a") as file:
        file.write('{"step": 101, "tokens": 413696, "split": "tra')
    assert run(capsys, folder)[1] == whole
    lines = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]]
    for line in lines:
        if line["split"] == "train" and line["step"] == 98:
            line["loss"] = None
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = np.mean([train_loss(step) for step in (95, 96, 97, 99, 100)])
    assert float(column(run(capsys, folder)[1], "sa", "train loss")) == pytest.approx(kept, abs=1e-4)


def test_what_a_run_says_beside_its_losses_changes_nothing(tmp_path, capsys):
    folder = write_run(tmp_path / "sa")
    whole = run(capsys, folder)[1]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 100, "tokens": 409600, "split": "diagnostics", "kurtosis": [3.0, null]}\n')
        file.write('{"step": 100, "tokens": 409600, "split": "eval/piqa", "loss": 1.0, "acc": 0.5}\n')
    assert run(capsys, folder)[1] == whole


def with_hashes(folder: Path, hashes: dict[int, str]) -> Path:
    """The run with a data_hash in its training lines: at each step that of `hashes` at the last step not above it."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["split"] == "train":
            line["data_hash"] = f"{hashes[max(step for step in hashes if step <= line['step'])]}{line['step']:04x}"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_whether_runs_saw_the_same_tokens(tmp_path, capsys):
    one = with_hashes(write_run(tmp_path / "sa"), {0: "aa"})
    two = with_hashes(write_run(tmp_path / "xsa", attention="xsa", log_interval=5), {0: "aa"})
    seed = with_hashes(write_run(tmp_path / "sa2", seed=2), {0: "bb"})
    said = "Runs with the same seed saw the same tokens, in the same order, up to step"
    assert f"{said} 100 (`data_hash`)" in run(capsys, one, two)[1]
    short = with_hashes(write_run(tmp_path / "short", steps=60, attention="xsa", seed=2), {0: "bb"})
    assert f"{said} 60 (`data_hash`)" in run(capsys, one, two, seed, short)[1]
    assert "data_hash" not in run(capsys, one, seed)[1]

    branch = with_hashes(write_run(tmp_path / "branch", attention="xsa", log_interval=5), {0: "aa", 43: "cc"})
    out = run(capsys, one, two, branch)[1]
    warning = f"{branch} saw other tokens than {one}, though both have seed 1: the first others in steps 41 to 45"
    assert f"**Warning:** {warning}.  \n" in out
    assert said.replace("seed saw", "seed, but for those of the warning, saw") in out
    other = with_hashes(write_run(tmp_path / "other", attention="xsa", log_interval=5), {0: "dd"})
    out = run(capsys, one, other)[1]
    assert "the first others in steps 1 to 5." in out and said not in out
    old = write_run(tmp_path / "old", attention="gsxa")
    assert f"Whether `{old}` saw the tokens of other runs with the same seed is not known" in run(capsys, one, old)[1]


def test_smoothing_shifts_no_straight_line():
    tokens = np.arange(100)
    curve = compare.Curve(tokens, np.stack([5 - 0.01 * tokens, 0.02 * tokens]))
    smooth = curve.smooth(0.1)
    assert smooth.tokens.tolist() == tokens[5:-5].tolist()
    assert smooth.values == pytest.approx(curve.values[:, 5:-5])
    noise = np.random.default_rng(0).normal(size=(1, 1000))
    assert compare.Curve(np.arange(1000), noise).smooth(0.1).values.std() < 0.2
    assert curve.smooth(0.0) is curve


def break_run(folder: Path, fault: str) -> Path:
    metrics, config = folder / "metrics.jsonl", folder / "config.json"
    lines = metrics.read_text().splitlines(keepends=True)
    match fault:
        case "no folder":
            return folder.parent / "nowhere"
        case "a file":
            return metrics
        case "no metrics":
            metrics.unlink()
        case "no val":
            metrics.write_text("".join(line for line in lines if '"val"' not in line))
        case "no train":
            metrics.write_text("".join(line for line in lines if '"train"' not in line))
        case "a broken line":
            metrics.write_text("".join([lines[0], "{oops\n", *lines[1:]]))
        case "a foreign line":
            metrics.write_text('{"epoch": 1}\n')
        case "no config":
            config.unlink()
        case "a broken config":
            config.write_text("{")
        case "a foreign config":
            config.write_text('{"config": {"lr": 1}}')
        case "a truncated config":
            config.write_text(config.read_text()[:-20])
        case "an empty config" | "an empty metrics file":
            (config if "config" in fault else metrics).write_text("")
        case "a folder for config" | "a folder for metrics":
            path = config if "config" in fault else metrics
            path.unlink()
            path.mkdir()
        case "a list for config" | "a text for seed" | "a list for a setting" | "a text for a count":
            info = json.loads(config.read_text())
            if fault == "a text for a count":
                info["n_params"] = "9"
            info["config"] |= {"a text for seed": {"seed": "one"}, "a list for a setting": {"n_head": [4]}}.get(fault, {})
            config.write_text(json.dumps([info] if fault == "a list for config" else info))
        case "lines out of order":
            metrics.write_text("".join([*lines[:40], lines[50], *lines[40:50], *lines[51:]]))
        case "lines twice":
            metrics.write_text("".join([*lines, *lines[-30:]]))
        case _:  # a loss, of every training line or of one
            which, value = fault.rsplit(" ", 1)
            for i, line in enumerate(lines):
                if '"train"' in line and (which == "all" or i == 40):
                    lines[i] = re.sub('"loss": [0-9.e-]+', f'"loss": {value}', line)
            metrics.write_text("".join(lines))
    return folder


BROKEN = [
    "no metrics", "no val", "no train", "a broken line", "a foreign line", "no config", "a broken config", "a foreign config",
    "a truncated config", "an empty config", "an empty metrics file", "a folder for config", "a folder for metrics",
    "a list for config", "a text for seed", "a list for a setting", "a text for a count", "lines out of order", "lines twice",
    "all NaN", "all Infinity", "all null", 'one "2.5"', "one true", "one [2.5]", "one 9" + "9" * 400,
]


@pytest.mark.parametrize("fault", ["no folder", "a file"])
def test_what_is_no_folder_is_a_bad_argument(tmp_path, fault, capsys):
    good, bad = write_run(tmp_path / "good"), break_run(write_run(tmp_path / "bad"), fault)
    status, out, err = run(capsys, good, bad)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and str(bad) in err
    assert not (tmp_path / "comparison.md").exists()


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_runs_are_named_and_the_others_compared(tmp_path, fault, capsys):
    good, other = write_run(tmp_path / "good"), write_run(tmp_path / "other", gap=0.5, attention="xsa")
    bad = break_run(write_run(tmp_path / "bad"), fault)
    worse = break_run(write_run(tmp_path / "worse"), "no config")
    status, out, err = run(capsys, good, bad, worse, other)
    assert status == 1
    faults = err.splitlines()
    assert len(faults) == 2 and faults[0].startswith(f"error: {bad}/") and faults[1].startswith(f"error: {worse}/")
    assert all(f"**Warning:** left out: {line.removeprefix('error: ')}.  " in out for line in faults)
    assert column(out, "xsa", "train difference") == "+0.5000, s.e. n/a (one seed)"
    assert (tmp_path / "comparison.md").read_text() in out

    status, out, err = run(capsys, bad, good)
    assert status == 1 and list(rows(out)) == ["variant", "sa"]
    assert err.endswith(f"; the baseline is {good} instead\n") and err.count("\n") == 1
    status, out, err = run(capsys, bad, worse, f"--out={tmp_path / 'out'}")
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert str(bad) in err and str(worse) in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", "1e999"])
def test_a_loss_that_is_not_a_number_is_left_out_and_told(tmp_path, value, capsys):
    good, bad = write_run(tmp_path / "good"), break_run(write_run(tmp_path / "bad", attention="xsa"), f"one {value}")
    status, out, _ = run(capsys, good, bad)
    assert status == 0 and column(out, "xsa", "train difference").startswith("+0.0000")
    assert f"{bad}: losses that are not numbers are left out: 1, the first at step 39 (train)" in out


@pytest.mark.parametrize("arguments", [(), ("--smooth=2",), ("--smooth=x",), ("--x=epochs",), ("--oput=here",), ("twice",)])
def test_bad_arguments(tmp_path, arguments, capsys):
    folder = write_run(tmp_path / "sa")
    argv = [] if not arguments else [folder, folder] if arguments == ("twice",) else [folder, *arguments]
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_comparing_needs_no_torch(tmp_path):
    folder = write_run(tmp_path / "sa")
    code = f"import sys; from scripts import compare; compare.main([{str(folder)!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
