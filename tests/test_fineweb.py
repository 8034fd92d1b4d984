"""data/fineweb.py: the same bytes whatever the workers, the ranks and the interruptions; what goes wrong is said."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import fineweb, parts, shards
from data.documents import Result, document_hash
from data.parts import Part
from data.shards import META, UNFINISHED, open_dataset, read_meta
from tests.fake_hub import FakeHub, readme
from tests.test_documents import ODD, damage, words, write_jsonl, write_parquet

ROOT = Path(__file__).parents[1]
FRACTION = 0.05
ARGUMENTS = ["--tokenizer=byte", f"--val_fraction={FRACTION}", "--shard_tokens=5000"]
# Saves after every batch, and makes small ones, so that a run of a second has hundreds of moments to be interrupted at.
BUSY = ("import sys, data.fineweb as f, data.parts as p, data.documents as d; p._SAVE_INTERVAL_S = 0; d.BATCH_BYTES = 300; "
        "d._ROWS_PER_READ = 10; sys.exit(f.main(sys.argv[1:]))")
SLOW = BUSY.replace("sys", "sys, time", 1).replace(
    "sys.exit", "save = p.Part.save; p.Part.save = lambda *a: (save(*a), time.sleep(.004)); sys.exit")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, Path, list[list[str]]]:
    """A folder of parquet files, one of jsonl files with the same documents, and these, file by file."""
    files = [words(400, seed=1) + ODD, words(250, seed=2), [], words(700, seed=3), words(1, seed=4)]
    parquet, jsonl = tmp_path_factory.mktemp("parquet"), tmp_path_factory.mktemp("jsonl")
    for i, texts in enumerate(files):
        write_parquet(parquet / f"{i:03d}.parquet", texts, row_group=37 * (i + 1))
        write_jsonl(jsonl / f"{i:03d}.jsonl", texts)
    return parquet, jsonl, files


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory) -> Path:
    """One worker's uninterrupted run over the parquet files."""
    out = tmp_path_factory.mktemp("straight") / "set"
    assert fineweb.main([f"--out={out}", "--input", str(corpus[0]), "--workers=1", *ARGUMENTS]) == 0
    return out


def start(out: Path, source: Path, *more: str, program: str = BUSY, **popen) -> subprocess.Popen:
    command = [sys.executable, "-c", program, f"--out={out}", "--input", str(source), *ARGUMENTS, *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def content(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    meta = files.pop(META).decode()
    return files | {META: re.sub(r'"what": ".*"|"digest": ".*"|"bytes": \d+', "", meta).encode()}  # these tell the input apart


def streams(folder: Path) -> dict[str, list[int]]:
    dataset = open_dataset(folder)
    return {stream.split: stream.read(0, stream.n_tokens).tolist() for stream in (dataset.train, dataset.val)}


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


def wait_for(process: subprocess.Popen, out: Path) -> None:
    """Until progress has been saved by this process, or it is at its end."""
    files = {path: path.stat().st_ino for path in out.glob(".*progress.json")}
    while process.poll() is None and files == {path: path.stat().st_ino for path in out.glob(".*progress.json")}:
        time.sleep(0.002)


def test_streams_are_those_of_a_plain_loop(corpus, straight):
    wanted: dict[str, list[int]] = {"train": [], "val": []}
    for text in (text for texts in corpus[2] for text in texts if text):
        wanted["val" if document_hash(text) / 2**64 < FRACTION else "train"] += [256, *text.encode()]
    assert streams(straight) == wanted
    meta = read_meta(straight)
    assert all(shard["tokens"] == 5000 for shards in meta["splits"].values() for shard in shards[:-1])
    assert meta["split_by"] == "hash" and meta["counts"] == {"documents": 1359, "empty": 1, "skipped": 0, "skipped_files": 0}
    assert not [path for path in straight.iterdir() if path.name.startswith(".") or path.name == UNFINISHED]


@pytest.mark.parametrize("kind, workers", [("parquet", 2), ("jsonl", 1), ("jsonl", 3)])
def test_workers_and_the_kind_of_file_do_not_matter(corpus, straight, tmp_path, kind, workers):
    source = corpus[0 if kind == "parquet" else 1]
    assert finish(start(tmp_path / "set", source, f"--workers={workers}"))[0] == 0
    assert content(tmp_path / "set") == content(straight)


def test_gpt2_ids_are_those_of_tiktoken(corpus, tmp_path, gpt2_vocabulary):
    import tiktoken

    out = tmp_path / "set"
    arguments = ["--input", str(corpus[0]), "--workers=2", f"--val_fraction={FRACTION}"]
    assert fineweb.main([f"--out={out}", *arguments]) == 0
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    wanted: dict[str, list[int]] = {"train": [], "val": []}
    for text in (text for texts in corpus[2] for text in texts if text):
        wanted["val" if document_hash(text) / 2**64 < FRACTION else "train"] += [50256, *encode(text)]
    assert streams(out) == wanted


def test_killed_again_and_again(corpus, straight, tmp_path):
    draw, kills, went_on, out = random.Random(5), 0, 0, tmp_path / "set"
    killed = True
    while killed:
        process = start(out, corpus[0], "--workers=2", program=SLOW)
        if kills % 3:  # else it is killed while it starts
            wait_for(process, out)
            time.sleep(draw.uniform(0.0, 0.3))  # its saves alone take over a second, so that three such kills find it at work
        else:
            time.sleep(draw.uniform(0.0, 0.9))
        killed = process.poll() is None
        process.kill()
        kills += killed
        code, text, err = finish(process)  # returns once the pipes are closed: no worker outlives its parent
        went_on += "going on: " in text
    assert code == 0, err
    assert kills >= 3 and went_on >= 1
    assert content(out) == content(straight)


def test_a_kill_between_the_last_shard_and_meta_json(corpus, straight, tmp_path):
    out = tmp_path / "set"
    program = BUSY.replace("sys.exit", "f.merge = lambda *_: f.os.kill(f.os.getpid(), 9); sys.exit")
    assert finish(start(out, corpus[0], program=program))[0] == -signal.SIGKILL
    assert not (out / META).exists()
    assert finish(start(out, corpus[0]))[0] == 0
    assert content(out) == content(straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_on_request_and_goes_on(corpus, straight, tmp_path, number):
    out = tmp_path / "set"
    process = start(out, corpus[0], "--workers=2", start_new_session=True)
    wait_for(process, out)
    os.killpg(process.pid, number)  # as a terminal and Slurm do: the workers get it too
    code, text, err = finish(process)
    assert code == 0 and f"stopped by {signal.Signals(number).name}" in text, err
    assert not (out / META).exists()
    code, text, err = finish(start(out, corpus[0]))
    assert code == 0 and "going on: " in text, err
    assert content(out) == content(straight)


def test_nothing_that_was_saved_is_tokenized_again(corpus, tmp_path):
    out = tmp_path / "set"
    process = start(out, corpus[0], "--workers=1")
    wait_for(process, out)
    process.send_signal(signal.SIGTERM)
    finish(process)
    done = Part(out, 0, 1).load()
    program = BUSY.replace("sys.exit", "g = p.Workers.tokenize; p.Workers.tokenize = lambda w, b: g(w, ("
                           "(print('batch', x[0], x[1].block.first_row), x)[1] for x in b)); sys.exit")
    code, text, _ = finish(start(out, corpus[0], program=program))
    seen = [tuple(map(int, line.split()[1:])) for line in text.splitlines() if line.startswith("batch")]
    assert code == 0 and seen[0] >= (done.file, done.position.row) and done.documents > 0


@pytest.mark.parametrize("limit", [1500, 9000])
def test_a_full_disk(corpus, straight, tmp_path, limit):
    out = tmp_path / "set"
    shutil.copytree(corpus[0], tmp_path / "in")

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code, _, err = finish(start(out, corpus[0], preexec_fn=small_files))
    assert code == 1 and last(err) == f"error: {out}: File too large; what is finished stays, and the same command goes on"
    assert "Traceback" not in err
    assert finish(start(out, corpus[0]))[0] == 0
    assert content(out) == content(straight)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_ranks_make_one_data_set_in_any_order(corpus, straight, tmp_path, order):
    out = tmp_path / "set"
    for n, rank in enumerate(order, 1):
        code, text, _ = finish(start(out, corpus[0], f"--rank={rank}", "--world=3", "--workers=1"))
        assert code == 0 and (out / META).exists() == (n == 3)
        if n < 3:
            assert f"{n} of 3 ranks are finished" in text
    assert streams(out) == streams(straight)
    code, text, _ = finish(start(out, corpus[0], "--rank=1", "--world=3"))
    assert code == 0 and "nothing to do" in text


def test_ranks_at_the_same_time_by_torchruns_environment(corpus, straight, tmp_path):
    out = tmp_path / "set"
    ranks = [start(out, corpus[0], env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
             for rank in range(2)]
    assert [finish(rank)[0] for rank in ranks] == [0, 0]
    assert streams(out) == streams(straight)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_bad_documents_are_named_then_skipped(corpus, tmp_path):
    texts = words(600)
    source = tmp_path / "in"
    source.mkdir()
    write_parquet(source / "a.parquet", [*texts[:250], None, *texts[251:]])
    write_parquet(source / "b.parquet", texts)
    damage(source / "b.parquet", 1)
    out = tmp_path / "set"
    for _ in range(2):
        code, _, err = finish(start(out, source))
        assert code == 1 and last(err) == (f"error: {source}/a.parquet: row 250: 'text' is null, wanted a string; --skip_bad "
                                           "leaves such documents out")
    code, text, err = finish(start(out, source, "--skip-bad"))
    assert code == 0, err
    assert "101 documents could not be read and were left out: fineweb_skipped.txt" in text
    lines = (out / "fineweb_skipped.txt").read_text().splitlines()
    assert lines[0] == f"{source}/a.parquet: row 250: 'text' is null, wanted a string" and len(lines) == 2
    assert lines[1].startswith(f"{source}/b.parquet: rows 100 to 199: not readable as parquet")
    assert read_meta(out)["counts"]["documents"] == 1200 - 101


def test_a_worker_that_dies(corpus, straight, tmp_path):
    out = tmp_path / "set"
    process = start(out, corpus[0], "--workers=1")
    wait_for(process, out)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1 and last(err).startswith("error: a worker process died")
    assert finish(start(out, corpus[0]))[0] == 0
    assert content(out) == content(straight)


def test_a_second_process_is_refused(corpus, tmp_path):
    out = tmp_path / "set"
    process = start(out, corpus[0])
    wait_for(process, out)
    process.send_signal(signal.SIGSTOP)
    try:
        code, _, err = finish(start(out, corpus[0]))
        assert code == 2 and "another process is at work on fineweb" in last(err)
    finally:
        process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 0


def test_a_finished_folder_is_left_alone(corpus, straight, capsys):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in straight.iterdir()}
    assert fineweb.main([f"--out={straight}", "--input", str(corpus[0]), *ARGUMENTS]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in straight.iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_other_input_or_arguments_are_refused(corpus, straight, tmp_path, capsys, finished):
    out = tmp_path / "set"
    shutil.copytree(straight, out)
    if not finished:
        meta = read_meta(out)
        (out / META).unlink()
        fineweb.begin(out, {key: meta[key] for key in ("source", "arguments")})
    for more, said in (([str(corpus[1])], "made from other input"), ([str(corpus[0]), "--shard_tokens=6000"], "other arguments")):
        assert fineweb.main([f"--out={out}", "--input", more[0], *ARGUMENTS, *more[1:]]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("more, said", [
    (["--workers=0"], "--workers: wanted at least 1"),
    (["--val_fraction=0"], "--val_fraction: wanted a number between 0 and 1"),
    (["--val_fraction=0.0005"], "wanted at least 10, as by --val_fraction=0.0077, or python -m data.local"),
    (["--shard_tokens=0"], "--shard_tokens"),
    (["--rank=1"], "both or neither"),
    (["--rank=2", "--world=2"], "--rank: wanted 0 to 1"),
    (["--text_field=body"], "no column 'body'"),
    (["--subset=sample-10BT"], "wanted one of them"),
    (["--rank=0", "--world=0"], "--world: wanted at least 1"),
    (["--pretokenized"], "not with --pretokenized"),
    (["--shards=1"], "only with --pretokenized"),
    (["--tokenizer=gpt4"], "invalid choice"),
    (["--skip-worse"], "--skip-worse"),
])
def test_bad_arguments(corpus, tmp_path, capsys, more, said):
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(corpus[0]), *ARGUMENTS, *more]) == 2
    err = capsys.readouterr().err
    assert said in err and last(err).startswith("error: ")
    assert not (tmp_path / "set").exists()


def test_a_folder_with_other_files_and_a_file_are_refused(corpus, tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    for out, said in ((tmp_path, "holds other files"), (tmp_path / "notes.txt", "is a file")):
        assert fineweb.main([f"--out={out}", "--input", str(corpus[0]), *ARGUMENTS]) == 2
        assert said in capsys.readouterr().err


def test_ids_that_uint16_would_wrap_are_refused(corpus, tmp_path, monkeypatch, capsys):
    def wide(self, batches):
        for number, batch in batches:
            yield number, batch, Result({"train": np.array([70_000]), "val": np.array([0])})

    monkeypatch.setattr(parts.Workers, "tokenize", wide)
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(corpus[0]), *ARGUMENTS]) == 2
    assert "wanted ids 0 to 65535, found 70000" in capsys.readouterr().err


@pytest.fixture
def hub(corpus):
    """FineWeb's repository with the corpus as sample-10BT."""
    files = {f"sample/10BT/{path.name}": path.read_bytes() for path in sorted(corpus[0].iterdir())}
    with FakeHub({"HuggingFaceFW/fineweb": files | {"README.md": readme({"sample-10BT": "sample/10BT/*"})}}) as hub:
        yield hub


def from_hub(hub: FakeHub, out: Path, *more: str, program: str = BUSY) -> subprocess.Popen:
    # As a file, not with -c: the question to the hub runs in a process of its own, which imports the script again.
    script = out.parent / f"script{len(list(out.parent.iterdir()))}.py"
    imports, _, statements = program.partition("; ")
    script.write_text(f"{imports}, data.hub as h\nif __name__ == '__main__':\n    {statements}\n")
    command = [sys.executable, script, f"--out={out}", "--subset=sample-10BT", *ARGUMENTS, *more]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | hub.environment() | {"PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_hub_gives_the_same_bytes_whatever_it_loses(corpus, straight, tmp_path, hub):
    hub.fault("GET /cdn/", drop_after=5000, times=2)
    hub.fault("GET /cdn/", status=503, times=2)
    out = tmp_path / "set"
    program = BUSY.replace("sys.exit", "d._RETRY_WAITS_S = (.1, .1, .1, .1); h._BLOCK_BYTES = 3000; sys.exit")
    code, _, err = finish(from_hub(hub, out, "--workers=2", program=program))
    assert code == 0 and "next attempt in" in err, err
    assert content(out) == content(straight)
    meta = read_meta(out)
    assert meta["source"]["what"] == "sample-10BT" and meta["source"]["files"] == 5
    code, text, err = finish(from_hub(hub, out))  # finished: not even asked
    assert code == 0 and "nothing to do" in text, err


def test_a_run_that_goes_on_reads_the_revision_that_it_began_with(straight, tmp_path, hub):
    out = tmp_path / "set"
    process = from_hub(hub, out, program=SLOW)
    wait_for(process, out)
    process.kill()
    finish(process)
    hub.commit("HuggingFaceFW/fineweb", {"README.md": readme({"sample-10BT": "other/*"}), "other/0.parquet": b"new"})
    code, text, err = finish(from_hub(hub, out))
    assert code == 0 and "going on: " in text, err
    assert content(out) == content(straight)


def test_ranks_that_begin_together_read_one_revision(straight, tmp_path, hub):
    ranks = [from_hub(hub, tmp_path / "set", f"--rank={rank}", "--world=3", "--workers=1") for rank in range(3)]
    results = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert streams(tmp_path / "set") == streams(straight)


def test_a_network_that_stays_away_loses_nothing(straight, tmp_path, hub):
    out = tmp_path / "set"
    program = SLOW.replace("sys.exit", "d._RETRY_WAITS_S = (.1, .2); sys.exit")
    process = from_hub(hub, out, program=program)
    wait_for(process, out)
    hub.fault("GET /cdn/", status=503, times=10**6)
    code, _, err = finish(process)
    assert code == 1 and re.search(r"error: hf://.*/sample/10BT/00\d\.parquet: .*503.*after 2 more attempts", last(err)), err
    hub.heal()
    code, text, _ = finish(from_hub(hub, out))
    assert code == 0 and "going on: " in text
    assert content(out) == content(straight)


def test_an_unknown_subset_and_no_network(tmp_path, hub, monkeypatch):
    code, _, err = finish(from_hub(hub, tmp_path / "set", "--subset=sample-11BT"))
    assert code == 2 and "sample-10BT" in last(err)
    monkeypatch.setattr(hub, "environment", lambda: {"HF_HUB_OFFLINE": "1"})
    code, _, err = finish(from_hub(hub, tmp_path / "set"))
    assert code == 2 and "--input" in last(err)
    assert not (tmp_path / "set").exists()


def command(hub: FakeHub, out: Path, *more: str) -> subprocess.Popen:
    """The command as a person starts it."""
    return subprocess.Popen([sys.executable, "-m", "data.fineweb", f"--out={out}", *more], cwd=ROOT, text=True,
                            env=os.environ | hub.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("match, more", [("/api/", ["--subset=sample-10BT"]), ("GET /cdn/", ["--subset=sample-10BT"]),
                                         ("/api/", ["--pretokenized"])])
def test_a_hub_that_does_not_answer_does_not_hold_up_a_stop(tmp_path, hub, match, more):
    hub.fault(match, wait=20, times=100)
    process = command(hub, tmp_path / "set", *more, *([] if "--pretokenized" in more else ARGUMENTS))
    while not any(match.removeprefix("GET ") in request for request in hub.requests):
        time.sleep(0.01)
    asked = time.monotonic()
    process.terminate()
    code, text, err = finish(process)
    assert code == 0 and "stopped by SIGTERM" in text, err
    assert time.monotonic() - asked < 10


@pytest.mark.parametrize("fault, said", [({"status": 403}, "private or gated (HTTP status 403)"),
                                         ({"status": 200, "body": b"<html>"}, "the network answered wrongly (wanted bytes ")])
def test_what_the_network_does_is_no_damage(straight, tmp_path, hub, fault, said):
    """A token that expires, a proxy's page: nothing may be left out for it, --skip-bad or not."""
    out = tmp_path / "set"
    process = from_hub(hub, out, "--skip-bad", program=SLOW.replace("sys.exit", "d._RETRY_WAITS_S = (.1, .1); sys.exit"))
    wait_for(process, out)
    hub.fault("GET /cdn/", times=10**6, **fault)
    code, _, err = finish(process)
    assert code == 1 and said in last(err), err
    hub.heal()
    assert finish(from_hub(hub, out, "--skip-bad"))[0] == 0
    assert content(out) == content(straight)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), FileNotFoundError(2, "No such file or directory")])
def test_a_disk_that_fails_is_no_damage(corpus, tmp_path, monkeypatch, capsys, error):
    import pyarrow.parquet as pq

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    arguments = [f"--out={tmp_path / 'set'}", "--input", str(corpus[0]), "--skip-bad", *ARGUMENTS]
    assert fineweb.main(arguments) == 1
    assert f"000.parquet: row 0: cannot be read: {error}" in last(capsys.readouterr().err)


def test_files_that_are_no_parquet_are_left_out_as_a_whole(tmp_path, capsys):
    source, out = tmp_path / "in", tmp_path / "set"
    source.mkdir()
    for name in ("a", "b", "c"):
        write_parquet(source / f"{name}.parquet", words(300, seed=ord(name)))
    os.truncate(source / "b.parquet", 1000)
    (source / "notes.txt.gz").write_bytes(b"other")
    assert fineweb.main([f"--out={out}", "--input", str(source), *ARGUMENTS]) == 2
    assert "b.parquet: not readable as parquet" in capsys.readouterr().err
    for _ in range(2):
        assert fineweb.main([f"--out={out}", "--input", str(source), "--skip-bad", *ARGUMENTS]) == 0
        text = capsys.readouterr().out
        assert "0 documents and 1 files could not be read and were left out: fineweb_skipped.txt" in text
    assert re.fullmatch(rf"{source}/b\.parquet: not readable as parquet \(.*\)\n", (out / "fineweb_skipped.txt").read_text())
    assert read_meta(out)["counts"]["documents"] == 600


def test_every_moment_of_the_end_can_be_killed(corpus, straight, tmp_path):
    """At each call that changes the folder, once the shards are there."""
    merging = BUSY.replace("sys.exit", "f.merge = lambda *_: f.os.kill(f.os.getpid(), 9); sys.exit")
    assert finish(start(tmp_path / "shards", corpus[0], program=merging))[0] == -signal.SIGKILL
    program = BUSY.replace("sys.exit", """
import os
left = [int(sys.argv.pop())]
def killing(name):
    real = getattr(os, name)
    def call(*a, **k):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return real(*a, **k)
    setattr(os, name, call)
for name in ("replace", "unlink", "fsync"):
    killing(name)
sys.exit""")
    for number in range(100):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "shards", out)
        code, _, err = finish(start(out, corpus[0], str(number), program=program))
        if code == 0:
            break
        assert code == -signal.SIGKILL, err
        assert fineweb.main([f"--out={out}", "--input", str(corpus[0]), *ARGUMENTS]) == 0
        assert content(out) == content(straight), number
    assert number > 6


def test_a_finished_folder_with_a_shard_gone_is_not_called_done(corpus, straight, tmp_path, capsys):
    out = tmp_path / "set"
    shutil.copytree(straight, out)
    (out / "fineweb_train_000003.bin").unlink()
    assert fineweb.main([f"--out={out}", "--input", str(corpus[0]), *ARGUMENTS]) == 2
    assert "fineweb_train_000003.bin: missing" in capsys.readouterr().err


def test_lone_surrogates_do_not_part_equal_documents(tmp_path):
    """Different lone surrogates become the same tokens: so they are one document, on one side."""
    texts = [f"document {i} \\u{code}" for i in range(60) for code in ("d800", "dc00")]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    arguments = ["--input", str(tmp_path / "a.jsonl"), *ARGUMENTS, "--val_fraction=0.3"]
    assert fineweb.main([f"--out={tmp_path / 'set'}", *arguments]) == 0
    assert shards.main(["verify", str(tmp_path / "set")]) == 0


@pytest.mark.parametrize("name, value", [("RANK", "abc"), ("WORLD_SIZE", "-1"), ("LOCAL_WORLD_SIZE", "2.5")])
def test_numbers_in_the_environment_are_checked(corpus, tmp_path, monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(corpus[0]), *ARGUMENTS]) == 2
    assert f"{name} in the environment: wanted a whole number, found {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1-", "0", "5-3", "1-99999999999", "x", "1031"])
def test_shard_numbers(tmp_path, capsys, text):
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--pretokenized", f"--shards={text}"]) == 2
    assert f"found {text!r}" in capsys.readouterr().err
    assert fineweb._shard_numbers("3-5, 9") == [3, 4, 5, 9] and len(fineweb._shard_numbers(None)) == 1030


def test_names_of_every_kind(tmp_path, capsys):
    source = tmp_path / "in put"
    source.mkdir()
    for name in (b"a\nb.parquet", b"\xff.parquet", b"\x1b[31m.parquet", "漢.parquet".encode()):
        write_parquet(tmp_path / "x.parquet", [*words(200, seed=len(name)), None])
        os.rename(tmp_path / "x.parquet", os.fsencode(source) + b"/" + name)
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(source), *ARGUMENTS]) == 1
    assert len(last(capsys.readouterr().err).splitlines()) == 1
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(source), *ARGUMENTS, "--skip-bad"]) == 0
    lines = (tmp_path / "set" / "fineweb_skipped.txt").read_text().splitlines()
    assert len(lines) == 4 and all(line.isprintable() for line in lines)


def test_what_input_holds_breaks_no_message_and_no_list(tmp_path, capsys):
    """Keys of every kind, of which there may be very many."""
    bad = [{"a\nb": 1}, {"\x1b[2J": 1}, {"\ud800": 1}, {"\u2028\r": 1}, {f"key{i}": i for i in range(20_000)}]
    texts = [json.dumps({"text": text}) for text in words(300)]
    source, arguments = tmp_path / "a.jsonl", [f"--out={tmp_path / 'set'}", *ARGUMENTS, "--val_fraction=0.1"]
    for i, record in enumerate(bad):
        source.write_text("\n".join([*texts, json.dumps(record)]))
        assert fineweb.main([f"--out={tmp_path / str(i)}", "--input", str(source), *arguments[1:]]) == 1
        (line,) = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error: ")]
        assert line.isprintable() and "(--text_field)" in line and len(line) < 600
    source.write_text("\n".join([*texts, *map(json.dumps, bad)]))
    assert fineweb.main(["--input", str(source), "--skip-bad", *arguments]) == 0
    lines = (tmp_path / "set" / "fineweb_skipped.txt").read_text().split("\n")
    assert len(lines) == len(bad) + 1 and all(line.isprintable() and len(line) < 600 for line in lines)
    assert lines[0] == rf"{source}: row 300: no field 'text'; it has a\nb (--text_field)"


def test_column_names_break_no_message(tmp_path, capsys):
    pq.write_table(pa.table({"\x1b[31mred\n": ["x"], **{f"column{i}": ["x"] for i in range(2000)}}), tmp_path / "a.parquet")
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(tmp_path / "a.parquet"), *ARGUMENTS]) == 2
    err = capsys.readouterr().err.rstrip("\n").rpartition("\r")[2]  # a progress bar was there
    assert err.startswith("error: ") and err.isprintable() and r"it has \x1b[31mred\n, column0" in err and len(err) < 600


def test_few_long_documents_first_are_counted_and_taken(tmp_path):
    """The first MiB speaks of nine documents."""
    texts = [f"{i} " + "x" * (300_000 if i < 7 else 1) for i in range(37)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = [f"--out={tmp_path / 'set'}", "--input", str(tmp_path / "a.jsonl"), *ARGUMENTS, "--val_fraction=0.4"]
    assert fineweb.main(arguments) == 0
    assert read_meta(tmp_path / "set")["counts"]["documents"] == 37


@pytest.mark.parametrize("n", [9, 21, 138, 1380, 2000])
def test_what_a_refusal_for_few_documents_proposes_is_accepted(tmp_path, capsys, n):
    write_jsonl(tmp_path / "a.jsonl", words(n))
    arguments = [f"--out={tmp_path / 'set'}", "--input", str(tmp_path / "a.jsonl"), *ARGUMENTS, "--val_fraction=0.0005"]
    assert fineweb.main(arguments) == 2
    err = last(capsys.readouterr().err)
    assert f"0.0005 of {n:,} documents" in err and "python -m data.local" in err
    proposed = re.search(r"--val_fraction=([\d.]+)", err)
    assert (proposed is None) == (n <= 20)
    if proposed:
        fineweb._find_sources([str(tmp_path / "a.jsonl")], "text", float(proposed[1]), False)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_equal_documents_have_no_other_side(tmp_path, capsys, missing):
    text = next(text for text in words(100) if (document_hash(text) / 2**64 < 0.2) == (missing == "train"))
    write_jsonl(tmp_path / "a.jsonl", [text] * 100)
    arguments = [f"--out={tmp_path / 'set'}", "--input", str(tmp_path / "a.jsonl"), *ARGUMENTS, "--val_fraction=0.2"]
    assert fineweb.main(arguments) == 1
    err = last(capsys.readouterr().err)
    assert f"no document for {missing}" in err and f"remove {tmp_path / 'set'}" in err and "python -m data.local" in err


@pytest.mark.parametrize("environment, said", [
    ({"RANK": "1"}, "found RANK='1' alone"), ({"WORLD_SIZE": "2"}, "found WORLD_SIZE='2' alone"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK in the environment: wanted a number below WORLD_SIZE, found RANK='2' and"),
])
def test_half_of_torchruns_environment(corpus, tmp_path, monkeypatch, capsys, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert fineweb.main([f"--out={tmp_path / 'set'}", "--input", str(corpus[0]), *ARGUMENTS]) == 2
    err = last(capsys.readouterr().err)
    assert said in err and "--rank" not in err


@pytest.mark.parametrize("error, said", [
    (OSError("hf://datasets/a/b@c/x.bin: given up"), "error: hf://datasets/a/b@c/x.bin: given up; what"),
    (OSError(28, "No space left on device"), "error: OUT: No space left on device; what"),
    (OSError(28, "No space left on device", "OUT/x\ny"), r"error: OUT/x\ny: No space left on device; what"),
])
def test_a_failure_names_its_place_once(tmp_path, monkeypatch, capsys, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(fineweb, "download_pretokenized", fail)
    assert fineweb.main(["--out=OUT", "--pretokenized"]) == 1
    assert last(capsys.readouterr().err).startswith(said)
