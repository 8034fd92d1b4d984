"""data/hub.py against a small hub on this computer: which files make a subset, reading in parts, faults of the network."""

import errno
import io
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command_line import InputError
from data import documents
from data import hub as data_hub
from data.documents import Batch, DocumentError, Position, Source, read_batches
from data.hub import HubError, HubFile, asked_wait, find_subset, is_refusal, is_transient, open_file, reason
from tests.fake_hub import WRONG_ANSWERS, FakeHub, readme

FINEWEB, EDU = "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu"
ROOT = Path(__file__).resolve().parent.parent


def parquet(texts: list[str], rows: int) -> bytes:
    """A file with rows in groups of `rows`, as FineWeb's: the text and a column that is not read."""
    file = io.BytesIO()
    table = pa.table({"text": texts, "url": [f"https://example.org/{i}/{'x' * 50}" for i in range(len(texts))]})
    pq.write_table(table, file, row_group_size=rows, compression="none", use_dictionary=False)
    return file.getvalue()


TEXTS = [f"document {i} " + "word " * (i % 40) for i in range(400)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:100]).encode()
BYTES = random.Random(0).randbytes(10_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    card = {
        "default": "data/*/*",
        "sample-10BT": "sample/10BT/*",
        "sample-100BT": "sample/100BT/*",
        "CC-MAIN-2024-10": "data/CC-MAIN-2024-10/*",
        "CC-MAIN-2013-20": "data/CC-MAIN-2013-20/*",
    }
    files = {"README.md": readme(card), "one.bin": BYTES, "lines.jsonl": LINES, "p.parquet": parquet(4 * TEXTS, 50)}
    for folder in ("data/CC-MAIN-2024-10", "data/CC-MAIN-2013-20", "sample/10BT", "sample/100BT"):
        files |= {f"{folder}/{n:03}_00000.parquet": parquet(TEXTS[:n], 10) for n in (2, 1)}
    edu = {"README.md": readme({"default": "data/*/*", "sample-10BT": "sample/10BT/*"})}
    edu |= {f"{folder}/train-00000.parquet": parquet(TEXTS[:3], 10) for folder in ("data/CC-MAIN-2024-10", "sample/10BT")}
    with FakeHub({FINEWEB: files, EDU: edu}) as hub:
        hub.use(monkeypatch)
        monkeypatch.setattr(data_hub, "_BLOCK_BYTES", 1000)
        yield hub


def url_of(hub: FakeHub, name: str) -> str:
    return f"hf://datasets/{FINEWEB}@{hub.find(FINEWEB, 'main')[0]}/{name}"


# ---------------------------------------------------------------------------------------------------------------------
# Which files


@pytest.mark.parametrize(
    "subset, repo, names",
    [
        ("sample-10BT", FINEWEB, ["sample/10BT/001_00000.parquet", "sample/10BT/002_00000.parquet"]),
        ("CC-MAIN-2024-10", FINEWEB, ["data/CC-MAIN-2024-10/001_00000.parquet", "data/CC-MAIN-2024-10/002_00000.parquet"]),
        ("fineweb", FINEWEB, [f"data/CC-MAIN-{d}/00{n}_00000.parquet" for d in ("2013-20", "2024-10") for n in (1, 2)]),
        ("fineweb-edu/sample-10BT", EDU, ["sample/10BT/train-00000.parquet"]),
    ],
)
def test_subset(hub: FakeHub, subset: str, repo: str, names: list[str]) -> None:
    commit, files = hub.find(repo, "main")
    assert find_subset(subset) == [HubFile(f"hf://datasets/{repo}@{commit}/{name}", name, len(files[name])) for name in names]


def test_files_stay_those_of_their_commit(hub: FakeHub) -> None:
    """And nothing of them is kept on the disk."""
    (first,) = find_subset("default", EDU)
    assert first.name == "data/CC-MAIN-2024-10/train-00000.parquet"
    before = hub.find(EDU, "main")[1]
    hub.commit(EDU, before | {first.name: b"x" * first.size})
    assert open_file(first.url, first.size).read() == before[first.name]
    cached = [path for path in Path(hub.environment()["HF_HOME"]).rglob("*") if path.is_file()]
    assert cached and not [path for path in cached if path.suffix == ".parquet" or path.stat().st_size >= first.size]


@pytest.mark.parametrize("subset, near", [("CC-MAIN-2024-11", "CC-MAIN-2024-10"), ("zzz", "CC-MAIN-2013-20")])
def test_unknown_subset(hub: FakeHub, subset: str, near: str) -> None:
    with pytest.raises(InputError, match=f"{subset}.*no such subset among its 5; the nearest: {near}"):
        find_subset(subset)


def test_unknown_prefix() -> None:
    with pytest.raises(InputError, match="--subset=c4/en: wanted a name, or one of fineweb, fineweb-edu"):
        find_subset("c4/en")


@pytest.mark.parametrize("setting", ["refused", "unresolved", "offline"])
def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    endpoint = {"refused": f"http://127.0.0.1:{port}", "unresolved": "http://hub.invalid", "offline": "http://hub.invalid"}
    monkeypatch.setenv("HF_ENDPOINT", endpoint[setting])
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if setting == "offline" else "0")
    said = "offline mode" if setting == "offline" else "no answer from the hub"
    with pytest.raises(InputError, match=rf"sample-10BT.*{said}.*--input.*--pretokenized"):
        find_subset("sample-10BT")


@pytest.mark.parametrize("match", ["/api/datasets", "/tree/"])
def test_a_hub_that_never_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    hub.fault(match, wait=60, times=100)
    monkeypatch.setattr(data_hub, "ANSWER_SECONDS", 2 if match == "/api/datasets" else 20)
    monkeypatch.setattr(data_hub, "_RESOLVE_SECONDS", 3)
    start = time.perf_counter()
    with pytest.raises(InputError, match="no answer from the hub within [23] s; without the hub: --input"):
        find_subset("sample-10BT")
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    "match, status, headers, said",
    [
        ("/api/datasets", 401, {"X-Error-Code": "RepoNotFound"}, r"private or gated \(HTTP status 401\).*hf auth login"),
        ("README.md", 403, {"X-Error-Code": "GatedRepo"}, r"gated"),
    ],
)
def test_refused(hub: FakeHub, match: str, status: int, headers: dict[str, str], said: str) -> None:
    hub.fault(match, status=status, headers=headers, times=100)
    with pytest.raises(InputError, match=rf"--subset=sample-10BT: {FINEWEB}: .*{said}.*without the hub: --input"):
        find_subset("sample-10BT")


def test_busy_hub_is_asked_again(hub: FakeHub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_hub, "ASK_WAITS", (0, 0))
    hub.fault("/api/datasets", status=503, times=1)
    hub.fault("/api/datasets", status=429, times=1, headers={"Retry-After": "1"})
    assert len(find_subset("sample-10BT")) == 2
    said = capfd.readouterr().err
    assert "HTTP status 503; again in 0 s" in said and "HTTP status 429; again in 1 s" in said
    hub.fault("/api/datasets", status=500, times=3)
    monkeypatch.setattr(data_hub, "ASK_WAITS", (0,))
    with pytest.raises(InputError, match="HTTP status 500; without the hub"):
        find_subset("sample-10BT")


def test_import_is_light() -> None:
    code = "import sys, data.hub, data.pretokenized; print({'datasets', 'huggingface_hub', 'fsspec', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("name", ["one.bin", "lines.jsonl"])  # through the redirect of large files, and without
def test_reads_the_same_bytes(hub: FakeHub, name: str) -> None:
    content = hub.find(FINEWEB, "main")[1][name]
    rng = random.Random(1)
    with open_file(url_of(hub, name), len(content)) as file:
        expected = io.BytesIO(content)
        for _ in range(30):
            whence = rng.choice((0, 1, 2))
            offset = rng.randrange(len(content) + 100) - {0: 0, 1: expected.tell(), 2: len(content)}[whence]
            length = rng.choice((0, 1, 10, 999, 1000, 1001, 5000, -1))
            assert file.seek(offset, whence) == expected.seek(offset, whence)
            assert file.read(length) == expected.read(length)
            assert file.tell() == expected.tell()
    assert file.closed


def test_in_order_each_block_comes_once_and_ahead(hub: FakeHub) -> None:
    with open_file(url_of(hub, "one.bin"), len(BYTES), ahead=3) as file:
        file.raw.read(10)
        for _ in range(100):
            if len([line for line in hub.requests if "/cdn/" in line]) == 4:
                break
            time.sleep(0.02)
        asked = {line.split("bytes=")[1] for line in hub.requests if "/cdn/" in line}
        assert asked == {"0-999", "1000-1999", "2000-2999", "3000-3999"}
        file.seek(0)
        assert file.read() == BYTES
    assert len([line for line in hub.requests if "/cdn/" in line]) == 10


def test_lines(hub: FakeHub) -> None:
    with open_file(url_of(hub, "lines.jsonl"), len(LINES)) as file:
        assert [json.loads(line)["text"] for line in file] == TEXTS[:100]


def test_parquet_from_a_row_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_hub, "_BLOCK_BYTES", 5000)
    size = len(hub.find(FINEWEB, "main")[1]["p.parquet"])
    with open_file(url_of(hub, "p.parquet"), size) as file, pq.ParquetFile(file, pre_buffer=False) as table:
        found = [v for batch in table.iter_batches(batch_size=7, columns=["text"]) for v in batch.column(0).to_pylist()]
    assert found == 4 * TEXTS
    hub.requests.clear()
    with open_file(url_of(hub, "p.parquet"), size) as file, pq.ParquetFile(file, pre_buffer=False) as table:
        assert table.read_row_group(5, columns=["text"]).column(0).to_pylist() == TEXTS[250:300]
    assert len([line for line in hub.requests if "/cdn/" in line]) < size // 5000 // 2  # not what lies before it


@pytest.mark.parametrize(
    "fault",
    [
        {"drop_after": 300},
        {"drop_after": 0},
        {"short": 1},
        {"status": 500},
        {"status": 503},
        {"status": 429},
        *WRONG_ANSWERS,
    ],
)
def test_a_lost_part_is_an_error_and_reading_goes_on(hub: FakeHub, fault: dict[str, Any]) -> None:
    hub.fault("bytes=4000-", times=1, **fault)
    with open_file(url_of(hub, "one.bin"), len(BYTES)) as file:
        found = b""
        with pytest.raises(HubError) as raised:
            while data := file.read(500):
                found += data
        assert is_transient(raised.value)
        assert found == BYTES[: len(found)] and 3000 <= len(found) <= 4000
        file.seek(len(found))
        assert found + file.read() == BYTES


def test_a_part_that_does_not_come(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_hub, "TIMEOUT", 0.3)
    hub.fault("bytes=0-", wait=2, times=1)
    with pytest.raises(HubError) as raised:
        open_file(url_of(hub, "one.bin"), len(BYTES), ahead=0).read(10)
    assert is_transient(raised.value)


def test_parquet_says_that_the_network_failed(hub: FakeHub) -> None:
    """Not that the file is corrupt."""
    size = len(hub.find(FINEWEB, "main")[1]["p.parquet"])
    hub.fault("bytes=5000-", drop_after=10, times=9)
    with open_file(url_of(hub, "p.parquet"), size) as file, pq.ParquetFile(file, pre_buffer=False) as table:
        with pytest.raises(HubError) as raised:
            list(table.iter_batches(batch_size=50, columns=["text"]))
    assert is_transient(raised.value)


@pytest.mark.parametrize("where", ["bytes=0-", "bytes=40000-", "cdn"])
@pytest.mark.parametrize("fault", [*WRONG_ANSWERS, {"status": 403}, {"status": 500}, {"drop_after": 10}, {"short": 1}])
def test_what_the_network_does_is_never_damage(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, where: str, fault: dict[str, Any]
) -> None:
    """Nothing is left out for it: asked again it is all there, and where the network stays so the reading ends."""
    monkeypatch.setattr(data_hub, "_BLOCK_BYTES", 20_000)
    monkeypatch.setattr(documents, "_RETRY_WAITS_S", (0, 0))
    source = Source("p.parquet", url_of(hub, "p.parquet"), len(hub.find(FINEWEB, "main")[1]["p.parquet"]), "")
    pauses: list[str] = []

    def read() -> list[Batch]:
        pause = lambda said, seconds: pauses.append(said)  # noqa: E731
        return list(read_batches(source, Position(), "text", skip_bad=True, pause=pause))

    hub.fault(where, times=10**6, **fault)
    with pytest.raises(DocumentError, match=re.escape(source.shown)) as raised:
        read()
    assert len(pauses) == (0 if fault == {"status": 403} else 2) and str(raised.value).count("hf://") == 1
    hub.heal()
    if pauses:
        hub.fault(where, times=1, **fault)
    batches = read()
    assert not any(batch.unreadable for batch in batches)
    assert b"".join(batch.block.data for batch in batches).decode() == "".join(4 * TEXTS)


def test_offline_mode_is_no_damage(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source = Source("p.parquet", url_of(hub, "p.parquet"), 1000, "")
    with pytest.raises(DocumentError, match="cannot be read: offline mode"):
        list(read_batches(source, Position(), "text", skip_bad=True, pause=lambda *_: None))


@pytest.mark.parametrize("name, size, said, transient", [
    ("one.bin", 9_999, "the network answered wrongly (wanted bytes 0-999/9999, found bytes 0-999/10000, HTTP status 206)", True),
    ("no", 5, "not found on the hub (HTTP status 404)", False),
])
def test_a_file_that_is_not_what_was_listed(hub: FakeHub, name: str, size: int, said: str, transient: bool) -> None:
    with pytest.raises(HubError) as raised:
        open_file(url_of(hub, name), size).read()
    assert reason(raised.value) == said and is_transient(raised.value) is transient and is_refusal(raised.value)


class _Answered(Exception):
    """As the libraries raise for an HTTP status."""

    def __init__(self, status: int, **headers: str) -> None:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = type("Response", (), {"status_code": status, "headers": headers})


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, transient",
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (_Answered(429), True),
        (_Answered(500), True),
        (_Answered(503), True),
        (_Answered(404), False),
        (_Answered(401), False),
        (_Answered(403), False),
        (_caused(OSError("wrapped"), ConnectionResetError()), True),
        (_caused(FileNotFoundError("wrapped"), _Answered(404)), False),
        (_caused(InputError("refused"), ConnectionResetError()), False),
        (type("TooManyRedirects", (OSError,), {})("a proxy sends round and round"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("not parquet"), False),
    ],
)
def test_transient(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient


def test_wait_that_the_hub_asks_for() -> None:
    assert asked_wait(_Answered(429, Retry_After="7")) == 7
    assert asked_wait(_Answered(429, RateLimit='"resolvers";r=0;t=55')) == 55
    assert asked_wait(_Answered(429, RateLimit='"resolvers";r=3;t=55')) == 0
    assert asked_wait(_caused(OSError(), _Answered(503, Retry_After="86400"))) == 300
    assert asked_wait(ConnectionResetError()) == 0
