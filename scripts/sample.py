"""Text from a trained model.

    python -m scripts.sample runs/124m-xsa --prompt="The ocean" --num_samples=3       # the newest checkpoint of a run
    python -m scripts.sample runs/124m-xsa/ckpt_00010000.pt --prompt=FILE:start.txt --temperature=0

As in training, a document begins with the end-of-text token, which is put before the prompt; without a prompt it stands alone.
The samples go to stdout, all else to stderr. --help lists every flag.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkpoint
from command_line import ArgumentParser, InputError
from data.tokenizer import NAMES, Tokenizer, get_tokenizer
from model import GPT


@dataclass
class Source:
    """A model to sample from, on its device and in eval mode, with the tokenizer of its data."""

    path: Path
    step: int
    model: GPT
    tokenizer: Tokenizer


def open_checkpoint(place: Path, device: str | torch.device = "cpu") -> tuple[Path, GPT, dict[str, Any]]:
    """The checkpoint file `place`, or the newest of the run folder `place`: its path, its model in eval mode, and its state, with
    tensors mapped from the file. Raises InputError."""
    path = checkpoint.latest(place) if place.is_dir() else place
    if path is None:
        raise InputError(f"{place} holds no checkpoint (ckpt_*.pt)")
    try:
        return path, GPT.from_checkpoint(path, device), torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InputError(f"checkpoint {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from None


def open_source(place: Path, tokenizer: str | None, device: torch.device) -> Source:
    """A checkpoint as `open_checkpoint` takes it, with the tokenizer of its data. Raises InputError."""
    path, model, state = open_checkpoint(place, device)
    name = tokenizer or state.get("data", {}).get("tokenizer")
    if name is None:
        raise InputError(f"{path} does not say which tokenizer its data has; give --tokenizer={'|'.join(NAMES)}")
    return Source(path, state.get("step", 0), model, get_tokenizer(name))


def read_prompt(prompt: str) -> str:
    """The text itself, or that of the file in FILE:path."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = prompt.removeprefix("FILE:")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--prompt: file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt: file {path} is not UTF-8: {error}") from None


def encode_prompt(source: Source, text: str) -> list[int]:
    """End-of-text and the ids of `text`. Raises InputError where the model has no row for one of them."""
    ids = [source.tokenizer.eot, *source.tokenizer.encode([text])[0].tolist()]
    rows = source.model.config.vocab_size
    if max(ids) >= rows:
        raise InputError(f"tokenizer {source.tokenizer.name} gives the prompt an id of {max(ids)}, and {source.path} has "
                         f"vocab_size={rows}; is it the tokenizer that the model was trained with?")
    return ids


def choose_device(name: str) -> torch.device:
    """The device of that name; auto: CUDA where there is one, else the CPU. Raises InputError where it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device={name} cannot be used: {str(error).splitlines()[0]}") from None


def parse(argv: list[str]):
    parser = ArgumentParser(prog="python -m scripts.sample", description=__doc__)
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder, or a checkpoint file")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue, or FILE:path (default: none)")
    parser.add_argument("--num_samples", type=int, default=1, metavar="N", help="samples, drawn as one batch (default 1)")
    parser.add_argument("--max_new_tokens", type=int, default=200, metavar="N", help="tokens of a sample (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=200, metavar="K", help="among the K likeliest; 0: all (default 200)")
    parser.add_argument("--seed", type=int, default=1337, help="same seed, same samples (default 1337)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    parser.add_argument("--tokenizer", choices=NAMES, help="default: the one that the checkpoint names")
    args = parser.parse_args(argv)
    for key, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not least <= getattr(args, key) < 2**63:
            raise InputError(f"--{key}: wanted at least {least}, found {getattr(args, key)}")
    return args


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        text = read_prompt(args.prompt)
        source = open_source(args.source, args.tokenizer, choose_device(args.device))
        ids = encode_prompt(source, text)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = source.model.wte.weight.device
    print(f"{source.path}, step {source.step}, {source.model.config.attention}: "
          f"{args.num_samples} x {args.max_new_tokens} tokens on {device}", file=sys.stderr)
    start = time.perf_counter()
    samples = source.model.generate(
        torch.tensor([ids] * args.num_samples, device=device), args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k or None, seed=args.seed, n_vocab=source.tokenizer.vocab_size,
    ).tolist()
    seconds = time.perf_counter() - start
    for i, sample in enumerate(samples, 1):
        print(f"----- sample {i} of {args.num_samples} -----")
        print(source.tokenizer.decode(sample[1:]))  # without the end-of-text token that stands before everything
    print(f"{args.num_samples * args.max_new_tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
