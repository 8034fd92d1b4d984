"""Benchmarks, each a module of this folder:

    python -m scripts.bench step [config files] [--key=value ...]     an optimizer step: this repository's, NanoGPT's, and XSA's
    python -m scripts.bench peers [config files] [--key=value ...]    a step beside NanoGPT's and a Hugging Face Trainer's
    python -m scripts.bench block [config files] [--key=value ...]    a block over sequence length and width (the paper's Fig 2)
    python -m scripts.bench presets [config files] [--key=value ...]  every preset of attention: right? at what cost?
    python -m scripts.bench sizes [config files] [--key=value ...]    a GPU in nine minutes: the paper's sizes, XSA, the loss
    python -m scripts.bench xsa [config files] [--key=value ...]      XSA's pass alone: bytes moved over needed, bandwidth
    python -m scripts.bench decode [config files] [--key=value ...]   tokens/s of generate, this repository's and Hugging Face's
    python -m scripts.bench loss [config files] [--key=value ...]     the loss: ours, the plain one, torch's, Liger kernel's
    python -m scripts.bench loader [config files] [--key=value ...]   share of a step that waits for data; the loader's speed
    python -m scripts.bench optimizer [config files] [--key=value ...]    fused AdamW with clipping beside foreach and for-loop
    python -m scripts.bench tokenize [--input PATH ...]               documents to shards: data.fineweb's, and two usual ways
    python -m scripts.bench checkpoint [config files] [--key=value ...]   saving: copy, writing, and steps meanwhile
    python -m scripts.bench compare A.json B.json                     two results of one benchmark, before and after a change

`python -m scripts.bench NAME --help` says what it measures and how. What to compare is a list with commas or spaces:
`--compare=xsa,gsxa` or `--compare xsa gsxa`.
"""

import importlib
import signal
import sys

from command_line import InputError
from scripts.bench.common import with_commas

BENCHMARKS = ("step", "block", "presets", "sizes", "xsa", "decode", "loss", "optimizer", "loader", "peers", "tokenize",
              "checkpoint", "compare")


def main(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    try:
        if not argv or argv[0] not in BENCHMARKS:
            raise InputError(f"benchmark: wanted one of {', '.join(BENCHMARKS)}, found {repr(argv[0]) if argv else 'none'}")
        return importlib.import_module(f"scripts.bench.{argv[0]}").main(with_commas(argv[1:]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if "--help" in sys.argv or "-h" in sys.argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main(sys.argv[1:]))
