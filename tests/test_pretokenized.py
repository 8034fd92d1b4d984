"""data/pretokenized.py against a small hub on this computer: complete, interrupted, extended, damaged, refused."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import InputError
from data import hub as data_hub
from data import pretokenized
from data.parts import Part
from data.pretokenized import REPOSITORY, download_pretokenized
from data.shards import HEADER_BYTES, META, UNFINISHED, begin, open_dataset, write_meta
from data.verify import verify
from tests.fake_hub import FakeHub

ROOT = Path(__file__).resolve().parent.parent
VAL = "fineweb_val_000000.bin"
N_TOKENS = 5000


def shard(seed: int, n_tokens: int = N_TOKENS) -> bytes:
    """A shard written without this repository's code."""
    tokens = np.random.default_rng(seed).integers(0, 50256, n_tokens, dtype=np.uint16)
    tokens[::100] = 50256
    return np.array([20240520, 1, n_tokens] + [0] * 253, dtype="<i4").tobytes() + tokens.astype("<u2").tobytes()


def train(number: int) -> str:
    return f"fineweb_train_{number:06d}.bin"


FILES = {VAL: shard(0), "README.md": b"# shards\n"} | {train(n): shard(n, N_TOKENS - n) for n in (1, 2, 3, 4)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({REPOSITORY: FILES}) as hub:
        hub.use(monkeypatch)
        monkeypatch.setattr(data_hub, "_BLOCK_BYTES", 1000)
        monkeypatch.setattr(data_hub, "READ_BYTES", 500)
        monkeypatch.setattr(pretokenized, "READ_BYTES", 500)
        monkeypatch.setattr(pretokenized, "_WAITS", (0, 0, 0))
        monkeypatch.setattr(pretokenized, "ask", lambda *arguments: arguments[4](*arguments[5:]))  # in this process: faster
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != META}


def fetched(hub: FakeHub) -> list[str]:
    return [line for line in hub.requests if "/cdn/" in line]


def test_folder(hub: FakeHub, tmp_path: Path) -> None:
    out = tmp_path / "new" / "fineweb"
    download_pretokenized(out, [2, 1, 2])
    assert contents(out) == {name: FILES[name] for name in (VAL, train(1), train(2))}
    meta = json.loads((out / META).read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("gpt2", 50257, 50256)
    assert (meta["source"]["repo"], meta["source"]["commit"]) == (REPOSITORY, hub.find(REPOSITORY, "main")[0])
    assert meta["splits"]["train"] == [
        {"file": train(n), "tokens": N_TOKENS - n, "documents": 50, "sha256": hashlib.sha256(FILES[train(n)]).hexdigest()}
        for n in (1, 2)
    ]
    assert [entry["file"] for entry in meta["splits"]["val"]] == [VAL]
    assert verify(out)[0] == []
    assert open_dataset(out).train.n_tokens == 2 * N_TOKENS - 3


def test_again_and_further(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    download_pretokenized(tmp_path, [1, 2])
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    folder_time = tmp_path.stat().st_mtime_ns
    hub.requests.clear()
    for numbers in ([1, 2], [2]):
        download_pretokenized(tmp_path, numbers)
        out = capsys.readouterr().out
        assert "nothing to do" in out and f"python -m data.shards verify {tmp_path} " in out and "delete a file" in out
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert tmp_path.stat().st_mtime_ns == folder_time and hub.requests == []

    hub.commit(REPOSITORY, FILES | {train(3): shard(99)})  # a run goes on with the commit that it began with
    download_pretokenized(tmp_path, [3])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1), train(2), train(3))}
    assert all(train(3) in line for line in fetched(hub))
    assert [shard.path.name for shard in open_dataset(tmp_path).train.shards] == [train(1), train(2), train(3)]
    assert verify(tmp_path)[0] == []


def test_copied_by_hand_then_extended(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (VAL, train(4), train(1)):
        (tmp_path / name).write_bytes(FILES[name])
    damaged = bytearray(FILES[train(1)])
    damaged[-1] ^= 1
    (tmp_path / train(1)).write_bytes(damaged)
    assert open_dataset(tmp_path).meta is None
    download_pretokenized(tmp_path, [2])
    assert f"{train(1)}: sha256: the hub says" in capsys.readouterr().err
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1), train(2), train(4))}
    assert {name for line in fetched(hub) for name in FILES if name in line} == {train(1), train(2)}
    assert verify(tmp_path)[0] == []


def test_a_listed_file_that_went_missing_comes_back(hub: FakeHub, tmp_path: Path) -> None:
    download_pretokenized(tmp_path, [1, 2])
    (tmp_path / train(1)).unlink()
    os.truncate(tmp_path / train(2), 3000)
    download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1), train(2))}


def test_goes_on_within_a_file(hub: FakeHub, tmp_path: Path) -> None:
    part = tmp_path / f".{train(1)}.part"
    begin(tmp_path, {"source": {"repo": REPOSITORY, "commit": hub.find(REPOSITORY, "main")[0]}})
    part.write_bytes(FILES[train(1)][:5500])
    (tmp_path / f".{train(4)}.part").write_bytes(b"of a run that wanted more")
    download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1))}
    starts = sorted(int(line.split("bytes=")[1].split("-")[0]) for line in fetched(hub) if train(1) in line)
    assert starts == [5000, 6000, 7000, 8000, 9000, 10000, 11000]


@pytest.mark.parametrize("left", [b"\0" * 5500, FILES[train(1)] + b"more"], ids=["zeros", "too long"])
def test_a_bad_rest_of_an_earlier_run_is_dropped(hub: FakeHub, tmp_path: Path, left: bytes) -> None:
    begin(tmp_path, {"source": {"repo": REPOSITORY, "commit": hub.find(REPOSITORY, "main")[0]}})
    (tmp_path / f".{train(1)}.part").write_bytes(left)
    download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1))}


def test_killed_at_any_moment(hub: FakeHub, tmp_path: Path) -> None:
    code = "import sys, data.hub, data.pretokenized as p\nfrom pathlib import Path\ndata.hub._BLOCK_BYTES = 500\n"
    code += f"p.download_pretokenized(Path({str(tmp_path)!r}), [1, 2, 3])"
    kills = 0
    for n_requests in (1, 2, 12, 35, 60, 10_000):
        hub.requests.clear()
        hub.fault("GET /cdn/", wait=0.02, times=n_requests)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(hub.requests) < n_requests:
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert not (tmp_path / META).exists()
            assert all(path.read_bytes() == FILES[path.name] for path in tmp_path.glob("[!.]*.bin"))
    assert kills >= 4 and process.returncode == 0
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1), train(2), train(3))}
    assert verify(tmp_path)[0] == []


@pytest.mark.parametrize("fault", [{"drop_after": 400}, {"short": 7}, {"status": 500}, {"status": 429}])
def test_transient_faults_are_retried_and_said(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: dict[str, int]
) -> None:
    hub.fault(f"{train(1)} bytes=3000-", times=3, **fault)
    download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1))}
    assert capsys.readouterr().err.count(f"{train(1)}: ") >= 1


def test_gives_up_and_goes_on_later(hub: FakeHub, tmp_path: Path) -> None:
    hub.fault(f"{train(1)} bytes=3000-", times=100, status=503)
    with pytest.raises(OSError, match=rf"{train(1)}: the hub answered with HTTP status 503; given up"):
        download_pretokenized(tmp_path, [1])
    assert (tmp_path / VAL).read_bytes() == FILES[VAL] and not (tmp_path / train(1)).exists()
    with pytest.raises(InputError, match="never finished"):
        open_dataset(tmp_path)
    hub.heal()
    hub.requests.clear()
    download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == {name: FILES[name] for name in (VAL, train(1))}
    assert not any("bytes=1000-" in line for line in fetched(hub))


def test_gone_in_the_middle(hub: FakeHub, tmp_path: Path) -> None:
    hub.fault(f"{train(1)} bytes=3000-", times=100, status=404)
    with pytest.raises(OSError, match=rf"{train(1)}.*HTTP status 404"):
        download_pretokenized(tmp_path, [1])
    assert len([line for line in fetched(hub) if "bytes=3000-" in line]) == 1


def test_a_changed_byte_is_found(hub: FakeHub, tmp_path: Path) -> None:
    hub.fault(f"{train(1)} bytes=3000-", corrupt=5, times=1)
    with pytest.raises(OSError, match=rf"{train(1)}: sha256: the hub says .* removed"):
        download_pretokenized(tmp_path, [1])
    assert not (tmp_path / train(1)).exists() and not list(tmp_path.glob(".*.part"))
    download_pretokenized(tmp_path, [1])
    assert verify(tmp_path)[0] == []


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\1" + FILES[train(1)][1:], "header: wanted magic number 20240520 and version 1, found"),
        (FILES[train(1)][:-2], "header: 4999 tokens take 11022 bytes, the file has 11020"),
        (FILES[train(1)] + b"\0", "header: 4999 tokens take 11022 bytes, the file has 11023"),
        (FILES[train(1)][:-2] + b"\xff\xff", "id 65535: GPT-2 has a vocabulary of 50257"),
        (b"short", "header: wanted magic number"),
    ],
)
def test_a_wrong_file_in_the_repository(hub: FakeHub, tmp_path: Path, content: bytes, said: str) -> None:
    hub.commit(REPOSITORY, FILES | {train(1): content})
    with pytest.raises(OSError, match=rf"{train(1)}: {said}"):
        download_pretokenized(tmp_path, [1])
    assert not (tmp_path / train(1)).exists() and not (tmp_path / META).exists()


@pytest.mark.parametrize("numbers, found", [([], "none"), ([0], "0"), ([1, 1031], "1031"), ([-1], "-1")])
def test_bad_numbers(hub: FakeHub, tmp_path: Path, numbers: list[int], found: str) -> None:
    with pytest.raises(InputError, match=f"wanted file numbers from 1 to 1030, found {found}"):
        download_pretokenized(tmp_path / "out", numbers)
    assert not (tmp_path / "out").exists() and hub.requests == []


def test_a_number_that_the_repository_lacks(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"there is no {train(7)} \(2 of 4 files are missing\)"):
        download_pretokenized(tmp_path / "out", [1, 7, 8])
    assert not (tmp_path / "out").exists() and fetched(hub) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=rf"{REPOSITORY}: offline mode.*copy its files into a folder by hand"):
        download_pretokenized(tmp_path / "out", [1])
    assert not (tmp_path / "out").exists()


def test_disk_space(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": len(FILES[VAL]) + len(FILES[train(1)]) - 1})
    monkeypatch.setattr(pretokenized.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(InputError, match="22,046 bytes are still to come, 22,045 are free"):
        download_pretokenized(tmp_path / "a" / "b", [1])
    assert not (tmp_path / "a").exists()
    (tmp_path / VAL).write_bytes(FILES[VAL])
    download_pretokenized(tmp_path, [1])


def _of_another_data_set(folder: Path) -> None:
    entries = {split: [{"file": f"fineweb_{split}_000001.bin", "tokens": 1}] for split in ("train", "val")}
    write_meta(folder, tokenizer="gpt2", vocab_size=50257, eot=50256, splits=entries, source={"what": "books"})


@pytest.mark.parametrize(
    "fill, said",
    [
        (_of_another_data_set, "holds another data set"),
        (lambda folder: begin(folder, {"source": {"what": "books"}}), "holds another data set"),
        (lambda folder: (folder / "local_train_000000.bin").write_bytes(b""), "holds local_train_000000.bin"),
        (lambda folder: (folder / "train.bin").write_bytes(b""), "holds train.bin"),
    ],
)
def test_other_data_in_the_folder(hub: FakeHub, tmp_path: Path, fill, said: str) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=said):
        download_pretokenized(tmp_path, [1])
    assert contents(tmp_path) == before and hub.requests == []


def test_two_at_once(hub: FakeHub, tmp_path: Path) -> None:
    part = Part(tmp_path, rank=0, world=1)
    held = part.lock()
    with pytest.raises(InputError, match="another process is at work on fineweb"):
        download_pretokenized(tmp_path, [1])
    assert not (tmp_path / UNFINISHED).exists() and fetched(hub) == []
    part.unlock(held)
    download_pretokenized(tmp_path, [1])
    assert (tmp_path / VAL).stat().st_size == HEADER_BYTES + 2 * N_TOKENS


def test_a_lock_whose_file_goes_while_it_is_opened_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, flock, calls = Part(tmp_path, 0, 1), Part(tmp_path, 0, 1), fcntl.flock, []
    before = first.lock()

    def late(handle: int, how: int) -> None:
        if not calls:
            first.unlock(before)
        calls.append(handle)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    held = second.lock()
    assert len(calls) == 2
    with pytest.raises(InputError, match="another process is at work"):
        first.lock()
    second.unlock(held)
