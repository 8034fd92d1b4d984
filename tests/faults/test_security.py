"""What a run leaves: no secret, ordinary permissions, and nothing outside out_dir. And what a launcher says of the
ranks, and shell scripts."""

import functools
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.faults.driver import ROOT, ImportFirst, launch, run

SECRETS = {
    "WANDB_API_KEY": "a11ce" * 8, "HF_TOKEN": "hf_b0bb1e5", "AWS_SECRET_ACCESS_KEY": "c0ffee/c0ffee+c0ffee",
    "PGPASSWORD": "de1ic1ous", "HTTPS_PROXY": "http://user:f00ba4@proxy:3128",
}


@pytest.mark.parametrize("umask, file, folder", [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_files_have_ordinary_permissions(settings, tmp_path, umask, file, folder):
    job = run([*settings, "--max_iters=3", f"--out_dir={tmp_path}/a/run"], tmp_path, prepare=functools.partial(os.umask, umask))
    assert job.statuses == [0], job.text()
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


def snapshot(*folders: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for folder in folders for path in folder.rglob("*")
            if path.is_file() and not {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".venv"} & set(path.parts)}


@pytest.mark.slow  # starts train.py from nothing
def test_writes_only_into_out_dir_and_tells_no_secret(settings, dataset, tmp_path):
    """With a home, a folder for temporaries and a working directory of its own, all looked through before and after."""
    homes = {name: tmp_path / name for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    for folder in homes.values():
        folder.mkdir()
    before = snapshot(ROOT, dataset.parent, *homes.values())
    process = launch([*settings, "--max_iters=3", f"--out_dir={tmp_path}/run"],
                     environment=SECRETS | {"PYTHONDONTWRITEBYTECODE": "1"} | {name: str(path) for name, path in homes.items()})
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert snapshot(ROOT, dataset.parent, *homes.values()) == before
    written = text + "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "run").iterdir())
    assert not [name for name, value in SECRETS.items() if value in written]


def test_wandb_gets_no_secret(settings, tmp_path):
    """Everything that is handed to wandb, written down by a stand-in."""
    (tmp_path / "wandb.py").write_text(
        "class Run:\n    offline, url = False, 'https://wandb.example/run'\n"
        "    def define_metric(self, *a, **k): ...\n    def finish(self, **k): ...\n"
        f"    def log(self, record): open({str(tmp_path / 'told')!r}, 'a').write(repr(record))\n"
        "def login(**more): return True\n"
        f"def init(**more):\n    open({str(tmp_path / 'told')!r}, 'a').write(repr(more))\n    return Run()\n")
    job = run([*settings, "--max_iters=3", "--wandb_log=True", f"--out_dir={tmp_path}/run"], tmp_path, environment=SECRETS,
              prepare=ImportFirst(str(tmp_path)))
    assert job.statuses == [0], job.text()
    told = (tmp_path / "told").read_text()
    assert "'learning_rate': 0.01" in told and "train/loss" in told
    assert not [name for name, value in SECRETS.items() if value in told + job.text()]


@pytest.mark.parametrize("variables, words", [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE"), ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK"), ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK"), ({"WORLD_SIZE": "2"}, "RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR"),
])
def test_environment_that_no_launcher_makes_is_bad_input(settings, tmp_path, variables, words):
    job = run([*settings, f"--out_dir={tmp_path}/run"], tmp_path, environment=variables, limit=30)
    assert job.statuses == [2] and words in job.last_line() and "Traceback" not in job.text(), job.text()


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/**/*.s*h")) + sorted(ROOT.glob("scripts/slurm/*.sbatch")),
                         ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") or text.startswith("# shellcheck shell=bash\n")
    assert script.name == "environment.sh" or "\nset -euo pipefail\n" in text
