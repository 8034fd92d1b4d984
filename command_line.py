"""What every command of this repository shares: the error that ends it with exit status 2, how it reads its arguments, what it
asks of a place for its results before it works for them, what it prints, and how it is asked to stop.

Imports nothing heavy, so that a command can refuse its arguments, and a worker process start, without loading torch.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# What asks a run to stop: torchrun forwards SIGTERM, SIGINT and SIGHUP to its workers; Slurm sends SIGUSR1 where it is told to.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def printable(text: object, most: int | None = None) -> str:
    """Text from input or of a file's name for a line of a message or a list: what would break the line, steer a terminal or
    fail to be encoded is escaped, and after `most` characters it is cut off."""
    text = str(text)
    if most is not None and len(text) > most:
        text = text[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def say(*lines: str) -> None:
    """Print lines, each made printable, at once. A reader that has had enough, such as `head`, ends nothing."""
    try:
        print("\n".join(map(printable, lines)), flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else Python fails again when it ends
        os.close(nowhere)


class InputError(Exception):
    """Bad arguments or bad input, found before any work starts. Entry points print it on one line and exit with 2: what the
    message quotes, a file's name say, may hold line breaks, the message has none."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(str(message).split("\n"))))


def first_two(texts: list[str], separator: str) -> str:
    """For a message: the first two of what may be hundreds, and how many more there are."""
    return separator.join([*texts[:2], *([f"and {len(texts) - 2} more"] if len(texts) > 2 else [])])


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose faults are InputErrors, one line each. Takes no abbreviated options; --skip-bad means --skip_bad."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_args([self._with_underscores(argument) for argument in args], namespace)

    def _with_underscores(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        option = "--" + name[2:].replace("-", "_")
        return option + equals + value if name.startswith("--") and option in self._option_string_actions else argument

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def check_output(flag: str, path: Path, inputs: Iterable[Path] = ()) -> None:
    """Raises InputError unless a file can be put at `path`, where it would replace none of the `inputs`. Leaves nothing there."""
    if not path.parent.is_dir():
        raise InputError(f"{flag}: no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{flag}: wanted a file, {path} is a folder")
    if path.exists() and not path.is_file():
        raise InputError(f"{flag}: {path} is a device or a pipe, which a file would replace")
    if any(path.resolve() == read.resolve() for read in inputs):
        raise InputError(f"{flag}: {path} is also read, and would be lost")
    _try_to_write(flag, path, path.parent, f".{path.name}.")


def make_output_folder(flag: str, folder: Path, names: Iterable[str] = ()) -> None:
    """Makes a folder for results, files of these `names` among them, where there is none. Raises InputError where they cannot be
    put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag}: {folder} cannot be made: {error.strerror}") from None
    _try_to_write(flag, folder, folder, ".")
    for name in names:
        check_output(flag, folder / name)


def _try_to_write(flag: str, path: Path, folder: Path, prefix: str) -> None:
    try:  # permissions alone do not tell: root has them all, and the disk may be read-only
        with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".nanoxsa.tmp", dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written: {error.strerror}") from None


class Stopped(BaseException):
    """A stop signal came. No Exception, which a library might take for a fault of its own and try again."""


class StopRequest:
    """From its creation on, a stop signal is noted in `signal` instead of ending the process."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._interrupts = False
        self._handlers = {}
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup asks that closing the terminal does not stop the run
            self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signal = signal.Signals(number).name
        if self._interrupts:
            self._interrupts = False  # once: what Stopped unwinds is not disturbed by an impatient second signal
            raise Stopped

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """In here a stop signal raises Stopped at once, one that came before included: for waiting, and for work that could as
        well be killed."""
        self._interrupts = True
        try:
            if self.signal:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def ignore(self) -> None:
        """Once the exit status is known: no further request spoils it. Python takes its own handlers away before it is gone."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
