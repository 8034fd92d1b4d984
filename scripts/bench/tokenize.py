"""What tokenizing a corpus costs: this repository's data.fineweb against a plain tiktoken loop and a pool of one-document tasks.

    python -m scripts.bench tokenize                                     # the quick start's text, about a minute
    python -m scripts.bench tokenize --input /downloads/fineweb --workers=2 --json=bench.json

The same documents go through each arm, from parquet or jsonl files to GPT-2 tokens on the disk, EOT before each document:
    loop   one process: encode_ordinary of a document, its list to a uint16 array, that to the file
    pool   a multiprocessing.Pool with a document per task (imap, chunks of 16); the parent fills a shard in memory and writes it
    ours   python -m data.fineweb, as a person runs it: workers, hash split, checksums, state that survives a kill
Flags:
    --input PATH ...   parquet or jsonl files with a column `text`; default: the quick start's text, repeated to --megabytes
    --megabytes=N      how much of the quick start's text (default 60)
    --workers=N        processes of pool and ours (default 2)
    --rounds=N         timed rounds (default 6); in each every arm runs once, in an order that changes from round to round
    --json=FILE        also write every measurement, with versions and hardware

An arm is a fresh process each time. Its start-up (Python, packages, vocabulary, worker processes) is what it takes with a
hundred short lines as the corpus, measured in the same rounds; the work is what it takes longer with the whole text. The
figure to hold is that of the work, since FineWeb is hours of work after a second of start-up; ratios with the start-up stand
beside it. Ratios are medians over rounds of the ratio within a round, so that a machine that is slow for a while is slow for
all. A first round, not timed, checks that all arms made the same documents.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from command_line import InputError
from scripts.bench import common

ROOT = Path(__file__).parents[2]
ARMS = ("loop", "pool", "ours")
PAIRS = (("ours", "loop"), ("ours", "pool"), ("pool", "loop"))
SHORT_DOCUMENTS, SHORT_CHARS = 100, 40  # the corpus that start-up is measured with
FINEWEB_COLUMNS = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")
POOL_CHUNK = 16
POOL_SHARD_TOKENS = 100_000_000


# --- the arms that are compared with ----------------------------------------------------------------------------------------


def read_documents(files: list[Path]) -> Iterator[str]:
    """The texts of parquet and jsonl files but for empty ones, in order."""
    for path in files:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=["text"]):
                    yield from filter(None, batch.column(0).to_pylist())
        else:
            with open(path, encoding="utf-8") as file:
                yield from filter(None, (json.loads(line)["text"] for line in file))


def run_loop(files: list[Path], out: Path) -> None:
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    with open(out / "tokens.bin", "wb") as file:
        for text in read_documents(files):
            ids = [encoding.eot_token]
            ids.extend(encoding.encode_ordinary(text))
            np.array(ids, dtype=np.uint16).tofile(file)


def _start_pool_worker() -> None:
    import tiktoken

    global _encoding
    _encoding = tiktoken.get_encoding("gpt2")


def _encode_in_pool(text: str) -> np.ndarray:
    ids = np.array([_encoding.eot_token, *_encoding.encode_ordinary(text)])
    assert (ids >= 0).all() and (ids < 2**16).all(), "an id does not fit into uint16"
    return ids.astype(np.uint16)


def run_pool(files: list[Path], out: Path, workers: int) -> None:
    """The way of the scripts that make shards of 100M tokens: all but `workers` and the uniform name is as there."""
    shard = np.empty(POOL_SHARD_TOKENS, dtype=np.uint16)
    n_shards = filled = 0

    def write() -> None:
        nonlocal n_shards, filled
        shard[:filled].tofile(out / f"tokens_{n_shards:06d}.bin")
        n_shards, filled = n_shards + 1, 0

    with multiprocessing.Pool(workers, _start_pool_worker) as pool:
        for ids in pool.imap(_encode_in_pool, read_documents(files), chunksize=POOL_CHUNK):
            while len(ids) >= len(shard) - filled:
                part = len(shard) - filled
                shard[filled:], ids = ids[:part], ids[part:]
                filled = len(shard)
                write()
            shard[filled : filled + len(ids)] = ids
            filled += len(ids)
    if filled:
        write()


# --- the text ---------------------------------------------------------------------------------------------------------------


def write_parquet(texts: list[str], path: Path) -> None:
    """Documents with FineWeb's columns, in row groups of 1000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = len(texts)
    columns: dict[str, list[Any]] = {name: [""] * n for name in FINEWEB_COLUMNS}
    columns |= {"text": texts, "id": [f"{path.stem}-{i}" for i in range(n)], "language": ["en"] * n,
                "language_score": [1.0] * n, "token_count": [0] * n}
    pq.write_table(pa.table(columns), path, row_group_size=1000)


def write_default_text(folder: Path, megabytes: float) -> str:
    """The quick start's documents, again and again until there are `megabytes`; a file for each time. Returns what it is."""
    from data.local import find_quickstart

    source = find_quickstart()
    texts = [text for _, path in source.files if (text := path.read_text(encoding="utf-8"))]
    left = int(megabytes * 1e6)
    for number in itertools.count():
        part = []
        for text in texts:
            if left <= 0:
                break
            part.append(text)
            left -= len(text.encode())
        write_parquet(part, folder / f"{number:03d}.parquet")
        if left <= 0:
            return source.what


def find_text(inputs: list[str] | None, megabytes: float, folder: Path) -> tuple[list[Path], str]:
    """The files of documents, the default ones made in `folder`, and a line that says what they are. Raises InputError."""
    from data.documents import SUFFIXES
    from data.local import find_input

    if inputs:
        source = find_input(inputs, SUFFIXES)
        return [path for _, path in source.files], source.what
    what = write_default_text(folder, megabytes)
    return sorted(folder.iterdir()), what


# --- measuring --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Files, and the share of their documents that data.fineweb is to put aside for validation."""

    files: list[Path]
    val_fraction: float


@dataclass(frozen=True)
class Content:
    """What an arm made: `digest` is the sum of its documents' hashes, which order and split do not change."""

    documents: int
    tokens: int
    digest: int


def command(arm: str, corpus: Corpus, out: Path, workers: int) -> list[str]:
    files = [str(path.resolve()) for path in corpus.files]
    if arm == "ours":
        return [sys.executable, "-m", "data.fineweb", f"--out={out}", f"--workers={workers}",
                f"--val_fraction={corpus.val_fraction}", "--input", *files]
    return [sys.executable, "-m", "scripts.bench.tokenize", arm, str(workers), str(out), *files]


def run_arm(arm: str, corpus: Corpus, out: Path, workers: int) -> float:
    """Seconds that the arm's process takes. RuntimeError: it failed, with its last line."""
    out.mkdir()
    arguments = command(arm, corpus, out, workers)
    start = time.perf_counter()
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - start
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"arm {arm}: exit status {result.returncode}: {last}")
    return seconds


def read_content(arm: str, out: Path, eot: int) -> Content:
    """Of the tokens that an arm left in `out`, in both splits."""
    if arm == "ours":
        from data.shards import open_dataset

        dataset = open_dataset(out)
        streams = [stream.read(0, stream.n_tokens) for stream in (dataset.train, dataset.val)]
    else:
        streams = [np.concatenate([np.fromfile(path, dtype=np.uint16) for path in sorted(out.iterdir())])]
    documents = digest = 0
    for tokens in streams:
        starts = np.flatnonzero(tokens == eot)
        for start, end in itertools.pairwise([*starts.tolist(), len(tokens)]):
            digest += int.from_bytes(hashlib.blake2b(tokens[start:end], digest_size=16).digest(), "little")
        documents += len(starts)
    return Content(documents, sum(map(len, streams)), digest % 2**128)


def measure(
    corpus: Corpus, short: Corpus, folder: Path, workers: int, rounds: int, eot: int
) -> tuple[Content, dict[str, list[float]], dict[str, list[float]]]:
    """What every arm made, and seconds by arm and round of the whole corpus and of `short`. RuntimeError: an arm made
    something else."""
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    start_up: dict[str, list[float]] = {arm: [] for arm in ARMS}
    contents: dict[str, Content] = {}
    orders = list(itertools.permutations(ARMS))
    for i in tqdm(range(-1, rounds), desc="rounds", disable=None):
        for arm in orders[i % len(orders)]:
            for texts, found in ((short, start_up), (corpus, seconds)):
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    elapsed = run_arm(arm, texts, Path(out) / "out", workers)
                    if i >= 0:
                        found[arm].append(elapsed)
                    elif texts is corpus:
                        contents[arm] = read_content(arm, Path(out) / "out", eot)
    for arm in ARMS[1:]:
        if contents[arm] != contents[ARMS[0]]:
            raise RuntimeError(f"{arm} and {ARMS[0]} made different tokens: {contents[arm]}, {contents[ARMS[0]]}")
    return contents[ARMS[0]], seconds, start_up


# --- telling ----------------------------------------------------------------------------------------------------------------


def summarize(seconds: dict[str, list[float]], start_up: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Per arm: seconds of start-up and of the work after it, quartiles, tokens/s of the work; per pair: how many times the
    second's speed the first has, at the work and (`whole`) with the start-up."""
    arms, ratios = {}, {}
    work = {arm: [whole - start for whole, start in zip(seconds[arm], start_up[arm], strict=True)] for arm in ARMS}
    for arm in ARMS:
        if min(work[arm]) <= 0:
            raise RuntimeError(f"{arm}: the text took no longer than the start-up: measure with more text, on a quieter machine")
        spread = common.quartiles(work[arm])
        arms[arm] = {"seconds": seconds[arm], "start_up": start_up[arm], "start_up_quartiles": common.quartiles(start_up[arm]),
                     "work_quartiles": spread, "tokens_per_s": tokens / spread[1]}
    for a, b in PAIRS:
        spread, whole = ([y / x for x, y in zip(times[a], times[b], strict=True)] for times in (work, seconds))
        ratios[f"{a}/{b}"] = {"speed": common.quartiles(spread)[1], "speed_quartiles": common.quartiles(spread),
                              "whole_speed": common.quartiles(whole)[1], "whole_speed_quartiles": common.quartiles(whole)}
    return {"arms": arms, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':4}  {'start-up s':>10}  {'work s':>8}  {'quartiles':>17}  {'tokens/s':>10}"]
    for name, arm in result["arms"].items():
        low, median, high = arm["work_quartiles"]
        spread = f"{low:.2f} - {high:.2f}"
        lines.append(f"{name:4}  {arm['start_up_quartiles'][1]:10.2f}  {median:8.2f}  {spread:>17}  {arm['tokens_per_s']:10,.0f}")
    for pair, ratio in result["ratios"].items():
        low, median, high = ratio["speed_quartiles"]
        lines.append(f"{pair}: {median:.3f} times the speed (quartiles {low:.3f} - {high:.3f}), {ratio['whole_speed']:.3f} with "
                     "the start-up")
    return "\n".join(lines)


def figures(result: dict[str, Any], workers: int, cores: int) -> list[str]:
    """The figure that this project holds itself to, where this run can speak of it: two workers on two cores or more."""
    if workers != 2 or cores < 2:
        return []
    ratio = result["ratios"]["ours/loop"]
    return [common.verdict("speed, ours / loop", ratio["speed"], 1.9, ratio["speed_quartiles"], at_least=True)]


# --- command line -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises InputError."""
    parser = common.parser("tokenize", rounds=6)
    parser.add_argument("--input", nargs="+", action="extend")
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    own = parser.parse_args(argv)
    common.check(own)
    if own.workers < 1:
        raise InputError(f"--workers: wanted at least 1, found {own.workers}")
    if not 0 < own.megabytes < 1e6:
        raise InputError(f"--megabytes: wanted a number above 0, found {own.megabytes}")
    return own


def _make_corpora(own: argparse.Namespace, folder: Path) -> tuple[Corpus, Corpus, str]:
    """The corpus, the short one, and a line that says what they are. Raises InputError."""
    (folder / "text").mkdir()
    files, what = find_text(own.input, own.megabytes, folder / "text")
    try:
        head = list(itertools.islice(read_documents(files), 10_000))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"--input: {own.input[0]}: cannot be read: {str(error).splitlines()[0]}") from None
    if len(head) < SHORT_DOCUMENTS:
        raise InputError(f"--input: wanted at least {SHORT_DOCUMENTS} documents, found {len(head)}")
    # As data.fineweb has it by default where there is text enough; of less, what gives validation some documents.
    val_fraction = max(0.0005, 0.5 * min(1, SHORT_DOCUMENTS / len(set(head))))
    lines = [f"{i} {text[:SHORT_CHARS]}" for i, text in enumerate(head[:SHORT_DOCUMENTS])]
    short = [folder / f"short_{i}.parquet" for i in range(own.workers)]  # a file each, so that all workers start
    for path in short:
        write_parquet(lines, path)
    return Corpus(files, val_fraction), Corpus(short, 0.5), what


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own = parse(argv)
    from data.tokenizer import get_tokenizer

    eot = get_tokenizer("gpt2").eot
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench_tokenize_") as name:
        folder = Path(name)
        corpus, short, what = _make_corpora(own, folder)
        n_bytes = sum(path.stat().st_size for path in corpus.files)
        print(
            f"{what}: {len(corpus.files)} files, {n_bytes:,} bytes\n"
            f"tiktoken {version('tiktoken')}, {own.workers} workers on {cores} cores; a round to check that the tokens are "
            f"equal, then {own.rounds} timed ones",
            flush=True,
        )
        content, seconds, start_up = measure(corpus, short, folder, own.workers, own.rounds, eot)
    result = summarize(seconds, start_up, content.tokens)
    print(f"all arms made the same {content.documents:,} documents, {content.tokens:,} tokens")
    print(table(result))
    print("\n".join(figures(result, own.workers, cores)))
    if own.json:
        import torch

        from checkpoint import write_aside
        from tracker import environment

        facts = environment(torch.device("cpu"))
        facts["versions"] |= {package: version(package) for package in ("tiktoken", "pyarrow")}
        record = {**result, "text": what, "files": len(corpus.files), "bytes": n_bytes, "documents": content.documents,
                  "tokens": content.tokens, "workers": own.workers, "cores": cores, "rounds": own.rounds, **facts}
        write_aside(own.json, json.dumps(record, indent=1) + "\n")
    return 0


def _run_one(argv: list[str]) -> int:
    """What `command` starts: an arm, workers, a folder, files."""
    arm, workers, out, *files = argv
    paths = [Path(name) for name in files]
    if arm == "loop":
        run_loop(paths, Path(out))
    else:
        run_pool(paths, Path(out), int(workers))
    return 0


if __name__ == "__main__":
    sys.exit(_run_one(sys.argv[1:]))
