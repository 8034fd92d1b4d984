"""tracker.py: metrics.jsonl is exact whatever crashed before, and nothing that wandb or the console do ends a run."""

import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import tracker
from command_line import InputError
from configurator import as_dict, load
from tracker import Clock, Silent, Tracker, cut_back, peak_flops

ROOT = Path(__file__).parent.parent
TRAIN = {"step": 1, "tokens": 256, "split": "train", "loss": 5.5, "lr": 1e-3, "grad_norm": 1.0, "step_ms": 2.0,
         "tokens_per_s": 1.0, "mfu": None, "peak_memory_gb": 0.5, "bad_steps": 0, "data_hash": "00ff"}


def line(step: int, split: str = "train") -> str:
    return json.dumps({"step": step, "tokens": 256 * step, "split": split, "loss": 5.5}) + "\n"


def open_tracker(folder: Path, *arguments: str, step: int = 0, evaluated: bool = False, wandb_id: str | None = None) -> Tracker:
    config = load([f"--out_dir={folder}", "--max_iters=10", "--dataset=data/some", *arguments])
    info = {"config": as_dict(config), **tracker.environment(torch.device("cpu"))}
    return Tracker(config, step, evaluated, wandb_id, info)


def records(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


# --- metrics.jsonl -----------------------------------------------------------------------------------------------------------


WRITTEN = [line(0, "val"), line(1), line(2), line(2, "val"), line(3), line(4), line(4, "diagnostics"), line(4, "val")]


@pytest.mark.parametrize("step, evaluated, left", [
    (0, False, 0), (0, True, 1), (1, False, 2), (2, False, 3), (2, True, 4), (3, True, 5), (4, False, 7), (4, True, 8),
    (9, False, 8),
])
@pytest.mark.parametrize("torn", [
    "", '{"step": 5, "tokens": 1280, "spl', '{"step": 1, "tokens": 256, "split": "train", "loss": 5}', "{", "\0\0\0\0",
])
def test_cut_back_leaves_what_was_before_the_step_and_nothing_else(tmp_path, step, evaluated, left, torn):
    """`torn`: a last line without its end, of a process or machine that died; the val line of a step counts if it was done."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(WRITTEN) + torn)
    cut_back(path, step, evaluated)
    assert path.read_text() == "".join(WRITTEN[:left])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(0, len(line(3)), 5))
def test_cut_back_after_a_crash_at_any_byte(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3)[:cut])
    cut_back(path, 5, True)
    assert path.read_text() == line(1) + line(2)


def test_cut_back_removes_what_is_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    junk = b'\n[1]\n7\n"x"\nnull\n{}\n{"step": "1", "split": "val"}\n\xff\xfe\n{"step": null}\n'
    path.write_bytes(line(1).encode() + junk + line(2).encode())
    cut_back(path, 5, True)
    assert path.read_text() == line(1) + line(2)


@pytest.mark.parametrize("content, said", [
    (None, "is not there"), (b"", "had no records"), (b"\x8b\xff" * 5000, "had no records"),
    (b"".join(bytes([i % 9 + 60]) * 7 + b"\n" for i in range(20)), "had 20 lines that are no records"),
    (line(1).encode() + b"oops\n" + line(2).encode(), "had 1 lines that are no records"),
    (line(5).encode(), "had no records"),
    (line(1).encode() + line(2).encode()[:-9], None), ("".join(WRITTEN).encode(), None),
])
def test_a_record_that_is_gone_or_spoilt_is_told_in_one_line(tmp_path, capsys, content, said):
    (tmp_path / "ckpt_00000003.pt").write_bytes(b"")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    open_tracker(tmp_path, step=3).close()
    told = (tmp_path / "log.txt").read_text()
    assert told == capsys.readouterr().out
    assert told == ("" if said is None else
                    f"warning: {tmp_path}/metrics.jsonl {said}: the record of the 3 steps so far is not complete\n")


@pytest.mark.parametrize("step", [0, 3])
def test_a_new_run_and_a_branch_from_elsewhere_miss_no_record(tmp_path, capsys, step):
    open_tracker(tmp_path, step=step).close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, name):
    """To open it would be to wait for its other end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is a pipe, wanted a file"):
        open_tracker(tmp_path)


def test_cut_back_does_not_touch_a_file_that_is_right_or_absent(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 3, True)
    assert not path.exists()
    path.write_text("".join(WRITTEN))
    os.utime(path, (1000, 1000))
    cut_back(path, 4, True)
    assert path.stat().st_mtime == 1000
    path.write_text("")
    cut_back(path, 0, False)
    assert path.read_text() == ""


def test_cut_back_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(WRITTEN))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("dead disk")))
    with pytest.raises(OSError, match="dead disk"):
        cut_back(path, 1, True)
    assert path.read_text() == "".join(WRITTEN) and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_records_are_on_file_at_once_and_strict_json(tmp_path):
    """json.dumps writes NaN and Infinity, which jq, JavaScript and pandas' reader refuse."""
    opened = open_tracker(tmp_path)
    opened.log(TRAIN)
    opened.log({"step": 1, "tokens": 256, "split": "val", "loss": math.nan})
    opened.log(TRAIN | {"step": 2, "grad_norm": math.inf})

    def refuse(constant):
        raise ValueError(constant)

    found = [json.loads(text, parse_constant=refuse) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [TRAIN, {"step": 1, "tokens": 256, "split": "val", "loss": None}, TRAIN | {"step": 2, "grad_norm": None}]
    opened.sync()
    opened.close()


def test_continued_run_appends_after_what_was_cut(tmp_path):
    first = open_tracker(tmp_path)
    for step in range(1, 6):
        first.log(TRAIN | {"step": step})
    first.say("first")
    first.close()
    second = open_tracker(tmp_path, step=3, evaluated=True)
    second.log(TRAIN | {"step": 4, "loss": 1.0})
    second.say("second")
    second.close()
    assert [(r["step"], r["loss"]) for r in records(tmp_path)] == [(1, 5.5), (2, 5.5), (3, 5.5), (4, 1.0)]
    assert (tmp_path / "log.txt").read_text() == "first\nsecond\n"  # the log is the story of all that happened


def test_silent_has_every_method_that_the_loop_calls():
    silent = Silent()
    silent.say("x"), silent.log(TRAIN), silent.advance(), silent.sync(), silent.close(failed=True)
    assert silent.wandb_id is None
    assert all(hasattr(Silent, name) for name in vars(Tracker) if not name.startswith("_"))


# --- console, log.txt, config.json ---------------------------------------------------------------------------------------------


def test_say_goes_to_console_and_log_once(tmp_path, capsys):
    opened = open_tracker(tmp_path)
    opened.say("step 1: été")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "step 1: été\n"
    opened.close()
    assert capsys.readouterr().out == "step 1: été\n"


TALKS = """
import sys, time
from pathlib import Path
sys.path.insert(0, ".")
from tests.test_tracker import TRAIN, open_tracker
opened = open_tracker(Path(sys.argv[1]))
opened.say("start")
sys.stdout.flush()
time.sleep(0.5)
for step in range(1, 2001):
    opened.log(TRAIN | {"step": step})
    opened.say(f"step {step} " + "." * 80)
opened.close()
print("end")
sys.exit(0)
"""


def test_a_console_that_goes_away_does_not_end_the_run(tmp_path):
    """As in `python train.py ... | head -1`, or when the terminal of a run is closed."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", TALKS, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "start\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 0, errors
    assert records(tmp_path / "run")[-1]["step"] == 2000
    assert (tmp_path / "run" / "log.txt").read_text().splitlines()[-1].startswith("step 2000")
    assert "BrokenPipe" not in errors


def test_config_json_tells_all_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    monkeypatch.setenv("HF_TOKEN", "hf_t0ken")
    open_tracker(tmp_path, "--wandb_group=None").close()
    text = (tmp_path / "config.json").read_text()
    info = json.loads(text)
    assert set(info["config"]) == set(as_dict(load([]))) and info["config"]["wandb_group"] is None
    assert info["versions"]["torch"] == torch.__version__ and info["hardware"]["cpus"] == os.cpu_count()
    assert "cpu" in info["hardware"]["device"]
    everything = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "s3cr3t" not in everything and "hf_t0ken" not in everything and "WANDB_API_KEY" not in text
    assert not any(value in text for key, value in os.environ.items() if key.endswith(("KEY", "TOKEN", "SECRET")) and value)


def test_git_commit_is_head_and_none_outside_git(monkeypatch, tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode == 0:
        commit, _, dirty = tracker.git_commit().partition("-")
        assert commit == head.stdout.strip() and dirty in ("", "dirty")
    monkeypatch.setattr(tracker, "__file__", str(tmp_path / "tracker.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tracker.git_commit() is None
    monkeypatch.setenv("PATH", "")
    assert tracker.git_commit() is None


def test_git_commit_leaves_the_repository_s_index_alone(tmp_path, monkeypatch):
    """git describe --dirty would refresh it, under a lock in which another's commit fails."""
    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "tracker.py").write_text("x")
    git("add", "tracker.py")
    git("commit", "-m", "first")
    os.utime(tmp_path / "tracker.py", (1000, 1000))  # the same content; only the index has to be told
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(tracker, "__file__", str(tmp_path / "tracker.py"))
    assert len(tracker.git_commit()) == 40
    (tmp_path / "tracker.py").write_text("y")
    (tmp_path / "untracked").write_text("y")
    assert tracker.git_commit().endswith("-dirty")
    assert (tmp_path / ".git" / "index").read_bytes() == before


def test_clock_counts_steps_and_leaves_out_pauses():
    clock = Clock()
    time.sleep(0.04)
    with clock.paused():
        time.sleep(0.3)
    clock.steps += 2
    assert 0.02 <= clock.read() < 0.12
    time.sleep(0.02)
    clock.steps += 1
    assert 0.02 <= clock.read() < 0.12  # counted anew


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA A10", 125e12), ("NVIDIA A10G", 70e12), ("NVIDIA L4", 121e12),
    ("NVIDIA L40", 181e12),
    ("NVIDIA L40S", 362e12), ("NVIDIA A40", 150e12), ("NVIDIA RTX A6000", 155e12), ("NVIDIA B200", 2250e12),
    ("NVIDIA GB200", 2500e12),
    ("NVIDIA GeForce RTX 4090", 165e12), ("nvidia h200", 989e12),
    # Not these: another GPU whose name contains a known one, a slice of one, or none of them.
    ("NVIDIA RTX A4000", None), ("NVIDIA H20", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA L400", None), ("Tesla T4", None),
    ("Tesla V100-SXM2-16GB", None), ("AMD Instinct MI300X", None), ("NVIDIA GB10", None), ("", None),
])
def test_peak_flops(name, peak):
    assert peak_flops(name) == peak


def test_peak_memory_of_the_cpu_is_the_process_s():
    assert 0.05 < tracker.peak_memory_gb(torch.device("cpu")) < 100


# --- wandb that fails --------------------------------------------------------------------------------------------------------


class FakeRun:
    offline, url = True, "https://wandb.example/run"

    def __init__(self, fail_at: int | None = None, fail_finish: bool = False):
        self.logged, self.metrics, self.fail_at, self.fail_finish, self.exit_code = [], [], fail_at, fail_finish, None

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values):
        if len(self.logged) == self.fail_at:
            raise ConnectionError("no way\nto the server")
        self.logged.append(values)

    def finish(self, exit_code):
        if self.fail_finish:
            raise RuntimeError("")
        self.exit_code = exit_code


def fake_wandb(monkeypatch, init, login: bool = False) -> None:
    module = types.ModuleType("wandb")
    module.init, module.login, module.teardown = init, lambda prompt, verify: login, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def run_three_steps(folder: Path, capsys, *arguments: str, failed: bool = False, **state) -> list[str]:
    """A run with wandb asked for; what it says of wandb. Whatever wandb does, metrics.jsonl is whole."""
    opened = open_tracker(folder, "--wandb_log=True", *arguments, **state)
    for step in range(1, 4):
        opened.log(TRAIN | {"step": step})
    opened.log({"step": 3, "tokens": 768, "split": "val", "loss": 5.0})
    opened.close(failed)
    assert [(r["step"], r["split"]) for r in records(folder)] == [(1, "train"), (2, "train"), (3, "train"), (3, "val")]
    return [text for text in capsys.readouterr().out.splitlines() if text.startswith("wandb:")]


def test_wandb_is_not_even_imported_without_the_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    opened = open_tracker(tmp_path)
    opened.log(TRAIN)
    opened.close()
    assert opened.wandb_id is None and "wandb" not in (tmp_path / "log.txt").read_text()
    code = "import sys, train; sys.exit('wandb' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_wandb_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (said,) = run_three_steps(tmp_path, capsys)
    assert "not available" in said and "the run goes on" in said


def test_wandb_init_raises(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise RuntimeError("\nout of order\nand more")

    fake_wandb(monkeypatch, init)
    (said,) = run_three_steps(tmp_path, capsys)
    assert "out of order" in said and "the run goes on" in said


def test_wandb_offline_where_the_server_does_not_answer(tmp_path, monkeypatch, capsys):
    run, modes = FakeRun(), []

    def init(mode, **_):
        modes.append(mode)
        if mode == "online":
            raise TimeoutError("no answer")
        return run

    fake_wandb(monkeypatch, init, login=True)
    monkeypatch.setattr(sys.modules["wandb"], "teardown", lambda: modes.append("teardown"))
    said = run_three_steps(tmp_path, capsys)
    assert modes == ["online", "teardown", "offline"] and len(run.logged) == 4
    assert "no answer" in said[0] and "wandb sync" in said[1] and len(said) == 2


def test_wandb_is_silent_and_does_not_wait_for_long_unless_the_environment_says_otherwise(tmp_path, monkeypatch, capsys):
    """Of a run online the tracker itself says where it is."""
    run, seen = FakeRun(), []
    run.offline = False
    fake_wandb(monkeypatch, lambda **_: seen.append([os.environ[name] for name in ("WANDB_SILENT", "WANDB_INIT_TIMEOUT")]) or run,
               login=True)
    monkeypatch.setattr(os, "environ", os.environ.copy() | {"WANDB_INIT_TIMEOUT": "300"})
    assert run_three_steps(tmp_path, capsys) == ["wandb: https://wandb.example/run"]
    assert seen == [["true", "300"]]


def test_wandb_log_raises_in_mid_run(tmp_path, monkeypatch, capsys):
    run = FakeRun(fail_at=1)
    fake_wandb(monkeypatch, lambda **_: run)
    said = run_three_steps(tmp_path, capsys)
    assert len(run.logged) == 1 and [text for text in said if "failed" in text] == [
        "wandb: logging failed (no way); the run goes on with metrics.jsonl alone"]


def test_wandb_finish_raises(tmp_path, monkeypatch, capsys):
    fake_wandb(monkeypatch, lambda **_: FakeRun(fail_finish=True))
    assert run_three_steps(tmp_path, capsys)[-1] == "wandb: closing failed (RuntimeError)"


def test_wandb_mode_of_the_environment_wins(tmp_path, monkeypatch, capsys):
    modes = []
    fake_wandb(monkeypatch, lambda mode, **_: modes.append(mode) or FakeRun(), login=True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_three_steps(tmp_path, capsys)
    assert modes == ["disabled"]


def test_wandb_gets_names_steps_and_no_nulls(tmp_path, monkeypatch, capsys):
    run, given = FakeRun(), {}
    fake_wandb(monkeypatch, lambda **arguments: given.update(arguments) or run)
    run_three_steps(tmp_path / ".", capsys, "--attention=xsa", f"--dataset=x/{'d' * 100}", failed=True, wandb_id="abcd1234")
    assert given["id"] == "abcd1234" and given["resume"] == "allow"
    assert given["project"] == "nanoxsa" and given["name"] == tmp_path.name
    assert given["group"] == f"{'d' * 100}-12x768" and given["tags"] == ["xsa", "12x768", "d" * 64]
    assert given["config"]["attention"] == "xsa" and given["config"]["versions"]["torch"] == torch.__version__
    assert run.metrics == [("step", None), ("tokens", None), ("*", "step")] and run.exit_code == 1
    assert run.logged[0] == {"step": 1, "tokens": 256} | {
        f"train/{key}": value for key, value in TRAIN.items()
        if key not in ("step", "tokens", "split", "data_hash") and value is not None}
    assert run.logged[3] == {"step": 3, "tokens": 768, "val/loss": 5.0}


def test_lists_over_layers_are_strict_json_and_curves_of_wandb(tmp_path, monkeypatch):
    run = FakeRun()
    fake_wandb(monkeypatch, lambda **_: run)
    opened = open_tracker(tmp_path, "--wandb_log=True")
    at = {"step": 2, "tokens": 512, "split": "diagnostics"}
    opened.log(at | {"kurtosis": [3.0, math.nan, 4.0], "gate_mean": [None, 1.0, 1.0]})
    opened.close()
    assert records(tmp_path)[0]["kurtosis"] == [3.0, None, 4.0]
    assert run.logged == [{"step": 2, "tokens": 512, "diagnostics/kurtosis/0": 3.0, "diagnostics/kurtosis/2": 4.0,
                           "diagnostics/gate_mean/1": 1.0, "diagnostics/gate_mean/2": 1.0}]


# --- wandb itself ------------------------------------------------------------------------------------------------------------

WITH_WANDB = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.test_tracker import TRAIN, open_tracker
folder, step, wandb_id, *arguments = sys.argv[1:]
opened = open_tracker(Path(folder), "--wandb_log=True", *arguments, step=int(step), evaluated=True, wandb_id=wandb_id or None)
for i in range(int(step) + 1, int(step) + 3):
    opened.log(TRAIN | {"step": i, "tokens": 256 * i})
opened.log({"step": i, "tokens": 256 * i, "split": "val", "loss": 5.0 - i})
opened.close()
print("id", opened.wandb_id)
"""


def wandb_run(folder: Path, step: int, wandb_id: str, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"WANDB_API_KEY": "", "HOME": str(folder), "WANDB_CONSOLE": "off", "WANDB_SILENT": "true",
    "NETRC": str(folder / "n")}
    result = subprocess.run([sys.executable, "-c", WITH_WANDB, str(folder), str(step), wandb_id, *arguments], cwd=ROOT,
                            env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    return result.stdout


def inspect(path: Path) -> list[dict]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=path.parent)
    assert result.returncode == 0, result.stderr
    return [json.loads(text) for text in result.stdout.splitlines()]


@pytest.mark.slow  # two real wandb runs and wandb's own reader, a process each
def test_real_wandb_offline_without_login_keeps_its_id_over_a_resume(tmp_path):
    pytest.importorskip("wandb")
    arguments = ("--attention=xsa", "--wandb_run_name=17", "--wandb_group=g")
    said = wandb_run(tmp_path, 0, "", *arguments)
    assert "wandb: offline; upload later with `wandb sync" in said
    wandb_id = said.split()[-1]
    assert len(wandb_id) == 8 and f"id {wandb_id}" in wandb_run(tmp_path, 2, wandb_id, *arguments)
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 2, 3, 4, 4]
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{wandb_id}*/run-{wandb_id}.wandb"), key=lambda p: p.stat().st_mtime_ns)
    found = [inspect(path) for path in files]
    histories = []
    for content in found:
        (run,) = (record["run"] for record in content if record["type"] == "run")
        assert (run["run_id"], run["run_group"], run["display_name"], run["project"]) == (wandb_id, "g", "17", "nanoxsa")
        assert set(run["tags"]) == {"xsa", "12x768", "some"} and run["config"]["update"]["attention"] == "xsa"
        metrics = [record["metric"] for record in content if record["type"] == "metric"]
        assert {m["name"] for m in metrics if "name" in m} >= {"step", "tokens"}
        assert [m["step_metric"] for m in metrics if m.get("glob_name") == "*"] == ["step"]
        assert [record["exit"]["exit_code"] for record in content if record["type"] == "exit"] == [0]
        histories += [record["history"]["item"] for record in content if record["type"] == "history"]
    assert [(h["step"], h["tokens"], h.get("train/loss"), h.get("val/loss")) for h in histories] == [
        (1, 256, 5.5, None), (2, 512, 5.5, None), (2, 512, None, 3.0), (3, 768, 5.5, None), (4, 1024, 5.5, None),
        (4, 1024, None, 1.0)]


def test_seconds_since_the_process_began():
    program = "from tracker import seconds_since_start; import time; time.sleep(0.5); print(seconds_since_start())"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.5 < float(result.stdout) < time.perf_counter() - start + 0.1
