"""checkpoint.py under crashes, damage and foreign files: the last good checkpoint is always there, found, and read as it was."""

import collections
import os
import pickle
import random
import socket
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from command_line import InputError
from configurator import as_dict, load

ROOT = Path(__file__).parent.parent


def state_at(step: int) -> dict:
    """A small state whose tensors tell the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"wte.weight": torch.randn(40, 50, generator=generator)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(40, generator=generator)}}, "param_groups": [{"lr": 1e-3,
        "params": [0]}]},
        "scaler": {}, "step": step, "tokens": 256 * step, "evaluated_step": -1, "best_val_loss": None, "bad_steps": 0,
        "bad_steps_in_row": 0, "qk_clips": [], "spikes": {}, "data_hash": 0, "rng": torch.get_rng_state(),
        "config": as_dict(load([])),
        "data": {"fingerprint": "f" * 64, "tokenizer": "gpt2", "vocab_size": 50257}, "wandb_id": None,
    }


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- save and find -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path, state_at(7), keep=2)
    assert path == tmp_path / "ckpt_00000007.pt" == checkpoint.latest(tmp_path)
    assert names(tmp_path) == ["ckpt_00000007.pt", "latest"] and (tmp_path / "latest").read_text() == "ckpt_00000007.pt\n"
    assert checkpoint.damage(path) is None and checkpoint.step_of(path) == 7
    assert same(checkpoint.load(path), state_at(7) | {"rng": checkpoint.load(path)["rng"]})
    assert same(checkpoint.load(path), checkpoint.load(path, mmap=True))


def test_a_state_that_lacks_or_adds_something_is_not_saved(tmp_path):
    state = state_at(1)
    del state["optimizer"]
    for wrong in (state, state_at(1) | {"epoch": 1}):
        with pytest.raises(ValueError, match="optimizer|epoch"):
            checkpoint.save(tmp_path, wrong, keep=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("keep, milestone, left", [
    (1, 0, [7]), (2, 0, [6, 7]), (100, 0, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6, 7]), (2, 3, [3, 6, 7]), (2, 2, [2, 4, 6, 7]),
    (1, 7, [7]), (1, 1, [1, 2, 3, 4, 5, 6, 7]),
])
def test_keeps_the_newest_and_the_milestones(tmp_path, keep, milestone, left):
    for step in range(1, 8):
        checkpoint.save(tmp_path, state_at(step), keep, milestone)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == left
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 7)


def test_saving_beside_later_steps_removes_none_of_them(tmp_path):
    """After a fall back to an earlier checkpoint the later, damaged ones are no reason to remove what is being written."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state_at(step), keep=9)
    checkpoint.save(tmp_path, state_at(15), keep=1)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [15, 20, 30]
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 15)  # the newest, though not the highest


def test_only_checkpoints_count(tmp_path):
    for name in ("ckpt_1.pt", "ckpt_000000001.pt", "ckpt_0000000a.pt", "ckpt_00000001.pt.bak", "xckpt_00000001.pt", "ckpt.pt",
                 ".ckpt_00000009.pt.nanoxsa.tmp"):
        (tmp_path / name).write_bytes(b"x")
    assert checkpoint.list_checkpoints(tmp_path) == [] and checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, state_at(2), keep=1)
    assert len(names(tmp_path)) == 9 and checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 2)
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", ["ckpt_00000009.pt", "latest"])
def test_what_is_no_regular_file_is_neither_checkpoint_nor_marker(tmp_path, name):
    """Nor is it removed; a pipe that nobody writes into would be waited for."""
    makers = {"pipe": os.mkfifo, "folder": os.mkdir, "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path))}
    for kind, make in makers.items():
        folder = tmp_path / kind
        folder.mkdir()
        for step in (1, 2):
            checkpoint.save(folder, state_at(step), keep=9)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert checkpoint.latest(folder) == checkpoint.path_of(folder, 2), kind
        if name != "latest":
            checkpoint.save(folder, state_at(12), keep=1)
            assert names(folder) == [name, "ckpt_00000012.pt", "latest"]


@pytest.mark.parametrize("marker", [None, b"", b"\xff\xfe", b"ckpt_00000099.pt\n", b"../ckpt_00000010.pt", b"x" * 5000, "folder"])
def test_without_a_usable_marker_the_highest_step_counts(tmp_path, marker):
    """Times of writing say nothing: a copy of the folder has others."""
    for step, written in ((30, 1000), (10, 3000), (20, 2000)):
        os.utime(checkpoint.save(tmp_path, state_at(step), keep=9), (written, written))
    (tmp_path / "latest").unlink()
    if marker == "folder":
        (tmp_path / "latest").mkdir()
    elif marker is not None:
        (tmp_path / "latest").write_bytes(marker)
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 30)


def test_fall_back_is_to_the_highest_step_that_is_whole(tmp_path):
    for step, written in ((20, 4000), (40, 3000), (60, 2000), (80, 1000)):
        os.utime(checkpoint.save(tmp_path, state_at(step), keep=9), (written, written))
    checkpoint.path_of(tmp_path, 80).write_bytes(b"")
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 60)


def test_marker_wins_over_name_and_time(tmp_path):
    for step in (30, 10, 20):
        os.utime(checkpoint.save(tmp_path, state_at(step), keep=9), (step, step))
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 20)


# --- crashes -----------------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here: nothing of save() runs any more, its clean-up neither."""


@pytest.fixture
def calls(monkeypatch):
    """Counts what save() asks of the system; dies before, or half-way in, the call of number `calls.fatal`."""
    class Calls:
        fatal, made, cause = None, 0, None

    def watched(name, call, half=None):
        def wrapper(*args, **kwargs):
            if Calls.cause:
                raise Crash(f"{name} after death")
            Calls.made += 1
            if Calls.made == Calls.fatal:
                if half:
                    half(*args)
                Calls.cause = name
                raise Crash(name)
            return call(*args, **kwargs)
        return wrapper

    monkeypatch.setattr(os, "fsync", watched("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", watched("replace", os.replace))
    monkeypatch.setattr(Path, "unlink", watched("unlink", Path.unlink))
    monkeypatch.setattr(torch, "save", watched("save", torch.save, half=lambda state, file: file.write(b"PK\x03\x04" * 500)))
    return Calls


def test_crash_before_every_system_call_leaves_a_good_checkpoint(tmp_path, calls):
    """Saves of steps 30 and 40 with keep 2; 40's dies before each of its calls in turn."""
    outcomes = []
    for fatal in range(1, 100):
        folder = tmp_path / str(fatal)
        folder.mkdir()
        calls.fatal, calls.cause = None, None
        for step in (10, 20, 30):
            checkpoint.save(folder, state_at(step), keep=2)
        calls.made, calls.fatal = 0, fatal
        try:
            checkpoint.save(folder, state_at(40), keep=2)
        except Crash:
            outcomes.append(calls.cause)
        else:
            break
        calls.fatal, calls.cause = None, None
        warnings = []
        path = checkpoint.latest(folder, warn=warnings.append)
        assert checkpoint.step_of(path) in (30, 40) and warnings == []
        assert same(checkpoint.load(path)["model"], state_at(checkpoint.step_of(path))["model"])
        marked = (folder / "latest").read_text().strip()
        assert path.name == marked  # complete is what the marker says, and it always names a file that is there
        checkpoint.sweep(folder)
        assert all(name == "latest" or name.startswith("ckpt_") for name in names(folder))
        assert checkpoint.save(folder, state_at(40), keep=2) == checkpoint.latest(folder)  # life goes on
        assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(folder)] == [30, 40]
    # the checkpoint: save, fsync, replace, fsync of the folder; the marker: fsync, replace, fsync; the oldest: unlink
    assert outcomes == ["save", "fsync", "replace", "fsync", "fsync", "replace", "fsync", "unlink"]


@pytest.mark.parametrize("name", ["save", "fsync", "replace"])
def test_refused_by_the_disk_nothing_is_left_behind(tmp_path, monkeypatch, name):
    checkpoint.save(tmp_path, state_at(1), keep=1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch if name == "save" else os, name, full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, state_at(2), keep=1)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_same_step_again_is_replaced_whole(tmp_path, monkeypatch):
    """A run that fell back writes a step anew; the old file serves until the new one is complete."""
    path = checkpoint.save(tmp_path, state_at(5), keep=2)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("dead disk")))
    with pytest.raises(OSError, match="dead disk"):
        checkpoint.save(tmp_path, state_at(5) | {"tokens": 1}, keep=2)
    assert path.read_bytes() == before
    monkeypatch.undo()
    checkpoint.save(tmp_path, state_at(5) | {"tokens": 1}, keep=2)
    assert checkpoint.load(path)["tokens"] == 1


def test_sweep_takes_our_temporaries_alone(tmp_path):
    """out_dir may be a folder that others use as well."""
    for name in (".ckpt_00000003.pt.nanoxsa.tmp", ".metrics.jsonl.nanoxsa.tmp", ".latest.nanoxsa.tmp", ".editor.tmp", "mine.tmp",
                 ".tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".cache.tmp").mkdir()
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == [".cache.tmp", ".editor.tmp", ".tmp", "mine.tmp"]
    checkpoint.sweep(tmp_path / "nowhere")


def test_write_aside_writes_text_as_utf8_and_leaves_no_temporary(tmp_path):
    checkpoint.write_aside(tmp_path / "a", "été\n")
    assert (tmp_path / "a").read_bytes() == "été\n".encode() and names(tmp_path) == ["a"]
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_aside(tmp_path / "a", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    assert (tmp_path / "a").read_bytes() == "été\n".encode() and names(tmp_path) == ["a"]


# --- damage ------------------------------------------------------------------------------------------------------------------


def test_truncation_at_any_length_is_found(tmp_path):
    path = checkpoint.save(tmp_path, state_at(1), keep=1)
    whole = path.read_bytes()
    lengths = [0, 1, 21, 22, 30, *range(100, len(whole), 397), *range(len(whole) - 30, len(whole))]
    for length in lengths:
        path.write_bytes(whole[:length])
        assert checkpoint.damage(path) is not None, length
    path.write_bytes(whole)
    assert checkpoint.damage(path) is None


def test_flipped_bits_are_found_or_harmless(tmp_path):
    """Anywhere in the file, the archive's directory at its end above all: what is not found as damage loads as it was saved."""
    path = checkpoint.save(tmp_path, state_at(1), keep=1)
    whole, rng, outcomes = path.read_bytes(), random.Random(0), collections.Counter()
    good = checkpoint.load(path)
    for i in range(700):
        flipped = bytearray(whole)
        position = rng.randrange(len(whole) - 2500 if i % 2 else 0, len(whole))
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        found = checkpoint.damage(path) is not None
        outcomes[found] += 1
        if not found:
            assert same(checkpoint.load(path), good), position
    assert outcomes[True] > 450


def test_every_flipped_bit_in_a_tensor_is_found(tmp_path):
    path = checkpoint.save(tmp_path, state_at(1), keep=1)
    whole = path.read_bytes()
    start = whole.index(state_at(1)["model"]["wte.weight"].numpy().tobytes())
    for position in range(start, start + 4 * 40 * 50, 97):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert "checksum" in checkpoint.damage(path)


def test_a_record_whose_compression_is_damaged_does_not_raise(tmp_path):
    """zipfile's decompressors raise errors of their own."""
    path = checkpoint.save(tmp_path, state_at(1), keep=1)
    whole = path.read_bytes()
    directory = whole.rindex(b"PK\x01\x02")
    for method in (1, 8, 9, 12, 14, 93, 99, 0xFFFF):
        changed = bytearray(whole)
        changed[directory + 10 : directory + 12] = method.to_bytes(2, "little")
        path.write_bytes(changed)
        assert checkpoint.damage(path), method


class Bomb:
    """Unpickled by plain pickle, it leaves a file as the trace of code that ran."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def foreign_files(folder: Path) -> dict[str, Path]:
    """Files that are not checkpoints of ours, under names of checkpoints."""
    nanogpt = {"model": {"transformer.wte.weight": torch.zeros(3, 2)}, "model_args": {"n_layer": 1}, "iter_num": 5,
               "best_val_loss": torch.tensor(3.0), "config": {"dataset": "shakespeare"}}
    files = {name: folder / f"ckpt_{i:08d}.pt" for i, name in enumerate(
        ("empty", "text", "empty zip", "other zip", "pickle", "bomb", "zipped bomb", "list", "tensor", "weights", "nanogpt",
        "legacy",
         "folder", "numpy"))}
    files["empty"].write_bytes(b"")
    files["text"].write_text("not a checkpoint")
    with zipfile.ZipFile(files["empty zip"], "w"):
        pass
    with zipfile.ZipFile(files["other zip"], "w") as archive:
        archive.writestr("data.pkl", b"hello")
    files["pickle"].write_bytes(pickle.dumps(state_at(1) | {"model": None, "rng": None, "optimizer": None}, protocol=2))
    files["bomb"].write_bytes(pickle.dumps(Bomb(folder / "trace"), protocol=2))
    torch.save(state_at(1) | {"wandb_id": Bomb(folder / "trace")}, files["zipped bomb"])
    torch.save([1, 2], files["list"])
    torch.save(torch.zeros(3), files["tensor"])
    torch.save({"wte.weight": torch.zeros(3)}, files["weights"])
    torch.save(nanogpt, files["nanogpt"])
    torch.save(state_at(1), files["legacy"], _use_new_zipfile_serialization=False)
    files["folder"].mkdir()
    torch.save(state_at(1) | {"best_val_loss": np.float64(3.0)}, files["numpy"])
    return files


def test_the_bomb_of_these_tests_goes_off_elsewhere(tmp_path):
    files = foreign_files(tmp_path)
    for name in ("bomb", "zipped bomb"):
        if name == "bomb":
            pickle.loads(files[name].read_bytes())
        else:
            torch.load(files[name], weights_only=False)
        (tmp_path / "trace").rmdir()


def test_foreign_files_are_refused_in_one_line_and_no_code_in_them_runs(tmp_path):
    for name, path in foreign_files(tmp_path).items():
        if name != "legacy":  # torch.load reads it, but it has no checksums
            with pytest.raises(InputError) as caught:
                checkpoint.load(path)
            assert str(path) in str(caught.value) and "\n" not in str(caught.value), name
        with pytest.raises(InputError) as caught:
            checkpoint.choose(load([f"--init_from={path}", f"--out_dir={tmp_path}/new"]))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), name
        assert "weights_only" not in str(caught.value) and "http" not in str(caught.value), name  # torch's advice
        assert str(caught.value).count(str(tmp_path)) == 1, name
    assert not (tmp_path / "trace").exists()


def test_only_what_is_no_archive_of_ours_any_more_is_damaged(tmp_path):
    """What is whole, by its checksums, is never passed over, whoever has written it."""
    files = foreign_files(tmp_path)
    damaged = {"empty", "text", "pickle", "bomb", "legacy"}
    for name, path in files.items():
        if name in damaged:
            assert checkpoint.damage(path) is not None, name
        else:
            with pytest.raises(InputError):
                checkpoint.damage(path)
    for name in files.keys() - damaged:
        if not files[name].is_dir():
            files[name].unlink()
    with pytest.raises(InputError, match="all 5 checkpoints .* the newest: "):
        checkpoint.latest(tmp_path)


def test_nanogpt_checkpoint_without_our_state_is_refused_with_what_it_lacks(tmp_path):
    path = foreign_files(tmp_path)["nanogpt"]
    with pytest.raises(InputError, match="no checkpoint to continue from: it lacks .*optimizer.*step.*tokens"):
        checkpoint.load(path)
    state = state_at(1)
    del state["optimizer"]
    torch.save(state, path)
    with pytest.raises(InputError, match="it lacks optimizer$"):
        checkpoint.load(path)
    with pytest.raises(InputError, match="does not exist"):
        checkpoint.load(tmp_path / "nowhere.pt")


def test_latest_passes_over_damaged_ones_and_tells(tmp_path):
    for step in (1, 2, 3):
        os.utime(checkpoint.save(tmp_path, state_at(step), keep=9), (step, step))
    checkpoint.path_of(tmp_path, 3).write_bytes(b"PK")
    checkpoint.path_of(tmp_path, 2).write_bytes(checkpoint.path_of(tmp_path, 2).read_bytes()[:-9])
    warnings = []
    assert checkpoint.latest(tmp_path, warn=warnings.append) == checkpoint.path_of(tmp_path, 1)
    assert ["ckpt_00000003.pt is damaged" in w or "ckpt_00000002.pt is damaged" in w for w in warnings] == [True, True]
    checkpoint.path_of(tmp_path, 1).write_bytes(b"")
    with pytest.raises(InputError, match=r"all 3 checkpoints in .* are damaged; the newest: \S*ckpt_00000003\.pt is damaged"):
        checkpoint.latest(tmp_path)  # 3 is the marked one


def no_permission(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(checkpoint._Source):
        def __init__(self, name):
            if name == path:
                raise PermissionError(13, "Permission denied")
            super().__init__(name)
    monkeypatch.setattr(checkpoint, "_Source", Refused)


def bad_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor, buffers, read=os.readv):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            raise OSError(5, "Input/output error")
        return read(descriptor, buffers)
    monkeypatch.setattr(os, "readv", failing)


def no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments, **more):
        raise MemoryError
    monkeypatch.setattr(zipfile.ZipFile, "testzip", failing)


def no_memory_to_map(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments, **more):
        raise RuntimeError(f"unable to mmap 9 bytes from file <{path}>: Cannot allocate memory (12)")
    monkeypatch.setattr(torch, "load", failing)


def disk_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.symlink_to("/nowhere/ckpt")


def of_a_later_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(state_at(2) | {"ema": {}}, path)


def of_an_earlier_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({key: value for key, value in state_at(2).items() if key != "spikes"}, path)


def of_another_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(state_at(2) | {"best_val_loss": np.float64(3.0)}, path)


def renamed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(state_at(3), path)


@pytest.mark.parametrize("make, message", [
    (no_permission, "cannot be read: Permission denied"), (bad_disk, "cannot be read: Input/output error"),
    (no_memory, "cannot be read: not enough memory"), (no_memory_to_map, "Cannot allocate memory"),
    (disk_not_there, "cannot be read: No such file"), (of_a_later_version, "another version of this code: it also holds ema"),
    (of_an_earlier_version, "it lacks spikes"), (of_another_torch, "more than plain tensors .* numpy"),
    (renamed, "it holds step 3"),
])
def test_a_newest_checkpoint_that_is_whole_is_never_passed_over(tmp_path, monkeypatch, capsys, make, message):
    """The run would go on from the one before and write over it."""
    for step in (1, 2):
        checkpoint.save(tmp_path, state_at(step), keep=9)
    make(checkpoint.path_of(tmp_path, 2), monkeypatch)
    for mode in ("auto", "resume", str(checkpoint.path_of(tmp_path, 2))):
        if mode in ("auto", "resume") or make is not disk_not_there:
            with pytest.raises(InputError, match=f"ckpt_00000002.pt .*{message}") as caught:
                choose(tmp_path, mode)
            assert "damaged" not in str(caught.value)
    assert capsys.readouterr().err == ""


# --- what init_from asks for -------------------------------------------------------------------------------------------------


def choose(folder: Path, init_from: str, *more: str):
    return checkpoint.choose(load([f"--out_dir={folder}", f"--init_from={init_from}", *more]))


def test_choose(tmp_path):
    run, new = tmp_path / "run", tmp_path / "new"
    run.mkdir()
    assert choose(new, "scratch") is None and choose(new, "auto") is None and choose(run, "auto") is None
    for folder in (run, new):
        with pytest.raises(InputError, match="init_from=resume, but out_dir=.* holds no checkpoint"):
            choose(folder, "resume")
    path = checkpoint.save(run, state_at(5), keep=1)
    assert choose(run, "resume") == choose(run, "auto") == choose(run, str(path)) == choose(new, str(path)) == path
    with pytest.raises(InputError, match="holds a run already .ckpt_00000005.pt.*--init_from=auto"):
        choose(run, "scratch")
    assert choose(run, "scratch", "--eval_only=1") is None
    for wrong in ("rseume", "gpt2", str(run), str(run / "ckpt_00000006.pt")):
        with pytest.raises(InputError, match="scratch, resume, auto or a checkpoint file"):
            choose(run, wrong)


def test_metrics_alone_are_a_run_too(tmp_path):
    """Killed before its first checkpoint: auto starts over, scratch does not write over what was measured."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert choose(tmp_path, "auto") is None
    with pytest.raises(InputError, match="holds a run already .metrics.jsonl"):
        choose(tmp_path, "scratch")
    (tmp_path / "metrics.jsonl").write_text("")
    assert choose(tmp_path, "scratch") is None


def test_named_checkpoint_does_not_go_on_inside_another_run(tmp_path):
    """It would mix its metrics with the other's and cut the other's off."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    path = checkpoint.save(a, state_at(200), keep=9)
    (b / "metrics.jsonl").write_text('{"step": 250}\n')
    with pytest.raises(InputError, match="holds another run .metrics.jsonl"):
        choose(b, str(path))
    checkpoint.save(b, state_at(100), keep=9)
    with pytest.raises(InputError, match="holds another run .ckpt_00000100.pt"):
        choose(b, str(path))
    assert choose(b, str(path), "--eval_only=1") == path
    checkpoint.save(a, state_at(300), keep=9)
    with pytest.raises(InputError, match=r"a later checkpoint \(ckpt_00000300.pt\) than the step 200"):
        choose(a, str(path))
    assert choose(tmp_path / "a" / ".." / "a", str(a / "ckpt_00000300.pt")) == a / "ckpt_00000300.pt"


def test_damaged_checkpoints_are_never_a_start_from_scratch(tmp_path, capsys):
    first, second = (checkpoint.save(tmp_path, state_at(step), keep=9) for step in (1, 2))
    second.write_bytes(second.read_bytes()[:-1])
    assert choose(tmp_path, "auto") == first
    said = capsys.readouterr().err
    assert "ckpt_00000002.pt is damaged" in said and "when the run comes to its step a whole one replaces it" in said
    assert choose(tmp_path, "auto", "--eval_only=1") == first and "replaces" not in capsys.readouterr().err
    first.write_bytes(b"")
    for mode in ("auto", "resume"):
        with pytest.raises(InputError, match="all 2 checkpoints"):
            choose(tmp_path, mode)


@pytest.mark.parametrize("argument, message", [
    ("--n_layer=3", "n_layer=12, the settings say n_layer=3"), ("--attention=xsa", "attention='sa'"), ("--bias=1", "bias"),
    ("--n_kv_head=4", "n_kv_head=12"), ("--block_size=1024", "block_size"), ("--global_batch_size=8", "global_batch_size=256"),
])
def test_check_refuses_another_model_and_other_batches(tmp_path, argument, message):
    state = state_at(1)
    checkpoint.check(tmp_path / "c", state, load(["--learning_rate=1", "--max_iters=5", "--micro_batch_size=1"]), "f" * 64)
    with pytest.raises(InputError, match=message):
        checkpoint.check(tmp_path / "c", state, load([argument]), "f" * 64)


@pytest.mark.parametrize("had", [["--qk_clip=100", "--dropout=0.1"], []])
def test_the_recipe_may_change_also_where_the_model_s_settings_hold_it(tmp_path, had):
    state = state_at(1) | {"config": as_dict(load(had))}
    for argument in ("--qk_clip=0", "--qk_clip=30", "--dropout=0", "--dropout=0.2"):
        checkpoint.check(tmp_path / "c", state, load([argument]), "f" * 64)
    with pytest.raises(InputError, match="qk_norm=False, the settings say qk_norm=True"):
        checkpoint.check(tmp_path / "c", state, load([*had, "--qk_norm=1"]), "f" * 64)


def test_a_switch_that_came_later_has_what_the_model_had(tmp_path):
    """As for a variant that somebody adds: plain, or what the preset says."""
    state = state_at(1)
    del state["config"]["gate"], state["config"]["exclusive"]
    checkpoint.check(tmp_path / "c", state, load([]), "f" * 64)
    for argument, message in (("--gate=head", "gate='off'"), ("--exclusive=on", "exclusive='off'")):
        with pytest.raises(InputError, match=message):
            checkpoint.check(tmp_path / "c", state, load([argument]), "f" * 64)


def test_check_refuses_other_data_unless_it_only_evaluates(tmp_path):
    with pytest.raises(InputError, match="other data .fingerprint ffffffffffff.*fingerprint 000000000000"):
        checkpoint.check(tmp_path / "c", state_at(1), load([]), "0" * 64)
    checkpoint.check(tmp_path / "c", state_at(1), load(["--eval_only=1", "--global_batch_size=8"]), "0" * 64)


# --- writing while training goes on --------------------------------------------------------------------------------------------


def test_writer_saves_the_state_of_the_moment(tmp_path):
    """Everything in it changes while the writer still waits."""
    writer, go = checkpoint.Writer(), threading.Event()
    state = state_at(3)
    writer.start(state, lambda copy: go.wait(20) and checkpoint.save(tmp_path, copy, keep=2))
    assert writer.busy
    state["model"]["wte.weight"].zero_()
    state["optimizer"]["state"][0]["exp_avg"].add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 7.0
    state["optimizer"]["param_groups"].append({})
    state["rng"].zero_()
    state["step"] = 4
    writer.check()  # does not wait
    assert names(tmp_path) == []
    go.set()
    writer.wait()
    assert not writer.busy
    saved, expected = checkpoint.load(checkpoint.path_of(tmp_path, 3)), state_at(3)
    assert saved["rng"].any() and same(saved | {"rng": None}, expected | {"rng": None})


def test_writer_keeps_its_memory_and_takes_what_fits_no_more_anew():
    writer, seen = checkpoint.Writer(), []
    state = state_at(1)
    for _ in range(2):
        writer.start(state, lambda copy: seen.append(copy["model"]["wte.weight"].data_ptr()))
        writer.wait()
        state = state_at(2)
    assert seen[0] == seen[1] != state["model"]["wte.weight"].data_ptr()
    for other in (torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(2, 3).T):
        writer.start({"model": [other]}, seen.append)
        writer.wait()
        assert same(seen[-1], {"model": [other]}) and seen[-1]["model"][0].data_ptr() != other.data_ptr()


def test_where_memory_cannot_be_pinned_it_is_not(monkeypatch):
    empty = torch.empty

    def refusing(*shape, pin_memory=False, **more):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", refusing)
    like = torch.ones(2, 3, dtype=torch.float64)
    found = checkpoint._host_memory(like, pinned=True)
    assert found.shape == like.shape and found.dtype == like.dtype and not found.is_pinned()


def test_one_write_at_a_time_and_each_error_once():
    writer, go, order = checkpoint.Writer(), threading.Event(), []

    def failing(state):
        go.wait(20)
        order.append(state["step"])
        raise OSError(28, "No space left on device")

    writer.start({"step": 1}, failing)
    threading.Timer(0.2, go.set).start()
    with pytest.raises(OSError, match="No space left"):
        writer.start({"step": 2}, lambda state: order.append(state["step"]))  # waits, and is told of the one before
    assert order == [1]
    writer.wait()
    writer.start({"step": 3}, failing)
    writer._thread.join()
    with pytest.raises(OSError, match="No space left"):
        writer.check()
    writer.check()
    writer.start({"step": 4}, lambda state: order.append(state["step"]))
    writer.wait()
    assert order == [1, 3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_writer_gives_way_and_nothing_else_does():
    writer, found = checkpoint.Writer(), []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    writer.start({}, lambda state: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    writer.wait()
    assert found == [max(10, before)] and os.getpriority(os.PRIO_PROCESS, 0) == before


class Naps(threading.Event):
    """Notes for how long it would have waited."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return self.is_set()


def test_an_unhurried_file_rests_in_proportion_and_writes_the_same_bytes(tmp_path):
    state = {"a": torch.arange(700_000, dtype=torch.float32), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "plain")
    naps, begin = Naps(), time.thread_time()
    with open(tmp_path / "unhurried", "wb") as file:
        torch.save(state, checkpoint.Unhurried(file, naps))
    spent = time.thread_time() - begin
    loaded = torch.load(tmp_path / "unhurried", weights_only=True)
    assert all(torch.equal(loaded[key], state[key]) and loaded[key].dtype == state[key].dtype for key in state)
    assert (tmp_path / "unhurried").stat().st_size == pytest.approx((tmp_path / "plain").stat().st_size, abs=2000)
    assert len(naps.seconds) > 2 and 0 < sum(naps.seconds) <= 12 * spent


def test_who_waits_for_the_writer_ends_its_rests(monkeypatch):
    writer, begun, seen = checkpoint.Writer(), threading.Event(), []

    def write(state: dict) -> None:
        seen.append(writer.hurry.is_set())
        begun.set()
        seen.append(writer.hurry.wait(30))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    writer.start({}, write)
    assert begun.wait(30)
    writer.wait()
    assert seen == [False, True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    writer.start({}, write)  # beside a GPU there are cores enough
    writer.wait()
    assert seen[2:] == [True, True]
