"""Checkpoints: one definition of the state of a run, saved so that a crash at any moment leaves the last good one.

A checkpoint is `ckpt_<step, 8 digits>.pt`, a dict of plain tensors and plain Python that torch.load reads with weights_only.
It is written under a temporary name, flushed to the disk and renamed; `latest`, a text file with its name, is written last.
"""

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from configurator import InputError

# The state of a run, whole: what save() wants is what load() insists on.
KEYS = frozenset({
    "model",  # state dict, bare names (no "module." of DDP, no "_orig_mod." of torch.compile)
    "optimizer",  # state dict
    "scaler",  # state dict of fp16's gradient scaler, empty otherwise
    "step",  # optimizer steps completed
    "tokens",  # training tokens seen
    "evaluated_step",  # step of the last finished evaluation, -1 for none: a resumed run does not repeat it
    "best_val_loss",  # None before the first evaluation
    "bad_steps",  # steps skipped for a non-finite loss or gradient
    "bad_steps_in_row",
    "rng",  # torch's global CPU generator; batches and dropout are functions of (seed, step) and need none
    "config",  # every setting
    "data",  # fingerprint, tokenizer and vocabulary size of the data set
    "wandb_id",  # None without wandb
})
_NAME = re.compile(r"ckpt_(\d{8})\.pt")
_MARKER = "latest"


def path_of(out_dir: str | Path, step: int) -> Path:
    return Path(out_dir) / f"ckpt_{step:08d}.pt"


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def list_checkpoints(out_dir: str | Path) -> list[Path]:
    """Complete or not, by step."""
    return sorted(p for p in Path(out_dir).glob("ckpt_*.pt") if _NAME.fullmatch(p.name))


def save(out_dir: str | Path, state: dict[str, Any], keep: int, milestone_interval: int = 0) -> Path:
    """Saves `state` and removes older checkpoints but the newest `keep` and the milestones. Raises OSError where the disk
    refuses; what was there before is then still there."""
    if missing := KEYS ^ state.keys():
        raise ValueError(f"a checkpoint holds exactly {sorted(KEYS)}; differs in {sorted(missing)}")
    path = path_of(out_dir, state["step"])
    _write_aside(path, lambda file: torch.save(state, file))
    _write_aside(path.with_name(_MARKER), lambda file: file.write(path.name.encode() + b"\n"))
    old = [p for p in list_checkpoints(out_dir) if step_of(p) <= state["step"]][:-keep]
    for p in old:
        if not (milestone_interval and step_of(p) % milestone_interval == 0):
            p.unlink()
    return path


def sweep(out_dir: str | Path) -> None:
    """Removes what a killed writer left under temporary names."""
    for p in Path(out_dir).glob(".*.tmp"):
        p.unlink()


def latest(out_dir: str | Path, warn=lambda message: None) -> Path | None:
    """The newest complete checkpoint, None where there is no checkpoint file at all. `warn` hears of each damaged one that
    is passed over. Raises InputError where all are damaged: starting from scratch beside them would be no one's wish."""
    found = list_checkpoints(out_dir)
    if not found:
        return None
    try:
        marked = (Path(out_dir) / _MARKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        marked = ""
    # The marked one first, then by time of writing: a step number says nothing about which was written last.
    for path in sorted(found, key=lambda p: (p.name == marked, p.stat().st_mtime, p.name), reverse=True):
        if (fault := damage(path)) is None:
            return path
        warn(f"{path} is damaged ({fault}); trying the one before")
    raise InputError(f"all {len(found)} checkpoints in {out_dir} are damaged; the newest: {path}: {fault}")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file (truncated, or a record whose checksum does not match), None if nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            return None if bad is None else f"checksum of {bad} does not match"
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return str(error) or type(error).__name__


def load(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state in a checkpoint file. Raises InputError, naming the file, for anything from which a run cannot go on."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"checkpoint {path} does not exist") from None
    except Exception as error:  # torch.load raises whatever the bytes provoke
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as a checkpoint: {reason}") from None
    keys = state.keys() if isinstance(state, dict) else set()
    if missing := sorted(KEYS - keys):
        raise InputError(f"{path} is no checkpoint to continue from: it lacks {', '.join(missing)}")
    return state


def _write_aside(path: Path, write) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)
