"""The Hugging Face hub: which files make a subset of FineWeb, reading them in parts, and what its faults mean.

    python -m data.fineweb --subset=sample-100BT --out=data/fineweb

datasets and huggingface_hub are imported where used. Of their settings, HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME and
HF_HUB_OFFLINE hold here. No file of the corpus is kept on the disk, nor in the hub's cache.
"""

import difflib
import io
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from tqdm import tqdm

from command_line import InputError, printable

FINEWEB = "HuggingFaceFW/fineweb"
REPOSITORIES = {"fineweb": FINEWEB, "fineweb-edu": "HuggingFaceFW/fineweb-edu"}

TIMEOUT = 30  # seconds without a byte
ANSWER_SECONDS = 20  # for the first question to the hub; resolving a name alone can take longer than any timeout of HTTP
ASK_WAITS = (1, 3, 9)  # seconds between tries where the hub answers that it is busy
READ_BYTES = 1 << 20
_RESOLVE_SECONDS = 600  # for the list of a subset's files: some hundred questions for the whole of FineWeb
_BLOCK_BYTES = 1 << 23
_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)@([^/]+)/(.+)")
_T = TypeVar("_T")

# By name: huggingface_hub has used requests, then httpx, then httpx2, and the names have stayed.
_LOST = {"TransportError", "ConnectionError", "Timeout", "ChunkedEncodingError", "IncompleteRead", "ProtocolError",
         "ContentDecodingError", "DecodingError", "TooManyRedirects"}


class HubError(OSError):
    """A part of a file could not be had from the hub; the cause says why. That says nothing of what is in the file."""


class WrongAnswer(ConnectionError):
    """What came is not what was asked for: another part, another file, a proxy's page. Another try can succeed."""


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset repository: url `hf://datasets/<repo>@<commit>/<name>`, name inside the repository, size in bytes."""

    url: str
    name: str
    size: int


# ---------------------------------------------------------------------------------------------------------------------
# Which files make a subset


def find_subset(subset: str, repo: str | None = None) -> list[HubFile]:
    """The train files of a subset, sorted by name, of the commit that the repository's main branch has now.

    `subset` is a name of FineWeb's (sample-10BT, CC-MAIN-2024-10), or of FineWeb-Edu's with `fineweb-edu/` before it;
    `fineweb-edu` or `fineweb` alone is the repository's default. With `repo`, it is a name of that repository's, or
    `default`. InputError: no such subset, no access, or no answer, with the way to do without the hub.
    """
    repo, name = (repo, subset) if repo else _split_subset(subset)
    place = f"--subset={subset}: {repo}"
    way_out = (
        "without the hub: --input with its files downloaded elsewhere, or a --pretokenized folder copied by hand, which "
        "train.py reads as it is"
    )
    commit = ask(place, way_out, ANSWER_SECONDS, ASK_WAITS, _newest_commit, repo)
    return ask(place, way_out, _RESOLVE_SECONDS, (), _resolve, repo, name, commit, place)


def _newest_commit(repo: str) -> str:
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repo, timeout=TIMEOUT).sha


def _resolve(repo: str, name: str, commit: str, place: str) -> list[HubFile]:
    from datasets import get_dataset_config_names, load_dataset_builder
    from huggingface_hub import HfApi

    try:
        builder = load_dataset_builder(repo, name=None if name == "default" else name, revision=commit)
    except ValueError:
        names = get_dataset_config_names(repo, revision=commit)
        if name in names:
            raise
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.4) or sorted(names)[:5]
        raise InputError(f"{place}: no such subset among its {len(names)}; the nearest: {', '.join(near)}") from None
    files = builder.config.data_files or {}
    if not files.get("train"):
        raise InputError(f"{place}: wanted train files, found {', '.join(files) or 'none'}")
    found = [_URL.fullmatch(url) for url in files["train"]]
    if not all(found):  # datasets takes a folder of that name in the current directory for the repository
        raise InputError(f"{place}: found {files['train'][0]} in place of the hub's files; start from another folder")
    names = sorted({match[3] for match in found})
    sizes: dict[str, int] = {}
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        for entry in HfApi().list_repo_tree(repo, folder or None, revision=commit, repo_type="dataset"):
            sizes[entry.path] = getattr(entry, "size", 0)  # a folder has none
    return [HubFile(f"hf://datasets/{repo}@{commit}/{name}", name, sizes[name]) for name in names]


def _split_subset(subset: str) -> tuple[str, str]:
    first, slash, rest = subset.partition("/")
    if first in REPOSITORIES:
        return REPOSITORIES[first], rest if slash else "default"
    if slash:
        raise InputError(f"--subset={subset}: wanted a name, or one of {', '.join(REPOSITORIES)} and a name after a slash")
    return FINEWEB, subset


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def ask(place: str, way_out: str, seconds: float, waits: tuple[int, ...], question: Callable[..., _T], *arguments: str) -> _T:
    """question(*arguments), asked in a process of its own, again after each of `waits` where the hub answers that it is busy.

    Of the libraries' requests some have no timeout, and some run in threads that a process waits for when it ends: only a
    process can be stopped after `seconds`. InputError: no answer, or a refusal.
    """
    context = multiprocessing.get_context("spawn")
    for wait in (*waits, None):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(sender, question, arguments), daemon=True)
        process.start()
        sender.close()
        try:
            answer = receiver.recv() if receiver.poll(seconds) else ("failed", f"no answer from the hub within {seconds:g} s", 0)
        except (EOFError, OSError):  # it was killed before its answer, or half-way through it
            answer = "failed", "the process that asks the hub has died", 0
        finally:
            process.kill()
            process.join()
            receiver.close()
        kind, content, asked = answer
        if kind == "answer":
            return content
        if kind == "input":
            raise InputError(content)
        if kind == "failed" or wait is None:
            raise InputError(f"{place}: {content}; {way_out}")
        print(f"{place}: {content}; again in {max(wait, asked)} s", file=sys.stderr, flush=True)
        time.sleep(max(wait, asked))
    raise AssertionError


def _answer(sender: Any, question: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Runs in the process: sends (kind, answer or reason, seconds that the hub asks to wait)."""
    tqdm.set_lock(threading.RLock())  # its own one is a semaphore that would be reported as leaked by a process killed
    try:
        sender.send(("answer", question(*arguments), 0))
    except InputError as error:
        sender.send(("input", str(error), 0))
    except ImportError as error:
        sender.send(("failed", f"needs the package datasets ({error})", 0))
    except Exception as error:
        status = _status(error)
        kind = "busy" if status is not None and _is_transient_status(status) else "failed"
        sender.send((kind, reason(error), asked_wait(error)))


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def is_transient(error: BaseException) -> bool:
    """Whether another try can succeed: no connection or a lost one, a timeout, a truncated or wrong answer, HTTP status 408,
    425, 429 or 5xx. Not where the hub has refused (401, 403, 404), nor in offline mode, nor for faults of the data."""
    for link in _chain(error):
        names = {kind.__name__ for kind in type(link).__mro__}
        if isinstance(link, InputError) or names & {"OfflineModeIsEnabled", "UnsupportedProtocol"}:
            return False
        if (status := _status_of(link)) is not None:
            return _is_transient_status(status)
        if isinstance(link, (ConnectionError, TimeoutError, socket.gaierror)) or names & _LOST:
            return True
    return False


def is_refusal(error: BaseException) -> bool:
    """Whether the file could not be had, by the hub's or the operating system's word, which says nothing of what is in it."""
    return _status(error) is not None or any(
        isinstance(link, HubError) or (isinstance(link, OSError) and link.errno) for link in _chain(error)
    )


def asked_wait(error: BaseException) -> int:
    """Seconds that the hub asks to wait before the next try, at most 300; 0 where it does not say."""
    for link in _chain(error):
        headers = getattr(getattr(link, "response", None), "headers", {})
        limit = re.search(r"r=0;\s*t=(\d+)", headers.get("RateLimit", ""))
        after = re.fullmatch(r"\d+", headers.get("Retry-After", ""))
        if limit or after:
            return min(300, int(limit[1] if limit else after[0]))
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, hidden or not: datasets makes "no such file" of any failure to read a README."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _status(error: BaseException) -> int | None:
    return next((status for link in _chain(error) if (status := _status_of(link)) is not None), None)


def _is_transient_status(status: int) -> bool:
    return status in (408, 425, 429) or status >= 500


def reason(error: BaseException) -> str:
    """The error on one line."""
    if any(type(link).__name__ == "OfflineModeIsEnabled" for link in _chain(error)):
        return "offline mode forbids asking the hub (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)"
    status = _status(error)
    if status == 404:
        return "not found on the hub (HTTP status 404)"
    if status in (401, 403):
        return f"not found on the hub, private or gated (HTTP status {status}); with access, `hf auth login` or HF_TOKEN"
    if status is not None:
        return f"the hub answered with HTTP status {status}"
    text = printable(" ".join(str(error).split()) or type(error).__name__, 300)
    if any(isinstance(link, WrongAnswer) for link in _chain(error)):
        return f"the network answered wrongly ({text})"
    return f"no answer from the hub ({text})" if is_transient(error) else text


# ---------------------------------------------------------------------------------------------------------------------
# Reading a file in parts


def open_file(url: str, size: int, ahead: int = 2) -> BinaryIO:
    """A file of the hub, `size` bytes long, to be read and seeked; nothing is kept on the disk.

    Memory holds blocks of 8 MiB: the one being read, the one before it, the file's last (a parquet file's index is there)
    and, where reading goes on in order, the next `ahead`, which are fetched at the same time. Reading raises
    HubError, whose cause is what the network raised, or WrongAnswer where what came is not that part of a file of `size` bytes,
    whole; after an error of which `is_transient` holds, reading may go on, here or in a file opened anew. With pyarrow, pass
    pre_buffer=False: its default asks for all the row groups' columns at once, however few are read.
    """
    return io.BufferedReader(_HubReader(url, size, ahead), buffer_size=READ_BYTES)


class _HubReader(io.RawIOBase):
    def __init__(self, url: str, size: int, ahead: int) -> None:
        self._url, self._size, self._ahead = url, size, ahead
        self._position = 0
        self._number: int | None = None  # of the block read last
        self._blocks: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1 + ahead)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"{self._url}: position {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        number, offset = divmod(self._position, _BLOCK_BYTES)
        part = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._blocks.clear()
        super().close()

    def _block(self, number: int) -> bytes:
        last = (self._size - 1) // _BLOCK_BYTES
        in_order = self._number is None or number in (self._number, self._number + 1)
        for wanted in range(number, min(number + (self._ahead if in_order else 0), last) + 1):
            if wanted not in self._blocks:
                start = wanted * _BLOCK_BYTES
                end = min(start + _BLOCK_BYTES, self._size)
                self._blocks[wanted] = self._pool.submit(_fetch, self._url, start, end, self._size)
        for old in [n for n in self._blocks if not (number - 1 <= n <= number + self._ahead or n == last)]:
            self._blocks.pop(old).cancel()
        try:
            data = self._blocks[number].result()
        except BaseException as error:
            self._blocks.pop(number)
            if isinstance(error, Exception):
                raise HubError(str(error)) from error
            raise
        self._number = number
        return data


def _fetch(url: str, start: int, end: int, size: int) -> bytes:
    """Bytes start .. end-1 of a file of `size` bytes, whole or an error."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    match = _URL.fullmatch(url)
    if not match:
        raise InputError(f"{url}: wanted hf://datasets/<repository>@<commit>/<file>")
    address = hf_hub_url(match[1], match[3], repo_type="dataset", revision=match[2])
    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    response = get_session().get(address, headers=headers, timeout=TIMEOUT)
    hf_raise_for_status(response)
    found = response.headers.get("Content-Range", "no Content-Range")
    if found != f"bytes {start}-{end - 1}/{size}":
        raise WrongAnswer(f"wanted bytes {start}-{end - 1}/{size}, found {found}, HTTP status {response.status_code}")
    if len(response.content) != end - start:
        raise WrongAnswer(f"truncated: wanted bytes {start}-{end - 1}, found {len(response.content)} of them")
    return response.content
