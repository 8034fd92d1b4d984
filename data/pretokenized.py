"""FineWeb-100B as GPT-2 shards that others have tokenized and published: kjj0/fineweb100B-gpt2 on the Hugging Face hub.

    python -m data.fineweb --pretokenized --out=data/fineweb

Train files 1 to 1030 of 100M tokens each, and a validation file, in this repository's shard format. A folder of them that
was copied by hand needs none of this: train.py reads it as it is.
"""

import hashlib
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from command_line import InputError, say
from data.hub import ANSWER_SECONDS, ASK_WAITS, READ_BYTES, TIMEOUT, HubFile, ask, asked_wait, is_transient, open_file, reason
from data.parts import Part
from data.shards import HEADER_BYTES, MAGIC, META, TOKEN, UNFINISHED, VERSION, begin, read_json, read_meta, write_meta

REPOSITORY = "kjj0/fineweb100B-gpt2"
LAST_NUMBER = 1030  # of the train files
VOCAB_SIZE, EOT = 50257, 50256  # GPT-2's

_NAME = re.compile(r"fineweb_(?:val_000000|train_\d{6})\.bin")
_WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # seconds between tries of a download that makes no progress
_CHUNK_BYTES = 1 << 23


def download_pretokenized(out: Path, numbers: list[int]) -> None:
    """Make or extend the data set folder `out` of REPOSITORY's validation file and its train files `numbers` (1 to 1030).

    Each file gets its name when its header, size and sha256 are right; shards of that repository which the folder already
    holds are checked and become part of it. Interrupted at any moment, the same call goes on. InputError: bad numbers,
    another data set in `out`, no answer from the hub, too little disk space. OSError: a file still fails after all tries,
    or is not what the hub says; what is complete stays.
    """
    wrong = [number for number in numbers if not 1 <= number <= LAST_NUMBER]
    if wrong or not numbers:
        raise InputError(f"--pretokenized: wanted file numbers from 1 to {LAST_NUMBER}, found {wrong[0] if wrong else 'none'}")
    listed, source = _look(out)
    names = {_train_name(number) for number in numbers} | listed.keys()
    names |= {path.name for path in out.glob("*.bin")} | {"fineweb_val_000000.bin"}
    wanted = sorted(names, key=lambda name: ("train" in name, name))  # validation first
    done = {name: entry for name, entry in listed.items() if _has_tokens(out / name, entry["tokens"])}
    if all(name in done for name in wanted):
        say(f"{out}: has these {len(wanted)} files; nothing to do",
            f"python -m data.shards verify {out} checks every byte; delete a file that it finds wrong and run this command again")
        return
    files, source = _list_wanted(wanted, source)
    missing = [name for name in wanted if name not in done]
    _check_space(out, sum(files[name][0].size for name in missing if not (out / name).exists()), missing)
    part = Part(out, rank=0, world=1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = part.lock()
        begin(out, {"source": source})
    except OSError as error:
        raise InputError(f"--out: {out}: cannot be written ({error.strerror})") from None
    try:
        _download(out, wanted, missing, done, files, source)
    finally:
        part.unlock(lock)


def _download(
    out: Path, wanted: list[str], missing: list[str], done: dict[str, dict[str, Any]],
    files: dict[str, tuple[HubFile, str | None]], source: dict[str, str],
) -> None:
    total = sum(files[name][0].size for name in missing)
    say(f"{REPOSITORY} at {source['commit']}: {len(missing)} files, {total:,} bytes, to {out}")
    with tqdm(total=total, desc="download", unit="B", unit_scale=True, mininterval=1) as progress:
        for name in missing:
            done[name] = _obtain(out, *files[name], progress)
    for path in out.glob(".*.part"):  # of files that an earlier, interrupted call wanted
        if _NAME.fullmatch(path.name[1 : -len(".part")]):
            path.unlink()
    splits = {split: [done[name] for name in wanted if split in name] for split in ("train", "val")}
    write_meta(out, tokenizer="gpt2", vocab_size=VOCAB_SIZE, eot=EOT, splits=splits, source=source)
    tokens = {split: sum(entry["tokens"] for entry in splits[split]) for split in splits}
    say(f"{out}: {tokens['train']:,} train tokens in {len(splits['train'])} files, {tokens['val']:,} validation tokens")


def _train_name(number: int) -> str:
    return f"fineweb_train_{number:06d}.bin"


def _look(out: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What meta.json lists, by file name, and the source that it or an unfinished call names; both empty for a new folder.
    InputError: something else is there."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out}: is a file, wanted a folder")
    foreign = sorted(path.name for path in out.glob("*.bin") if not _NAME.fullmatch(path.name))
    if foreign:
        raise InputError(f"--out: {out}: holds {foreign[0]}, which is not of {REPOSITORY}; name a new or an empty folder")
    meta: dict[str, Any] = {}
    if (out / META).exists():
        meta = read_meta(out)
    elif (out / UNFINISHED).exists():
        meta = read_json(out / UNFINISHED)
    source = meta.get("source") if isinstance(meta, dict) else None
    if not isinstance(source, dict):
        source = {}
    if meta != {} and source.get("repo") != REPOSITORY:
        raise InputError(f"--out: {out}: holds another data set; name a new or an empty folder")
    return {entry["file"]: entry for split in meta.get("splits", {}).values() for entry in split}, source


def _list_wanted(wanted: list[str], source: dict[str, str]) -> tuple[dict[str, tuple[HubFile, str | None]], dict[str, str]]:
    """Each wanted file with its sha256, and the source: of the commit that `source` names, or of the newest."""
    place = f"--pretokenized: {REPOSITORY}"
    way_out = "without the hub: copy its files into a folder by hand, train.py reads that as it is"
    commit, files = ask(place, way_out, ANSWER_SECONDS, ASK_WAITS, _list_files, source.get("commit", "main"))
    if lacking := [name for name in wanted if name not in files]:
        raise InputError(f"{place}: at {commit} there is no {lacking[0]} ({len(lacking)} of {len(wanted)} files are missing)")
    source = {"what": f"https://huggingface.co/datasets/{REPOSITORY}", "repo": REPOSITORY, "commit": commit}
    return files, source


def _list_files(revision: str) -> tuple[str, dict[str, tuple[HubFile, str | None]]]:
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(REPOSITORY, revision=revision, files_metadata=True, timeout=TIMEOUT)
    files = {}
    for sibling in info.siblings or []:
        file = HubFile(f"hf://datasets/{REPOSITORY}@{info.sha}/{sibling.rfilename}", sibling.rfilename, sibling.size or 0)
        files[file.name] = file, sibling.lfs.sha256 if sibling.lfs else None
    return info.sha, files


def _check_space(out: Path, needed: int, names: list[str]) -> None:
    parts = [out / f".{name}.part" for name in names]
    needed -= sum(part.stat().st_size for part in parts if part.exists())
    folder = out.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(f"--out: {out}: {needed:,} bytes are still to come, {free:,} are free; name fewer files")


def _obtain(out: Path, file: HubFile, sha256: str | None, progress: tqdm) -> dict[str, Any]:
    """The entry for meta.json of a file that is in place, checked; downloaded unless it is there and right."""
    path, part = out / file.name, out / f".{file.name}.part"
    if path.exists():
        entry, fault = _examine(path, file, sha256)
        if not fault:
            progress.update(file.size)
            return entry
        progress.write(f"{path}: {fault}; downloading it anew", file=sys.stderr)
    while True:
        resumed = _fill(part, file, progress)
        entry, fault = _examine(part, file, sha256)
        if not fault:
            break
        part.unlink()
        if not resumed:
            raise OSError(f"{file.url}: {fault}; removed")
        progress.write(f"{file.name}: {fault}; what an earlier run had left is dropped", file=sys.stderr)
        progress.update(-file.size)
    os.replace(part, path)
    return entry


def _fill(part: Path, file: HubFile, progress: tqdm) -> bool:
    """Download what `part` lacks. Returns whether there was something in it."""
    failures = 0
    with open(part, "ab") as target:
        resumed = target.tell() > 0
        progress.update(min(target.tell(), file.size))
        while target.tell() < file.size:
            try:
                with open_file(file.url, file.size, ahead=8) as source:
                    source.seek(target.tell())
                    while data := source.read(READ_BYTES):
                        target.write(data)
                        progress.update(len(data))
                        failures = 0
            except Exception as error:
                if not is_transient(error):
                    raise OSError(f"{file.url}: {reason(error)}") from error
                if failures == len(_WAITS):
                    raise OSError(f"{file.url}: {reason(error)}; given up") from error
                wait = max(_WAITS[failures], asked_wait(error))
                progress.write(f"{file.name}: {reason(error)}; again in {wait} s", file=sys.stderr)
                time.sleep(wait)
                failures += 1
        target.flush()
        os.fsync(target.fileno())
    return resumed


def _has_tokens(path: Path, n_tokens: int) -> bool:
    if not path.is_file() or path.stat().st_size != HEADER_BYTES + 2 * n_tokens:
        return False
    return np.fromfile(path, dtype="<i4", count=3).tolist() == [MAGIC, VERSION, n_tokens]


def _examine(path: Path, file: HubFile, sha256: str | None) -> tuple[dict[str, Any], str]:
    """The entry for meta.json, and what is wrong with the file, if anything."""
    size = path.stat().st_size
    if size != file.size:
        return {}, f"size: the hub says {file.size} bytes, found {size}"
    digest = hashlib.sha256()
    top, documents = -1, 0
    with open(path, "rb") as content:
        header = content.read(HEADER_BYTES)
        digest.update(header)
        while data := content.read(_CHUNK_BYTES):
            digest.update(data)
            if len(data) % 2 == 0:
                tokens = np.frombuffer(data, dtype=TOKEN)
                top = max(top, int(tokens.max()))
                documents += int(np.count_nonzero(tokens == EOT))
    if sha256 and digest.hexdigest() != sha256:
        return {}, f"sha256: the hub says {sha256}, found {digest.hexdigest()}"
    magic, version, count = np.frombuffer(header.ljust(12, b"\0"), dtype="<i4", count=3).tolist()
    if (magic, version) != (MAGIC, VERSION):
        return {}, f"header: wanted magic number {MAGIC} and version {VERSION}, found {magic} and {version}"
    if count < 1 or size != HEADER_BYTES + 2 * count:
        return {}, f"header: {count} tokens take {HEADER_BYTES + 2 * count} bytes, the file has {size}"
    if top >= VOCAB_SIZE:
        return {}, f"id {top}: GPT-2 has a vocabulary of {VOCAB_SIZE}"
    return {"file": file.name, "tokens": count, "documents": documents, "sha256": digest.hexdigest()}, ""
