"""scripts/reproduce.py --collect: what it makes of runs that are there, missing, broken or wrong, and of what labels hold."""

import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from configurator import as_dict
from scripts import collect, experiments
from scripts.compare import final_train_loss
from scripts.runs import read_run, state_of
from tests.test_compare import BROKEN, break_run, rows
from tests.test_reproduce import dataset, file, planned, run, write  # noqa: F401 - fixtures


def test_collect_names_what_is_missing_unfinished_or_wrong(tmp_path, capsys, file):  # noqa: F811
    out = tmp_path / "out"
    cells = {(c.labels["n_sink"], c.labels["attention"], c.run.config.seed): c
             for c in experiments.read(str(file), "paper").cells([])}
    bases, gaps = {1: 0.0, 2: 0.4}, {1: 0.02, 2: 0.05}
    for seed in (1, 2):
        write(cells["0", "sa", seed], out, bases[seed])
        write(cells["0", "xsa", seed], out, bases[seed] + gaps[seed])
    write(cells["2", "sa", 1], out, 0.1)
    write(cells["2", "sa", 2], out, 0.1, learning_rate=1.0)
    lines = (write(cells["2", "xsa", 1], out, 0.1) / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = [line for line in lines if json.loads(line)["step"] <= 100]
    (out / cells["2", "xsa", 1].run.name / "metrics.jsonl").write_text("".join(half))
    status, said, err = run(capsys, file, "--collect", f"--out={out}")
    text = (out / "micro.md").read_text()
    assert text in said
    name = cells["2", "sa", 2].run.name
    errors = [line for line in err.splitlines() if not line.startswith("warning: micro: no standard error over")]
    assert status == 1 and errors == [f"error: {name}: {out / name / 'config.json'} has learning_rate=1.0, wanted 0.004"]
    assert f"**Wrong:** `{name}`, {out / name / 'config.json'} has learning_rate=1.0, wanted 0.004" in text
    assert f"**Unfinished:** `{cells['2', 'xsa', 1].run.name}`, step 100 of 200" in text
    assert f"**Missing:** `{cells['2', 'xsa', 2].run.name}`, not started" in text
    assert text.count("**Wrong") + text.count("**Unfinished") + text.count("**Missing") == 3
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert table[0] == ["n_sink", "attention", "seeds", "train loss", "train difference", "val loss", "val difference"]
    expected = f"{np.mean(list(gaps.values())):+.4f} ± {np.std(list(gaps.values()), ddof=1) / math.sqrt(2):.4f} (2 seeds)"
    assert table[3][:3] == ["0", "xsa", "1, 2"] and table[3][4] == table[3][6] == expected
    runs = [read_run(out / cells["0", "sa", seed].run.name) for seed in (1, 2)]
    assert float(table[2][3]) == pytest.approx(np.mean([final_train_loss(r, max(r.train)) for r in runs]), abs=1e-4)
    assert float(table[2][5]) == pytest.approx(np.mean([r.val[max(r.val)] for r in runs]), abs=1e-4)
    assert table[4][:3] == ["2", "sa", "1"] and table[5][2:] == ["missing", "n/a", "n/a", "n/a", "n/a"]
    assert (out / "micro.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("figure, fault", [
    *(("final", fault) for fault in [*BROKEN, "a file for the run"]), ("curves", "all NaN"), ("curves", "a broken line"),
    ("curves", "no train"), ("curves", "all but one NaN"), ("final", "all but one NaN"),
])
def test_a_broken_run_is_named_and_the_others_collected(figure, fault, tmp_path, capsys):
    path, out = tmp_path / "pair.py", tmp_path / "out"
    path.write_text(f'title = "pair"\nfigure = "{figure}"\nbase = ["config/tiny.py"]\nseeds = [1, 2]\n'
                    'grid = {"attention": ["sa", "xsa"]}\n')
    folders = [write(cell, out, 0.1 * i) for i, cell in enumerate(experiments.read(str(path), "paper").cells([]))]
    bad = folders[3]
    if fault == "a file for the run":
        shutil.rmtree(bad)
        bad.write_text("")
    elif fault == "all but one NaN":  # of the other seed's losses none is at the same tokens
        break_run(bad, "all NaN")
        lines = (bad / "metrics.jsonl").read_text().replace('"step": 1, "tokens": 4096, "split": "train", "loss": NaN',
                                                            '"step": 1, "tokens": 4096, "split": "train", "loss": 2.0')
        (bad / "metrics.jsonl").write_text(lines)
        lines = (folders[2] / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folders[2] / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 1,' not in line))
    else:
        break_run(bad, fault)
    status, said, err = run(capsys, path, "--collect", f"--out={out}")
    text = (out / "pair.md").read_text()
    assert text in said and (out / "pair.png").exists()
    named = [line for line in text.splitlines() if f"`{bad.name}`" in line]
    if fault == "all but one NaN":
        assert status == 0 and not named and rows(text)["xsa"][1] == "1, 2"
        return
    assert len(named) == 1 and rows(text)["sa"][1] == "1, 2" and rows(text)["xsa"][1] == "1"
    assert rows(text)["xsa"][3] == "+0.2000, s.e. n/a (one seed)"
    if fault in ("no config", "no val", "no train", "an empty metrics file"):  # as a run that has only begun has it
        assert status == 0 and named[0].startswith("**Missing:**" if fault == "no config" else "**Unfinished:**")
    else:
        assert status == 1 and named[0].startswith("**Wrong:**")
        errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
        assert len(errors) == 1 and errors[0].startswith(f"error: {bad.name}: ")


@pytest.mark.parametrize("fault, kind, words", [
    ("nan", "wrong", "validation loss at step 200 is not a number"), ("skipped", "finished", "1 steps skipped"),
    ("json", "wrong", "not JSON"), ("line", "wrong", "line 1"), ("older checkpoint", "unfinished", "step 200 of 200"),
    ("seed", "wrong", "seed=9"), ("micro_batch_size", "finished", ""), ("no checkpoint", "finished", ""),
    ("no such setting then", "finished", ""), ("explicit", "wrong", "has no n_sink"),
    ("NUL bytes", "wrong", "metrics.jsonl ends at step 0, before ckpt_00000200.pt"), ("empty", "wrong", "metrics.jsonl ends at"),
    ("NUL bytes, unfinished", "wrong", "metrics.jsonl ends at step 0, before ckpt_00000100.pt"),
    ("half", "wrong", "metrics.jsonl ends at step 100, before ckpt_00000200.pt"), ("begun", "unfinished", "step 0 of 200"),
    ("killed before its save", "unfinished", "step 120 of 200"), ("last evaluation to come", "unfinished", "step 200 of 200"),
    ("a link to nowhere", "wrong", "is not a folder"),
])
def test_state_of_a_run(fault, kind, words, tmp_path, file):  # noqa: F811
    cell = experiments.read(str(file), "paper").cells([])[-1]
    changed = {"seed": {"seed": 9}, "micro_batch_size": {"micro_batch_size": 2}}.get(fault, {})
    folder = write(cell, tmp_path, 0.0, **changed)
    metrics, config = folder / "metrics.jsonl", folder / "config.json"
    if fault in ("nan", "skipped"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        split, step = {"nan": ("val", 200), "skipped": ("train", 50)}[fault]
        next(line for line in lines if (line["split"], line["step"]) == (split, step))["loss"] = None
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif fault == "json":
        config.write_text("{")
    elif fault == "line":
        metrics.write_text("oops\n")
    elif fault == "older checkpoint":
        (folder / "ckpt_00000100.pt").touch()
    elif fault.startswith(("NUL", "empty")):
        metrics.write_bytes(b"" if fault == "empty" else b"\0" * 500)
        (folder / f"ckpt_00000{'1' if 'unfinished' in fault else '2'}00.pt").touch()
    elif fault in ("half", "begun", "killed before its save", "last evaluation to come"):
        upto, checkpoint = {"half": (100, 200), "begun": (-1, None), "killed before its save": (120, 100),
                            "last evaluation to come": (200, 200)}[fault]
        lines = metrics.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= upto]
        metrics.write_text("".join(kept[:-1] if fault == "last evaluation to come" else kept))
        if checkpoint:
            (folder / f"ckpt_{checkpoint:08d}.pt").touch()
    elif fault == "a link to nowhere":
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "nowhere")
    elif fault in ("no such setting then", "explicit"):
        info = json.loads(config.read_text())
        del info["config"]["rope_base" if fault != "explicit" else "n_sink"]
        config.write_text(json.dumps(info))
    state = state_of(folder, as_dict(cell.run.config), cell.run.explicit)
    assert state.kind == kind and words in state.text, state


def test_runs_on_other_data_than_the_experiment_names_are_wrong(tmp_path, capsys, dataset):  # noqa: F811
    """Of a run that has begun train.py would refuse to go on, and a finished one is another than the one that is wanted."""
    path, out = tmp_path / "pair.py", tmp_path / "out"
    path.write_text('title = "pair"\nfigure = "final"\nbase = ["config/tiny.py"]\ngrid = {"attention": ["sa", "xsa"]}\n'
                    'seeds = [1, 2]\n')
    cells = experiments.read(str(path), "paper").cells([f"--dataset={dataset}"])
    folders = [write(cell, out, 0.1 * i) for i, cell in enumerate(cells)]
    argv = [path, f"--out={out}", f"--dataset={dataset}", "--n_gpus=1"]
    assert run(capsys, *argv, "--collect")[0] == 0
    for folder, steps in ((folders[1], 200), (folders[3], 20)):
        cell = cells[folders.index(folder)]
        shutil.rmtree(folder)
        write(cell, out, 0.0, info={"data": {"fingerprint": "0123456789abcdef"}})
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= steps))
    why = f"it was trained on other data (fingerprint 0123456789ab) than dataset {dataset} has now"
    status, said, _ = run(capsys, *argv)
    assert status == 0 and said.count(f"wrong: {why}") == 2
    status, said, err = run(capsys, *argv, "--launch=local")
    assert status == 1 and "2 finished, 0 to be made, 2 wrong" in said and err.count(why) == 2
    status, said, err = run(capsys, *argv, "--collect")
    assert status == 1 and err.count(why) == 2 and said.count(f"**Wrong:** `{folders[1].name}`, {why}") == 1
    assert rows(said)["sa"][1] == "1" and rows(said)["xsa"][1] == "1"


@pytest.mark.parametrize("figure", ["final", "curves", "tasks", "bias"])
def test_runs_that_saw_different_data_are_told_apart_without_the_data(figure, tmp_path, capsys, monkeypatch):
    """By fingerprint, and by data_hash where one seed should mean the same tokens: not between steps of other shapes."""
    path, out = tmp_path / "pair.py", tmp_path / "out"
    path.write_text(f'title = "pair"\nfigure = "{figure}"\nbase = ["config/tiny.py"]\ngrid = {{"length": '
                    '[{"block_size": 256, "global_batch_size": 16}, {"block_size": 128, "global_batch_size": 32}], '
                    '"attention": ["sa", "xsa"]}\nseeds = [1, 2]\n')
    cells = experiments.read(str(path), "paper").cells([])
    folders = [write(cell, out, 0.0) for cell in cells]

    def hashes(folder: Path, value: str) -> None:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"data_hash": value}) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)

    monkeypatch.setattr(collect.Collector, "_by_command", lambda *_: collect.Made(["a table"], complete=True))
    for cell, folder in zip(cells, folders, strict=True):
        hashes(folder, f"{cell.run.config.seed} {cell.run.config.block_size}")
    status, said, err = run(capsys, path, "--collect", f"--out={out}")
    assert status == 0 and "Warning" not in said and err == "", err
    hashes(folders[2], "other")
    status, said, err = run(capsys, path, "--collect", f"--out={out}")
    assert status == 0 and f"**Warning:** {folders[2]} saw other tokens than {folders[0]}, though both have seed 1" in said
    assert err.count("warning: pair: ") == 1 and "saw other tokens" in err
    info = json.loads((folders[3] / "config.json").read_text()) | {"data": {"fingerprint": "f2"}}
    (folders[3] / "config.json").write_text(json.dumps(info))
    status, said, err = run(capsys, path, "--collect", f"--out={out}")
    assert status == 0 and f"**Warning:** {folders[3]} was trained on other data than {folders[0]}" in said
    assert err.count("warning: pair: ") == 2
    plan = run(capsys, path, f"--out={out}", "--n_gpus=1", "--micro_batch_size=8")[1]
    assert f"warning: {folders[3]} was trained on other data than {folders[0]}" in plan


def test_variants_without_an_axis_to_draw_against(tmp_path, capsys):
    path, out = tmp_path / "ablate.py", tmp_path / "out"
    path.write_text('title = "Parts"\nfigure = "final"\nbase = ["config/tiny.py"]\ngrid = {"variant": [{"name": "whole", '
                    '"attention": "xsa"}, {"name": "without sinks", "n_sink": 0}, {"name": "deep", "n_layer": 3}]}\n')
    for i, cell in enumerate(experiments.read(str(path), "paper").cells([])):
        write(cell, out, 0.1 * i)
    status, _, err = run(capsys, path, "--collect", f"--out={out}")
    assert status == 0, err
    text = (out / "ablate.md").read_text()
    table = rows(text)
    assert list(table) == ["variant", "whole", "without sinks", "deep"] and table["whole"][3] == "baseline"
    assert table["deep"][5] == "+0.2000, s.e. n/a (one seed)"
    assert "**Warning:** no standard error over validation windows: " in text and "holds no checkpoint" in text
    assert (out / "ablate.png").exists()


def test_curves_show_what_unfinished_runs_have(tmp_path, capsys):
    out, cells = tmp_path / "out", planned("fig3", "tiny")
    for i, cell in enumerate(cells[:9]):
        write(cell, out, 0.01 * i)
    metrics = out / cells[0].run.name / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:60]))
    status, said, err = run(capsys, "fig3", "--scale=tiny", "--collect", f"--out={out}")
    assert status == 0 and "**Unfinished:** `" + cells[0].run.name in said, err
    assert (out / "fig3.png").exists() and said.count("**Missing:**") == 3


@pytest.mark.parametrize("code, status", [(0, 0), (2, 0), (1, 1)])
def test_figures_made_by_commands(code, status, tmp_path, capsys, monkeypatch):
    """The command gets the finished runs, is not repeated while they stay as they are, and what it lacks is named."""
    out, calls = tmp_path / "out", []
    for cell in planned("fig1", "tiny"):
        write(cell, out, 0.0)

    def execute(argv, log, out, stop, output):
        calls.append(argv)
        log.parent.mkdir(exist_ok=True)
        log.write_text("# command\na warning\nor a reason\n")
        output.write_text("three panels\n")
        for name in ("bias.json", "bias.png"):
            (out / "fig1" / name).write_text(name)
        return code

    monkeypatch.setattr(collect, "execute", execute)
    found, said, err = run(capsys, "fig1", "--scale=tiny", "--collect", f"--out={out}")
    assert found == status
    assert calls == [[sys.executable, "-m", "eval.bias", str(out / "tiny-sa"), str(out / "tiny-xsa"), f"--out={out / 'fig1'}",
                      "--sequences=256"]]
    text = (out / "fig1.md").read_text()
    if code:
        assert "**Missing:** or a reason" in text and ("exit status 1: or a reason" in err) == (code == 1)
        return
    assert "three panels" in text and "a warning" not in text and (out / "fig1.png").read_text() == "bias.png"
    run(capsys, "fig1", "--scale=tiny", "--collect", f"--out={out}")
    assert len(calls) == 1 and text == (out / "fig1.md").read_text()
    (out / "tiny-sa" / "ckpt_00000200.pt").touch()
    run(capsys, "fig1", "--scale=tiny", "--collect", f"--out={out}")
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["fig1", "table2"])
def test_results_are_made_anew_from_other_data_and_outlive_the_data(name, tmp_path, capsys, monkeypatch):
    out, calls, data = tmp_path / "out", [], tmp_path / "data"
    argv = [name, f"--task_data={data}"]
    if name == "fig1":
        (tmp_path / "fig1.py").write_text(Path("config/experiments/fig1.py").read_text()
                                          + f'tiny = {{"base": ["config/tiny.py"], "arguments": ["--dataset={data}"]}}\n')
        argv = [str(tmp_path / "fig1.py")]
    for cell in planned(argv[0], "tiny"):
        write(cell, out, 0.0)

    def execute(argv, log, out, stop, output):
        calls.append(argv)
        output.write_text("a table\n")
        made = [out / name / "bias.json", out / name / "bias.png"] if name == "fig1" else [Path(argv[-2].removeprefix("--json="))]
        for path in made:
            path.write_text("{}")
        return 0

    def fill(tokens: np.ndarray) -> None:
        data.mkdir(exist_ok=True)
        for split in ("train", "val"):
            tokens.astype("<u2").tofile(data / f"{split}.bin")

    def made() -> int:
        calls.clear()
        status, _, err = run(capsys, *argv, "--scale=tiny", "--collect", f"--out={out}")
        assert status == 0, err
        return len(calls)

    monkeypatch.setattr(collect, "execute", execute)
    monkeypatch.setattr("eval.tasks.read_results", lambda path: path)
    monkeypatch.setattr("eval.tasks.report", lambda path: f"made of {path.name}")
    fill(np.arange(5000))
    whole = {"fig1": 1, "table2": 3}[name]
    assert [made(), made()] == [whole, 0]
    fill(np.arange(5000) % 7)  # of the same names and sizes
    assert [made(), made()] == [whole, 0]
    shutil.rmtree(data)
    assert made() == 0
    fill(np.arange(5000))
    assert made() == whole


def pairs_of_runs(out: Path, cells: list) -> list[Path]:
    for cell in cells:
        write(cell, out, 0.0)
    return [out / "table2" / f"{cell.run.name}.json" for cell in cells if cell.labels["attention"] == "sa"]


@pytest.fixture
def scoring(monkeypatch):
    """Stands for eval.tasks: a call for each pair; `fails` is the call that fails or stops, from 1."""
    def execute(argv, log, out, stop, output):
        execute.calls.append(Path(argv[-2].removeprefix("--json=")))
        if len(execute.calls) == execute.fails:
            stop.signal = execute.signal
            log.parent.mkdir(exist_ok=True)
            log.write_text("no memory\n")
            return 1
        output.write_text("")
        execute.calls[-1].write_text("{}")
        return 0

    execute.calls, execute.fails, execute.signal = [], 0, None
    monkeypatch.setattr(collect, "execute", execute)
    monkeypatch.setattr("eval.tasks.read_results", lambda path: path)
    monkeypatch.setattr("eval.tasks.report", lambda path: f"made of {path.name}")
    return execute


@pytest.mark.parametrize("signal", [None, "SIGINT"])
def test_finished_pairs_are_kept_and_a_good_table_stays(signal, tmp_path, capsys, scoring):
    out, cells = tmp_path / "out", planned("table2", "tiny")
    files = pairs_of_runs(out, cells)
    argv = ["table2", "--scale=tiny", "--collect", f"--out={out}"]
    scoring.fails, scoring.signal = 2, signal
    status, said, _ = run(capsys, *argv)
    text = (out / "table2.md").read_text()
    assert status == (0 if signal else 1) and collect.NOT_DONE in text
    assert scoring.calls == (files[:2] if signal else files)
    if not signal:  # the others are made and shown
        assert "**Missing:** no memory" in text and f"made of {files[2].name}" in text and f"made of {files[1].name}" not in text
    scoring.calls, scoring.fails = [], 0
    assert run(capsys, *argv)[0] == 0 and scoring.calls == (files[1:] if signal else files[1:2])
    text = (out / "table2.md").read_text()
    assert collect.NOT_DONE not in text and all(f"made of {path.name}" in text for path in files)

    (out / cells[2].run.name / "ckpt_00000200.pt").touch()  # another checkpoint: the second pair is to be scored again
    scoring.calls, scoring.fails, scoring.signal = [], 1, signal
    status, said, _ = run(capsys, *argv)
    assert status == (0 if signal else 1) and scoring.calls == files[1:2] and (out / "table2.md").read_text() == text
    assert signal or "kept, of before: " in said
    scoring.calls, scoring.fails = [], 0
    assert run(capsys, *argv)[0] == 0 and scoring.calls == files[1:2]


def test_the_overview_keeps_what_was_made_before(tmp_path, capsys, scoring):
    out = tmp_path / "out"
    cells = planned("table2", "tiny")
    pairs_of_runs(out, cells)
    argv = ["table2", "fig4", "--scale=tiny", "--collect", f"--out={out}"]
    assert run(capsys, "table2", *argv[2:])[0] == 0
    (out / cells[2].run.name / "ckpt_00000200.pt").touch()
    scoring.calls, scoring.fails = [], 1
    assert run(capsys, *argv)[0] == 1
    assert "[table2.md](table2.md) of before | no memory |" in re.sub(" +", " ", (out / "results.md").read_text())


def test_a_measurement_is_of_one_machine_and_a_cpu_s_replaces_no_gpu_s(tmp_path, capsys, monkeypatch):
    out, calls = tmp_path / "out", []
    argv = ["fig2", "--collect", f"--out={out}"]

    def execute(argv, log, out, stop, output):
        calls.append(argv)
        output.write_text(f"measured on {execute.device}\n")
        for name in ("block.json", "block.png"):
            (out / "fig2" / name).write_text(name)
        return 0

    def made(device: str, torch_version: str) -> tuple[int, str]:
        calls.clear()
        execute.device = device
        monkeypatch.setattr("tracker.device_name", lambda _: device)
        monkeypatch.setattr("torch.__version__", torch_version)
        status, said, err = run(capsys, *argv)
        assert status == 0, err
        assert ("warning: fig2: measured on a CPU" in err) == ("**Warning:** measured on a CPU" in said) == ("on cpu" in said)
        return len(calls), re.search("measured on ((?:cpu|NVIDIA).*)", said)[1]

    monkeypatch.setattr(collect, "execute", execute)
    cpu, gpu, other = "cpu (2 threads)", "NVIDIA H200", "NVIDIA H100"
    assert [made(cpu, "2.13.0"), made(cpu, "2.13.0"), made(cpu, "2.14.0")] == [(1, cpu), (0, cpu), (1, cpu)]
    assert [made(gpu, "2.14.0"), made(gpu, "2.14.0"), made(cpu, "2.13.0")] == [(1, gpu), (0, gpu), (0, gpu)]
    assert [made(other, "2.14.0"), made(other, "2.15.0")] == [(1, other), (1, other)]
    (out / "fig2" / "block.png").unlink()
    assert made(cpu, "2.13.0") == (1, cpu)


@pytest.mark.parametrize("figure", ["final", "curves"])
def test_a_stop_request_leaves_table_and_picture(figure, tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "pair.py", tmp_path / "out"
    path.write_text(f'title = "pair"\nfigure = "{figure}"\nbase = ["config/tiny.py"]\ngrid = {{"attention": ["sa", "xsa"]}}\n')
    for i, cell in enumerate(experiments.read(str(path), "paper").cells([])):
        write(cell, out, 0.1 * i)
    assert run(capsys, path, "--collect", f"--out={out}")[0] == 0
    before = [(out / name).read_bytes() for name in ("pair.md", "pair.png")]

    def window_losses(self, run, notes):
        self.stop.signal = "SIGTERM"
        raise collect.InputError("stopped on request")

    monkeypatch.setattr(collect.Collector, "window_losses", window_losses)
    monkeypatch.setattr(collect, f"draw_{figure}", lambda *_: pytest.fail("nothing is to be drawn"))
    status, said, _ = run(capsys, path, "--collect", f"--out={out}")
    assert status == 0 and "stopped on request; the same command goes on" in said
    assert [(out / name).read_bytes() for name in ("pair.md", "pair.png")] == before


AWKWARD = '''
title = "$odd & [title]"
figure = "tasks"
base = ["config/tiny.py"]
grid = {"size": [{"name": "a/b|../c $\\\\x$", "n_layer": 1}, {"name": "a", "n_layer": 2}], "attention": ["sa", "xsa"]}
'''


@pytest.mark.parametrize("figure", ["tasks", "final", "curves"])
def test_labels_are_free_text(figure, tmp_path, capsys, monkeypatch):
    """They make no paths, break no table and are no formulas; the command stands in the text as it was typed."""
    path, out, calls = tmp_path / "odd 'one.py", tmp_path / "out of it", []
    path.write_text(AWKWARD.replace("tasks", figure))
    cells = experiments.read(str(path), "paper").cells(["--grad_clip=2.0"], [3])
    for cell in cells:
        write(cell, out, 0.0)

    def execute(argv, log, out, stop, output):
        calls.append(Path(argv[-1].removeprefix("--json=")))
        output.write_text("")
        calls[-1].write_text("{}")
        return 0

    monkeypatch.setattr(collect, "execute", execute)
    monkeypatch.setattr("eval.tasks.read_results", lambda path: path)
    monkeypatch.setattr("eval.tasks.report", lambda path: f"made of {path.name}")
    argv = [str(path), "--collect", f"--out={out}", "--seeds=3", "--grad_clip=2.0", "--n_gpus=1"]
    status, _, err = run(capsys, *argv)
    assert status == 0, err
    text = (out / "odd 'one.md").read_text()
    command = text.split("```sh\n", 1)[1].split("\n```", 1)[0]
    assert shlex.split(command) == ["python", "-m", "scripts.reproduce", *argv]
    if figure == "tasks":
        assert calls == [out / "odd 'one" / f"{cells[i].run.name}.json" for i in (0, 2)]
        assert all(f"made of {call.name}" in text for call in calls)
    else:
        assert "](odd%20%27one.png)" in text and (out / "odd 'one.png").exists()
        table = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
        assert {len(row) for row in table} == {7} and "a/b\\|../c" in table[2][0]


def test_the_overview_says_which_command_made_it(tmp_path, capsys):
    argv = ["fig4", "fig6", "--scale=tiny", "--collect", "--seeds=1,2", f"--out={tmp_path / 'an out'}"]
    assert run(capsys, *argv)[0] == 0
    command = (tmp_path / "an out" / "results.md").read_text().split("```sh\n", 1)[1].split("\n```", 1)[0]
    assert shlex.split(command) == ["python", "-m", "scripts.reproduce", *argv]
