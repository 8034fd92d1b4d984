"""scripts/reproduce.py: what it plans, starts and restarts (tests/test_collect.py: what it makes of the runs)."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configurator import as_dict, load
from presets import PRESETS, preset_switches
from scripts import experiments, launch, reproduce
from tests.test_compare import rows, write_run
from tests.test_train import ROOT, dataset, parsed  # noqa: F401 - a fixture

MICRO = ["--vocab_size=257", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--global_batch_size=4",
         "--micro_batch_size=4", "--warmup_iters=3", "--eval_tokens=608", "--log_interval=1", "--device=cpu"]
FILE = """
title = "a test"
figure = "final"
x = "n_sink"
base = ["config/tiny.py"]
grid = {"n_sink": [0, 2], "attention": ["sa", "xsa"]}
seeds = [1, 2]
"""


def planned(name: str, scale: str = "paper", extra: list[str] = ()) -> list[experiments.Cell]:
    return experiments.read(name, scale).cells(list(extra))


def run(capsys, *argv) -> tuple[int, str, str]:
    status = reproduce.main([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write(cell: experiments.Cell, out: Path, gap: float, **settings) -> Path:
    """A finished run, on the data set that it names where that is there."""
    data = {"data": {"fingerprint": launch.data_fingerprint(cell.run.config.dataset) or "f1"}}
    config = {"info": data} | as_dict(cell.run.config) | settings
    steps = config.pop("max_iters")
    return write_run(out / cell.run.name, gap, steps=steps, **config)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "micro.py"
    path.write_text(FILE)
    return path


# --- planning ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale, tokens", [("paper", 524_288), ("tiny", 4_096)])
def test_fig5_keeps_the_tokens_of_a_step(scale, tokens):
    cells = planned("fig5", scale)
    assert len({cell.run.config.block_size for cell in cells}) == 6 and len(cells) == 12
    assert {cell.run.config.block_size * cell.run.config.global_batch_size for cell in cells} == {tokens}
    assert len({cell.run.config.learning_rate for cell in cells}) == 1
    for cell in cells:
        assert cell.run.config.accumulation(8 if scale == "paper" else 1) >= 1


def test_the_papers_conditions():
    assert {cell.run.config.learning_rate for cell in planned("fig4")} == {1e-4, 2e-4, 4e-4, 6e-4}
    assert {cell.run.config.block_size for cell in planned("fig5")} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {cell.run.config.n_sink for cell in planned("fig6")} == {0, 1, 4}
    peaks = {(c.run.config.n_embd, c.run.config.learning_rate) for c in planned("fig3")}
    assert peaks == {(1536, 5e-4), (2048, 4e-4), (2560, 3e-4)}
    for name in ("fig1", "fig3", "fig4", "fig5", "fig6", "table2"):
        assert {cell.labels["attention"] for cell in planned(name)} == {"sa", "xsa"}
        assert {cell.run.config.max_iters for cell in planned(name)} == {200_000}


def test_gsxa_and_its_parts():
    """The ablation takes out one part each; the sizes share the paper's runs; every preset is trained."""
    parts = {"without GQA": "n_kv_head", "without QK norm": "qk_norm", "without QK-Clip": "qk_clip", "without gate": "gate",
             "without value residual": "value_residual", "without SSMax": "softmax", "without exclusion": "exclusive"}
    assert set(PRESETS["gsxa"].switches) == set(parts.values())
    for scale in experiments.SCALES:
        cells = {cell.labels["variant"]: cell.run.config for cell in planned("ablate_gsxa", scale)}
        assert set(cells) == {"gsxa", "sa", "xsa", *parts} and next(iter(cells)) == "gsxa"
        plain = preset_switches(cells["sa"])
        for name, switch in parts.items():
            differs = {key for key in plain if getattr(cells[name], key) != getattr(cells["gsxa"], key)}
            assert differs == {switch} and getattr(cells[name], switch) == plain[switch]
        assert {cell.run.name for cell in planned("gsxa", scale)} >= {cell.run.name for cell in planned("fig3", scale)}
        assert {cell.run.config.attention for cell in planned("presets", scale)} == set(PRESETS)


@pytest.mark.parametrize("scale, count", [("paper", 26), ("tiny", 36)])
def test_a_run_is_known_by_its_settings(scale, count):
    """One name, one set of settings; the runs that figures share have one name."""
    by_name, by_settings = {}, {}
    assert experiments.paper_names() == ["fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "table2"]
    for name in experiments.paper_names():
        for cell in planned(name, scale):
            settings = tuple(map(repr, as_dict(cell.run.config).values()))
            assert by_name.setdefault(cell.run.name, settings) == settings
            assert by_settings.setdefault(settings, cell.run.name) == cell.run.name
    assert len(by_name) == count
    shared = [{cell.run.name for cell in planned(name, scale)} for name in ("fig1", "fig3", "fig4", "fig5", "fig6", "table2")]
    prefix = "1.4b" if scale == "paper" else "tiny"
    assert set.intersection(*shared) == {f"{prefix}-sa", f"{prefix}-xsa"}
    assert shared[5] <= shared[1]


@pytest.mark.parametrize("scale", experiments.SCALES)
@pytest.mark.parametrize("launcher", ["local", "torchrun", "slurm"])
def test_commands_give_the_settings_that_were_planned(scale, launcher, tmp_path):
    for name in experiments.names():
        for cell in planned(name, scale, ["--wandb_log=True"]):
            wanted = launch.Wanted(cell.run, tmp_path / cell.run.name, None)
            argv = launch.command(wanted, launcher, 8)
            script = {"slurm": "scripts/slurm/train.sbatch"}.get(launcher, "train.py")
            arguments = argv[argv.index(script) + 1 :]
            config = load(arguments)
            assert config.init_from == "auto" and config.out_dir == str(tmp_path / cell.run.name) and config.wandb_log
            ignored = {"out_dir", "init_from"}
            assert {k: v for k, v in as_dict(config).items() if k not in ignored} == {
                k: v for k, v in as_dict(cell.run.config).items() if k not in ignored}


def test_the_plan_names_every_run_with_its_cost(capsys, tmp_path):
    status, out, _ = run(capsys, "fig4", f"--out={tmp_path}", "--gpu=h100", "--n_gpus=16", "--mfu=0.5")
    assert status == 0 and not list(tmp_path.iterdir())
    for cell in planned("fig4"):
        assert f"\n{cell.run.name} " in out and f"--out_dir={tmp_path / cell.run.name} " in out
    assert out.count("torchrun --standalone --nproc_per_node=16 train.py config/1.4b.py") == 8 == out.count("--init_from=auto")
    # By hand: 6 FLOPs a weight and 12 H d T a layer; evaluation, a third of that, at the start and every 1000 steps.
    per_token = 6 * 1.512e9 + 12 * 24 * 3072 * 2048
    hours = per_token * (524288 * 200_000 + 10_485_760 * 201 / 3) / (989e12 * 0.5) / 3600
    line = next(line for line in out.splitlines() if line.startswith("1.4b-sa "))
    assert float(line.split()[3].replace(",", "")) == pytest.approx(hours, rel=2e-3)
    total = next(line for line in out.splitlines() if line.startswith("all "))
    assert float(total.split()[2].replace(",", "")) == pytest.approx(8 * hours, rel=2e-3)
    assert "no folder 'fineweb'" in out


def test_the_readmes_table_has_the_plans_numbers(capsys, tmp_path):
    table = re.findall(r"^\| [^|]+ \| `(\w+)` \| (\w+) \| ([\d,]+|minutes) \| ", (ROOT / "README.md").read_text(), re.M)
    assert [name for name, *_ in table] == [*experiments.paper_names(), "all"]
    for name, runs, hours in table:
        _, out, _ = run(capsys, name, f"--out={tmp_path}")
        cells = {cell.run.name for e in (experiments.paper_names() if name == "all" else [name]) for cell in planned(e)}
        total = next((line.split()[2] for line in out.splitlines() if line.startswith("all  ")), "minutes")
        assert (runs, hours) == (str(len(cells) or "none"), total), name


def test_settings_and_seeds_for_all_runs(capsys, tmp_path, file):
    cells = experiments.read(str(file), "paper").cells(["--max_iters=7"], seeds=[5, 6])
    assert {cell.run.config.max_iters for cell in cells} == {7} and {cell.run.config.seed for cell in cells} == {5, 6}
    assert "tiny-xsa-n_sink=2-max_iters=7-seed=5" in {cell.run.name for cell in cells}
    assert len({cell.run.name for cell in cells}) == 8
    assert {cell.run.config.micro_batch_size for cell in planned("fig5", "tiny", ["--micro_batch_size=2"])} == {2}
    many = [f"--{key}={value}" for key, value in (
        ("weight_decay", 0.123456789), ("beta1", 0.87654321), ("beta2", 0.98765432), ("grad_clip", 0.123456789),
        ("dropout", 0.1234), ("rope_base", 12345.678), ("lr_decay_iters", 77777), ("warmup_iters", 12345),
        ("max_iters", 7654321), ("n_layer", 17))]
    names = {cell.run.name for cell in experiments.read(str(file), "paper").cells(many)}
    assert len(names) == 8 and max(map(len, names)) <= 190


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, wanted", [
    (["fig7"], "fig1"), ([], "EXPERIMENT"), (["fig4", "--launch=cloud"], "launch"), (["fig4", "--seeds=1,x"], "seeds"),
    (["fig4", "--seeds=1,1"], "twice"), (["fig4", "--learning_rate=1"], "varies"), (["fig4", "--seed=3"], "--seeds"),
    (["fig4", "--n_layers=3"], "n_layer"), (["fig4", "--gpu=abacus"], "H100"), (["fig4", "--n_gpus=7"], "global_batch_size"),
    (["fig4", "--plan", "--collect"], "--plan"), (["fig4", "--scale=small"], "scale"), (["fig4", "--wandb_log"], "--key=value"),
    (["fig4", "--launch=local", "--n_gpus=2"], "torchrun"), (["fig4", "--launch=local"], "fineweb"),
])
def test_bad_arguments(argv, wanted, capsys, tmp_path):
    status, out, err = run(capsys, *argv, *([f"--out={tmp_path / 'out'}"] if argv else []))
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and wanted in err


@pytest.mark.parametrize("change, wanted", [
    ('grid = {"n_sink": [0, "two"], "attention": ["sa"]}', "n_sink"), ('grid = {"n_sinks": [0]}', "n_sink"),
    ('grid = {"n_sink": 3}', "list of values"), ('grid = {"a": [{"n_sink": 1}], "n_sink": [2]}', "two axes"),
    ('grid = {"n_sink": [0], "attention": ["sa"], "seed": [1]}', "seed"), ('seeds = []', "whole numbers"),
    ('figure = "pie"', "curves"), ('figures = 1', "figure"), ('x = "n_layer"', "n_layer"), ('compare = "size"', "size"),
    ('tiny = {"grid": {"n_sink": [1, 2, 3]}}', "as many entries"), ('tiny = {"grids": {}}', "grids"),
    ('base = ["config/9b.py"]', "config/9b.py"), ('base = []', "config file"), ('y_limits = [3, 2]', "[low, high]"),
    ('seeds = [len("ab")]', "literal"), ('grid = {**{}}', "keys"), ('import os', "key = value"),
    ('title = "two\\nlines"', "one line"), ('grid = {"a": [{"name": "x\\r", "n_sink": 1}]}', "one line"),
    ('grid = {"a": [{"name": "x", "n_sink": 1}, {"name": "x", "n_sink": 2}]}\nx = ""', "two entries called 'x'"),
    ('grid = {"n_sink": [0, 1], "attention": ["sa", "zsa"]}', "attention"), ('grid = {"n_sink": [0, -1]}', "n_sink"),
])
def test_bad_files(change, wanted, capsys, tmp_path, file):
    file.write_text(FILE + change + "\n")
    status, out, err = run(capsys, file, "--scale=tiny", "--plan")
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert "micro.py" in err and wanted in err


# --- launching --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # trains two runs, each of them twice interrupted
def test_interrupted_runs_go_on_and_finished_ones_are_not_repeated(tmp_path, dataset, capsys):  # noqa: F811
    path = tmp_path / "pair.py"
    path.write_text('title = "pair"\nfigure = "curves"\nbase = ["config/tiny.py"]\ngrid = {"attention": ["sa", "xsa"]}\n')
    out = tmp_path / "out"
    argv = [str(path), "--launch=local", f"--out={out}", f"--dataset={dataset}", *MICRO, "--max_iters=400", "--save_interval=20",
            "--eval_interval=200"]
    process = subprocess.Popen([sys.executable, "-m", "scripts.reproduce", *argv], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    sa, xsa = (folder_of(path, argv, attention, out) for attention in ("sa", "xsa"))
    wait_for_steps(sa, 25)
    child = int(subprocess.run(["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, text=True).stdout)
    os.kill(child, signal.SIGKILL)
    wait_for_steps(xsa, 25)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped on request" in said, said
    assert f"error: {sa.name}: exit status -9" in said and f"error: {xsa.name}" not in said
    assert list(xsa.glob("ckpt_*.pt"))

    status, said, err = run(capsys, *argv)
    assert status == 0 and "2 to be made" in said, said + err
    for folder in (sa, xsa):
        assert [m["step"] for m in parsed(folder) if m["split"] == "train"] == list(range(1, 401))
    before = {folder: (folder / "metrics.jsonl").stat().st_mtime_ns for folder in (sa, xsa)}
    lines = (out / "commands.txt").read_text().splitlines()
    assert len(lines) == 4 and all("--init_from=auto" in line and "  # 20" in line for line in lines)

    status, said, _ = run(capsys, *argv, "--collect")
    assert status == 0 and "2 finished, 0 to be made" in said
    assert before == {folder: (folder / "metrics.jsonl").stat().st_mtime_ns for folder in (sa, xsa)}
    assert len((out / "commands.txt").read_text().splitlines()) == 4
    assert (out / "pair.png").read_bytes().startswith(b"\x89PNG")
    cells = rows((out / "pair.md").read_text())["xsa"]
    assert "windows)" in cells[-1]
    ours, theirs = ([m["loss"] for m in parsed(folder) if m["split"] == "val"][-1] for folder in (xsa, sa))
    assert float(cells[-1].split()[0]) == pytest.approx(ours - theirs, abs=1e-4)


def folder_of(path: Path, argv: list[str], attention: str, out: Path) -> Path:
    extra = [a for a in argv if a.startswith("--") and a.partition("=")[0] not in ("--launch", "--out")]
    cells = experiments.read(str(path), "paper").cells(extra)
    return out / next(cell.run.name for cell in cells if cell.labels["attention"] == attention)


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} did not come to step {steps}")


def test_slurm_submits_what_is_neither_finished_nor_in_the_queue(tmp_path, capsys, monkeypatch, file, dataset):  # noqa: F811
    out, stubs = tmp_path / "out", tmp_path / "bin"
    stubs.mkdir()
    done, queued, *rest = experiments.read(str(file), "paper").cells([f"--dataset={dataset}"])
    write(done, out, 0.0)
    for name, body in (("sbatch", f'echo "$@" >> {tmp_path}/jobs; echo "Submitted batch job 7"'),
                       ("squeue", f"echo '(null)'; echo {out / queued.run.name}")):
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)
    argv = [file, "--launch=slurm", "--n_gpus=16", "--micro_batch_size=2", f"--out={out}", f"--dataset={dataset}"]
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    status, said, err = run(capsys, *argv)
    assert status == 0, err
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert len(jobs) == len(rest) == 6 and f"{queued.run.name}: in the queue already" in said
    for job, cell in zip(jobs, rest, strict=True):
        assert job.startswith(f"--nodes=2 --job-name={cell.run.name} --comment={out / cell.run.name} scripts/slurm/train.sbatch "
                              "config/tiny.py ") and job.endswith("--init_from=auto")
    assert (out / "commands.txt").read_text().count("sbatch --nodes=2") == 6
    (stubs / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    status, _, err = run(capsys, *argv)
    assert status == 1 and err.count("invalid partition") == 6


def test_a_wrong_run_is_not_touched_and_fails_the_launch(tmp_path, capsys, file, dataset):  # noqa: F811
    out = tmp_path / "out"
    cells = experiments.read(str(file), "paper").cells([f"--dataset={dataset}"])
    for cell in cells:
        write(cell, out, 0.0, **({"n_embd": 4} if cell is cells[3] else {}))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, said, err = run(capsys, file, "--launch=local", f"--out={out}", f"--dataset={dataset}")
    assert status == 1 and "7 finished, 0 to be made, 1 wrong" in said
    assert f"error: {cells[3].run.name}: " in err and "n_embd=4, wanted 64" in err
    assert before == {path: path.stat().st_mtime_ns for path in before}


# --- one run for one set of settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", ['{"attention": ["sa", "sa"]}', '{"micro_batch_size": [8, 16], "attention": ["sa", "xsa"]}'])
def test_cells_that_are_one_run_are_refused(tmp_path, capsys, grid):
    path = tmp_path / "twice.py"
    path.write_text(f'title = "t"\nfigure = "final"\nbase = ["config/tiny.py"]\ngrid = {grid}\n')
    status, _, err = run(capsys, path, "--n_gpus=1")
    assert status == 2 and "are one run" in err


def test_config_files_of_one_name_do_not_share_a_run(tmp_path, capsys):
    for folder, n_embd in (("a", 64), ("b", 32)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(Path("config/tiny.py").read_text() + f"n_embd = {n_embd}\n")
        (tmp_path / f"{folder}.py").write_text(f'title = "t"\nfigure = "final"\nbase = ["{tmp_path}/{folder}/same.py"]\n'
                                               'grid = {"attention": ["sa"]}\n')
    status, _, err = run(capsys, tmp_path / "a.py", tmp_path / "b.py", "--n_gpus=1")
    assert status == 2 and "n_embd=32" in err and "config files with the same name" in err


def test_experiment_files_of_one_name_are_refused(file, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "micro.py").write_text(FILE)
    status, _, err = run(capsys, file, tmp_path / "other" / "micro.py")
    assert status == 2 and "different names" in err


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_reproduce_takes_its_command_along(tmp_path):
    program = ("import sys; from pathlib import Path; from command_line import StopRequest; from scripts.launch import execute; "
               f"execute(['sleep', '60'], Path('{tmp_path}/log'), Path('{tmp_path}'), StopRequest())")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (child := children.read_text().split()):
        time.sleep(0.01)
    while Path(f"/proc/{child[0]}/comm").read_text() != "sleep\n":
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child[0]}").exists() and Path(f"/proc/{child[0]}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
