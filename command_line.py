"""What every command of this repository shares: the error that ends it with exit status 2, and how it reads its arguments.

Imports nothing heavy, so that a command can refuse its arguments, and a worker process start, without loading torch.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class InputError(Exception):
    """Bad arguments or bad input, found before any work starts. Entry points print it on one line and exit with 2."""


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
