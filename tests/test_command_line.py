"""command_line.py: a place for results is looked at before there are any, by every command that writes some."""

import importlib
import os
from pathlib import Path

import pytest

from command_line import InputError, check_output, make_output_folder
from tests.test_compare import write_run


@pytest.fixture
def places(tmp_path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize("name, wanted", [
    ("folder", "is a folder"), ("none/x.json", "no folder"), ("file/x.json", "no folder"), ("pipe", "a pipe"),
    ("x" * 250, "too long"), ("folder/../file", "is also read"),
])
def test_a_file_that_could_not_be_written(name, wanted, places):
    before = sorted(places.iterdir())
    with pytest.raises(InputError, match=wanted) as error:
        check_output("--json", places / name, inputs=[places / "file"])
    assert str(error.value).startswith("--json: ") and sorted(places.iterdir()) == before


def test_a_file_that_can_be_written(places):
    before = sorted(places.iterdir())
    check_output("--json", places / "new.json", inputs=[places / "file"])
    check_output("--json", places / "file")
    make_output_folder("--out", places / "folder", ["a.json"])
    assert sorted(places.iterdir()) == before and (places / "file").read_text() == "kept"
    make_output_folder("--out", places / "folder" / "new" / "er", ["a.json"])
    assert list((places / "folder" / "new" / "er").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/sys/kernel").is_dir(), reason="nowhere is unwritable")
def test_a_folder_in_which_nothing_can_be_made():
    with pytest.raises(InputError, match="cannot be written"):
        make_output_folder("--out", Path("/sys/kernel"))


BENCHMARKS = ["step", "peers", "block", "presets", "sizes", "xsa", "decode", "loss", "optimizer", "loader", "tokenize",
              "checkpoint", "compare"]
WITH_FILES = ["eval.paired", "eval.tasks", "scripts.plan", "eval.diagnostics", *(f"scripts.bench {name}" for name in BENCHMARKS)]
WITH_FOLDERS = {"scripts.compare": "comparison.png", "scripts.bench block": "block.png", "scripts.bench sizes": "results.md",
                "scripts.reproduce": "fig4.md", "eval.bias": "bias.png", "eval.local_data": None}


@pytest.fixture
def inputs(tmp_path) -> dict[str, list[str]]:
    """Arguments with which a command would begin to work, by its name."""
    from tests.test_sample import write_checkpoint

    (tmp_path / "a").mkdir()
    path = write_checkpoint(tmp_path / "a" / "ckpt_00000007.pt", seed=1, attention="sa", block_size=64)
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "tokens": 1, "split": "diagnostics", "attn_entropy": [1.0]}\n')
    return {"eval.paired": [str(path), str(path)], "eval.tasks": [str(path)], "eval.diagnostics": [str(run)],
            "scripts.bench compare": ["a.json", "b.json"], "scripts.compare": [str(run)],
            "scripts.reproduce": ["fig4", "--collect"], "eval.bias": [str(path)], "eval.local_data": ["--from=/no/such"]}


def refused(command: str, argv: list[str], capsys: pytest.CaptureFixture) -> str:
    module, *name = command.split()
    main = importlib.import_module("scripts.bench.__main__" if name else module).main
    assert main([*name, *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("command", WITH_FILES)
def test_a_folder_where_a_file_is_to_be(command, inputs, tmp_path, capsys):
    flag = "--out" if command == "eval.diagnostics" else "--json"
    said = refused(command, [*inputs.get(command, []), f"{flag}={tmp_path}"], capsys)
    assert flag in said and f"{tmp_path} is a folder" in said


@pytest.mark.parametrize("command", WITH_FOLDERS)
def test_a_file_where_a_folder_is_to_be_and_the_other_way_round(command, inputs, tmp_path, capsys, monkeypatch):
    if command == "eval.bias":  # data is looked at first
        monkeypatch.setattr("eval.bias.open_source", lambda *_: None)
        monkeypatch.setattr("eval.bias.make_loader", lambda *_: None)
    (tmp_path / "file").touch()
    assert "--out" in refused(command, [*inputs.get(command, []), f"--out={tmp_path / 'file'}"], capsys)
    if (name := WITH_FOLDERS[command]) is not None:
        (tmp_path / "out" / name).mkdir(parents=True)
        said = refused(command, [*inputs.get(command, []), f"--out={tmp_path / 'out'}"], capsys)
        assert "--out" in said and f"{tmp_path / 'out' / name} is a folder" in said
