"""What the fault tests share: data, and the run that nothing disturbed."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import local
from tests.faults.driver import SMALL, Job, run


def build_dataset(folder: Path, word: str = "document", n_documents: int = 150) -> None:
    source = folder.with_suffix(".jsonl")
    texts = [f"{word} {i}, of which one more line is line {i * i}. " * 60 for i in range(n_documents)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    share = 0.1 if n_documents > 100 else 0.3
    assert local.main([f"--input={source}", "--tokenizer=byte", f"--out={folder}", f"--val_fraction={share}"]) == 0


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "bytes"
    build_dataset(folder)
    return folder


@pytest.fixture(scope="session")
def settings(dataset: Path) -> list[str]:
    return [*SMALL, f"--dataset={dataset}", "--init_from=auto"]


@pytest.fixture(scope="session")
def straight_job(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("straight")
    job = run([*settings, f"--out_dir={folder}/run"], folder)
    assert job.statuses == [0], job.text()
    return job


@pytest.fixture(scope="session")
def straight(straight_job: Job) -> Path:
    return straight_job.folder / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True)
    if not made or made.returncode:
        pytest.skip("a tmpfs cannot be mounted here, which takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
