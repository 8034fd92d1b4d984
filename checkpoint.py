"""Checkpoints: one definition of the state of a run, saved so that a crash at any moment leaves the last good one.

A checkpoint is `ckpt_<step, 8 digits>.pt`, a dict of plain tensors and plain Python that torch.load reads with weights_only.
It is written under a temporary name, flushed to the disk and renamed; `latest`, a text file with its name, is written last.

The file is a zip archive in which torch.save keeps a CRC-32 of every record, and of every tensor is one. torch.load does not
look at them; `damage` does, reading the file once: 0.4 s per GB on one core (2.7 GB/s), less than what most disks need for it.
"""

import fcntl
import io
import os
import pickle
import re
import stat
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from command_line import InputError
from configurator import Config, as_dict
from distributed import whole
from presets import GPTConfig

# The state of a run, whole: what save() wants is what load() insists on.
KEYS: dict[str, Any] = {
    "model": dict,  # state dict, bare names (no "module." of DDP, no "_orig_mod." of torch.compile)
    "optimizer": dict,  # state dict
    "scaler": dict,  # state dict of fp16's gradient scaler, empty otherwise
    "step": int,  # optimizer steps completed
    "tokens": int,  # training tokens seen
    "evaluated_step": int,  # step of the last finished evaluation, -1 for none: a resumed run does not repeat it
    "best_val_loss": float | None,  # None before the first evaluation
    "bad_steps": int,  # steps skipped for a non-finite loss or gradient
    "bad_steps_in_row": int,
    "qk_clips": list,  # by layer, how many kv heads QK-Clip has scaled, a head counted once for each step
    "spikes": dict,  # state of the guard against spikes (safety.SpikeGuard)
    "data_hash": int,  # of all training windows so far (data.loader.Batches)
    "rng": torch.Tensor,  # torch's global CPU generator; batches and dropout are functions of (seed, step) and need none
    "config": dict,  # every setting
    "data": dict,  # fingerprint, tokenizer and vocabulary size of the data set
    "wandb_id": str | None,  # None without wandb
}
# Settings of the model that say how it is trained and not what it computes: like the learning rate, they may change on the way.
RECIPE = {"qk_clip", "dropout"}
_NAME = re.compile(r"ckpt_(\d{8})\.pt")
_MARKER = "latest"
_UNFINISHED = ".nanoxsa.tmp"  # a suffix of our own: out_dir may be a folder with other programs' temporaries


def path_of(out_dir: str | Path, step: int) -> Path:
    return Path(out_dir) / f"ckpt_{step:08d}.pt"


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def list_checkpoints(out_dir: str | Path) -> list[Path]:
    """Whole or not, by step; a folder, pipe or socket of such a name is none. Raises InputError where the system does not tell
    what one is: it may be the newest."""
    return sorted(p for p in Path(out_dir).glob("ckpt_*.pt") if _NAME.fullmatch(p.name) and _is_regular(p))


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if not os.path.lexists(path):  # removed since it was listed, by the run that is going there
            return False
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def save(
    out_dir: str | Path, state: dict[str, Any], keep: int, milestone_interval: int = 0, hurry: threading.Event | None = None
) -> Path:
    """Saves `state` and removes older checkpoints but the newest `keep` and the milestones. Until `hurry` is set it leaves the
    processor to others most of the time. Raises OSError where the disk refuses; what was there before is then still there."""
    if missing := KEYS.keys() ^ state.keys():
        raise ValueError(f"a checkpoint holds exactly {sorted(KEYS)}; differs in {sorted(missing)}")
    path = path_of(out_dir, state["step"])
    write_aside(path, lambda file: torch.save(state, Unhurried(file, hurry) if hurry else file))
    write_aside(path.with_name(_MARKER), path.name + "\n")
    old = [p for p in list_checkpoints(out_dir) if step_of(p) <= state["step"]][:-keep]
    for p in old:
        if not (milestone_interval and step_of(p) % milestone_interval == 0):
            p.unlink(missing_ok=True)
    return path


class Unhurried:
    """A file to write to that sleeps `_REST` times as long as the thread has computed, checksums included, until `hurry` is set.
    A low priority alone is not enough: threads that train wait for each other all the time, and a core that one has left for a
    moment comes back only after the writer's slice."""

    _REST = 12
    _PIECE = 1 << 20  # bytes

    def __init__(self, file: BinaryIO, hurry: threading.Event) -> None:
        self._file, self._hurry, self._rested = file, hurry, time.thread_time()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._PIECE):
            self._file.write(view[start : start + self._PIECE])
            self._hurry.wait(self._REST * (time.thread_time() - self._rested))
            self._rested = time.thread_time()
        return len(view)

    def flush(self) -> None:
        self._file.flush()


class Writer:
    """Saves in a thread, one state at a time, while training goes on.

    A thread and not a process: torch.save computes checksums and writes without the interpreter's lock, and a process would
    need the state once more. Where a CPU trains, `hurry` is clear until someone waits for the thread: it takes a tenth of a core.
    Beside a GPU, where cores are idle, it is as fast as any.

    The state is copied to memory of the host that is kept for the next time: pinned, where it comes from a GPU, for which torch
    takes the next power of two of a tensor's size."""

    def __init__(self) -> None:
        self._copy: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.hurry = threading.Event()

    def start(self, state: dict[str, Any], write: Callable[[dict[str, Any]], object]) -> None:
        """Copies `state` and lets a thread call `write` with the copy. Waits for the state before, and raises its error.
        Where the state is sharded, the other ranks call distributed.gather_along meanwhile."""
        self.wait()
        self._copy = _host_copy(state, self._copy)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        else:
            self.hurry.clear()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[dict[str, Any]], object]) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, max(10, os.getpriority(os.PRIO_PROCESS, me)))
        try:
            write(self._copy)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
            self._error = error

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raises what a write that is over has raised. Does not wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what writing has raised, once."""
        self.hurry.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _host_copy(value: Any, old: Any) -> Any:
    """`value` with its tensors copied, whole, into those of `old` at the same place where they fit. Copies from a GPU may still
    be under way."""
    if isinstance(value, dict):
        return {key: _host_copy(item, old.get(key) if isinstance(old, dict) else None) for key, item in value.items()}
    if isinstance(value, list | tuple):
        places = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
        return type(value)(_host_copy(item, place) for item, place in zip(value, places, strict=True))
    if not isinstance(value, torch.Tensor):
        return value
    value = whole(value.detach())  # one at a time: no more than one is whole on the device
    if not (isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype):
        old = _host_memory(value, value.is_cuda)
    return old.copy_(value, non_blocking=True)


def _host_memory(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
    except RuntimeError:  # there is less memory to pin than memory: a slower copy is better than none
        if not pinned:
            raise
        return _host_memory(like, False)


def sweep(out_dir: str | Path) -> None:
    """Removes what a killed writer left under temporary names."""
    for p in Path(out_dir).glob(f".*{_UNFINISHED}"):
        p.unlink()


class Damaged(InputError):
    """A file's bytes are not those that were written."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason})")
        self.reason = reason


def latest(out_dir: str | Path, warn=lambda message: None) -> Path | None:
    """The newest whole checkpoint, None where there is no checkpoint file at all. `warn` hears of each damaged one that is
    passed over. Raises InputError where all are damaged, since starting from scratch beside them would be no one's wish, and
    where a newer one is whole but cannot be read, or not by this code: going on from the one before would overwrite it."""
    found = list_checkpoints(out_dir)
    if not found:
        return None
    marker = Path(out_dir) / _MARKER
    try:
        marked = marker.read_text().strip() if marker.is_file() else ""
    except (OSError, UnicodeDecodeError):
        marked = ""
    faults = []
    # The marked one first: after a fall back it is earlier than the damaged ones. The others by step and not by time of writing,
    # which a copy of the folder does not keep: no run goes on from a step beside later ones (see choose) but those damaged.
    for path in sorted(found, key=lambda p: (p.name == marked, step_of(p)), reverse=True):
        if (fault := damage(path)) is None:
            return path
        faults.append(f"{path} is damaged ({fault})")
        warn(f"{faults[-1]}; trying the one before")
    raise InputError(f"all {len(found)} checkpoints in {out_dir} are damaged; the newest: {faults[0]}")


class _Source(io.FileIO):
    """A file that fails to be read with an InputError: zipfile takes an OSError for a fault of the archive."""

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # through readinto

    def readinto(self, buffer: Any) -> int:
        try:
            return os.readv(self.fileno(), [buffer])
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror}") from None


def damage(path: Path) -> str | None:
    """What shows that a file's bytes are not those that were written: truncated, a record whose checksum does not match; None
    if nothing. Raises InputError for a file that cannot be read, and for one that is whole and still nothing to continue from."""
    try:
        source = _Source(path)
    except OSError as error:
        if not os.path.lexists(path):
            return "it is gone"  # removed since it was listed
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        with io.BufferedReader(source) as file, zipfile.ZipFile(file) as archive:
            if (bad := archive.testzip()) is not None:
                return f"checksum of {bad} does not match"
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{path} cannot be read: not enough memory") from None
    except Exception as error:  # zipfile and what decompresses for it raise whatever the bytes provoke
        return _reason(error)
    try:
        load(path, mmap=True)  # torch's reader is stricter with the archive than Python's; mapped, it reads no tensor
    except Damaged as error:
        return error.reason
    return None


def _is_archive(path: str | Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # one that says it is spread over several disks
        return False


def _reason(error: Exception) -> str:
    """An error's first line. What torch says of a pickle that holds more than it should begins with the advice to load it all the
    same, and run the code in it."""
    if isinstance(error, pickle.UnpicklingError):
        found = re.search("unsupported [^\n]*", str(error), re.IGNORECASE)
        detail = f": {found[0].partition('. ')[0].rstrip('.'):.150}" if found else ""
        return f"it holds more than plain tensors and plain Python{detail}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def load(path: str | Path, device: torch.device | str = "cpu", mmap: bool = False) -> dict[str, Any]:
    """The state in a checkpoint file; with `mmap` the tensors are read when they are used. Raises InputError, naming the file,
    for anything from which a run cannot go on."""
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise InputError(f"checkpoint {path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch.load raises whatever the bytes provoke
        if Path(path).is_file() and not _is_archive(path):
            raise InputError(f"{path} is no checkpoint (ckpt_*.pt), or its end is missing") from None
        if "PytorchStreamReader" in str(error) and "file read failed" not in str(error):
            raise Damaged(path, _reason(error)) from None
        raise InputError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from None
    keys = state.keys() if isinstance(state, dict) else set()
    if missing := sorted(KEYS.keys() - keys):
        raise InputError(f"{path} is no checkpoint to continue from: it lacks {', '.join(missing)}")
    if unknown := sorted(str(key) for key in keys - KEYS.keys()):
        raise InputError(f"{path} is of another version of this code: it also holds {', '.join(unknown)[:200]}")
    for key, kind in KEYS.items():
        if not isinstance(state[key], kind):
            raise InputError(f"{path} is no checkpoint to continue from: {key} is {state[key]!r:.80}, wanted {kind}")
    for part in ("config", "data"):
        for key, value in state[part].items():
            if not isinstance(value, str | int | float | None):
                raise InputError(f"{path} is no checkpoint to continue from: {part} has {key!r:.80} of {type(value)}")
    named = _NAME.fullmatch(Path(path).name)
    if state["step"] < 0 or (named and int(named[1]) != state["step"]):
        raise InputError(f"{path} is no checkpoint to continue from: it holds step {state['step']}")
    return state


def choose(config: Config) -> Path | None:
    """The checkpoint that init_from asks for, None for a run from scratch. Raises InputError where there is none to be had,
    and where the run would write over an earlier one in out_dir."""
    existing = list_checkpoints(config.out_dir)
    metrics = Path(config.out_dir) / "metrics.jsonl"
    held = existing[-1].name if existing else metrics.name if metrics.exists() and metrics.stat().st_size else None
    if config.init_from in ("resume", "auto"):
        later = "" if config.eval_only else "; when the run comes to its step a whole one replaces it"
        path = latest(config.out_dir, warn=lambda message: print(f"warning: {message}{later}", file=sys.stderr))
        if path is None and config.init_from == "resume":
            raise InputError(f"init_from=resume, but out_dir={config.out_dir} holds no checkpoint (ckpt_*.pt)")
        return path
    if config.init_from != "scratch":
        path = Path(config.init_from)
        if not path.is_file():
            raise InputError(f"init_from wants scratch, resume, auto or a checkpoint file, found {config.init_from!r}")
        if (fault := damage(path)) is not None:
            raise InputError(f"init_from={path} is damaged ({fault})")
        if config.eval_only:
            return path
        if held and path.resolve().parent != Path(config.out_dir).resolve():
            raise InputError(f"init_from={path}, but out_dir={config.out_dir} holds another run ({held}); use another "
                             f"out_dir, or --init_from=resume to continue that one")
        step = load(path, mmap=True)["step"]
        if later := [p.name for p in existing if step_of(p) > step]:
            raise InputError(f"out_dir={config.out_dir} holds a later checkpoint ({later[-1]}) than the step {step} of "
                             f"init_from={path}; use another out_dir")
        return path
    if held and not config.eval_only:
        raise InputError(f"init_from=scratch, but out_dir={config.out_dir} holds a run already ({held}); use another "
                         f"out_dir, or --init_from=auto to continue it")
    return None


def check(path: Path, state: dict[str, Any], config: Config, fingerprint: str) -> None:
    """Raises InputError unless the settings give the model and, but for eval_only, the batches that the checkpoint had. What is
    recipe may be another one."""
    saved = state["config"]
    if unknown := sorted(str(key) for key in saved.keys() - as_dict(config).keys()):
        raise InputError(f"{path} is of another version of this code, with settings that this lacks: {', '.join(unknown)[:200]}")
    wanted = as_dict(config.model_config())
    try:  # a switch that came later than the checkpoint has its preset's value, which is what the model had
        had = as_dict(GPTConfig(**{key: saved[key] for key in wanted if key in saved}))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} has settings of no model: {error}") from None
    for key, value in wanted.items():
        if key not in RECIPE and had[key] != value:
            raise InputError(f"{path} has {key}={had[key]!r}, the settings say {key}={value!r}; a run continues with "
                             f"the model it had")
    if config.eval_only:
        return
    if (trained_on := state["data"].get("fingerprint")) != fingerprint:
        raise InputError(f"{path} was trained on other data (fingerprint {trained_on!s:.12}) than dataset {config.dataset} has "
                         f"(fingerprint {fingerprint:.12})")
    for key in ("seed", "sampling", "global_batch_size"):  # these decide which tokens a step sees
        if saved.get(key) != (value := getattr(config, key)):
            raise InputError(f"{path} has {key}={saved.get(key)!r}, the settings say {key}={value!r}; a run continues with the "
                             f"batches it had; for another run use another out_dir")


def optimizer_state(state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """What AdamW is to load: the checkpoint's moments, with weight decay and betas of this optimizer, which are the settings'.
    Raises ValueError unless weights and moments are those of this model, which may be sharded, after the steps that were taken:
    torch takes what it finds, and its fused AdamW writes beyond the end of a moment that is too small."""
    for name, weight in model.state_dict().items():
        _insist(state["model"].get(name), weight, name)
    saved, groups = state["optimizer"], optimizer.state_dict()["param_groups"]
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in groups]:
        raise ValueError("the optimizer's groups of parameters are not this model's")
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    taken = state["step"] - state["bad_steps"] - state["spikes"]["count"]
    if saved["state"].keys() != (set(range(len(parameters))) if taken else set()):
        raise ValueError(f"after {taken} steps taken the optimizer has states of {len(saved['state'])} parameters, "
                         f"the model has {len(parameters)}")
    for i, moments in saved["state"].items():
        name = names[parameters[i]]
        if moments.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"the optimizer's state of {name} is {sorted(map(str, moments))}, wanted exp_avg, exp_avg_sq, step")
        for key in ("exp_avg", "exp_avg_sq"):
            _insist(moments[key], parameters[i], f"{key} of {name}")
        _insist(moments["step"], torch.tensor(0.0), f"the optimizer's step of {name}")
        if moments["step"].item() != taken:
            raise ValueError(f"the optimizer's step of {name} is {moments['step'].item():g}, wanted {taken}")
    if len(state["qk_clips"]) != len(model.h):
        raise ValueError(f"qk_clips has {len(state['qk_clips'])} layers, wanted {len(model.h)}")
    return saved | {"param_groups": groups}


def _insist(value: Any, like: torch.Tensor, what: str) -> None:
    """A plain tensor in memory, of one element after the other, with the shape and dtype of `like`."""
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_meta or not value.is_contiguous():
        raise ValueError(f"{what} is {value!r:.80}, wanted a plain tensor")
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(f"{what} is {value.dtype} {list(value.shape)}, wanted {like.dtype} {list(like.shape)}")


def write_aside(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Puts a file in place whole or not at all: text, or what a function writes into an open file."""
    write = content if callable(content) else lambda file: file.write(content.encode())
    temporary = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if reason := _disk_error(error):
            raise OSError(f"{path} cannot be written: {reason.strerror or reason}") from error
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)


def until_done(path: Path) -> Path:
    """Where unfinished results go: `path` itself, or beside it where an earlier result is, which is then lost to no
    interruption."""
    return path.with_name(f"{path.stem}.unfinished{path.suffix}") if path.exists() else path


def refusal(error: OSError) -> str:
    """What the system refused, as write_aside says it: "FILE cannot be written: No space left on device"."""
    return f"{error.filename} cannot be written: {error.strerror}" if error.filename and error.strerror else str(error)


def _disk_error(error: BaseException | None) -> OSError | None:
    """The operating system's word in an error or in what led to it: torch.save hides a full disk behind an error of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def lock(out_dir: str | Path) -> Callable[[], None]:
    """Makes this process the only run in a folder, until it ends or calls what is returned. Raises InputError if there is one.

    A lock of the operating system on the folder itself: nothing is left behind by a crash. Where the file system has no
    locks there is none."""
    descriptor = os.open(out_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"out_dir={out_dir} belongs to a run that is still going; stop it, or use another out_dir") from None
    except OSError:
        pass
    return lambda: os.close(descriptor)
