"""The attention similarity bias of trained models, layer by layer: the paper's Fig 1, for any attention.

    python -m eval.bias runs/quickstart/sa                                # the newest checkpoint of a run
    python -m eval.bias runs/1.4b-sa runs/1.4b-xsa --batch_size=16 --out=runs/fig1

Over training sequences of the checkpoint's block_size, drawn as data/loader.py draws them, with v_i the values, a_ij the weights
and y_i = sum_j a_ij v_j the outputs of attention, per head:

    panel 1    mean of cos(v_i, v_j) over all pairs of different positions of a sequence, within a kv head
    panel 2    mean of a_ii, the weight on the own position
    panel 3    mean of cos(y_i, v_i), and where the attention is exclusive also of cos(z_i, v_i), z_i being what it leaves of y_i

Panel 3 is also split: with m the mean of v over the sequence and v_i = m + u_i,

    cos(y_i, v_i) = y_i.m / (|y_i| |v_i|) + y_i.u_i / (|y_i| |v_i|)        a common part and a token part, which add up exactly

Whatever happened to v before the weighted sum (a mix with the first layer's values) has happened to it here; y is what comes
before the exclusive projection, the gate and the output projection. A query head has the v of its own kv head. Of differential
attention a_ii is the difference of the two maps. A cosine with a zero vector counts as 0; so does that of a z with nothing left
but rounding. All positions count, the first included, as the paper names no exception: there a softmax sees only itself,
a_00 = cos(y_0, v_0) = 1, and a mean m without it is (T m - 1) / (T - 1). Learned sinks (n_sink) take part in attention and are
no positions of a mean or a pair.

Flags:
    --dataset=DIR      default: the one that the checkpoint was trained on
    --sequences=N      training sequences (default 1024, the paper's)
    --batch_size=N     sequences at a time (default 8); changes nothing but memory and speed
    --seed=N           which sequences (default 0)
    --device=NAME      auto, cpu, cuda or cuda:N (default auto)
    --out=DIR          where bias.json (per layer and head), bias.png and bias.md go (default runs/bias); those there are replaced
                       when the new ones are done

The forward pass is fp32, means are fp64. The weights a_ij exist some rows at a time, never as a whole.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import until_done, write_aside
from command_line import ArgumentParser, InputError, make_output_folder
from data.loader import Loader
from data.shards import Dataset, open_dataset
from model import GPT, CausalSelfAttention, loss_rows
from scripts.compare import BASELINE_COLOUR, COLOURS, STYLE, pyplot, save_picture
from scripts.sample import choose_device, open_checkpoint
from tracker import environment

MEANS = {
    "cos_v_v": "cos(v_i, v_j)", "a_own": "a_ii", "cos_y_v": "cos(y_i, v_i)", "common": "common part", "token": "token part",
    "cos_z_v": "cos(z_i, v_i)",
}
MAX_WEIGHTS = {"cpu": 2**23, "cuda": 2**27}  # weights a_ij held at a time
MAX_SEQUENCES = 1_000_000  # whose means, one for each head and sequence, are kept: about a GB a layer
RESIDUE = 1e-6  # a z that is smaller than this share of its y is fp32 rounding

Means = dict[str, Tensor]


# --- one layer --------------------------------------------------------------------------------------------------------------


def layer_means(
    attn: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, y: Tensor, n_sink: int, max_weights: int
) -> Means:
    """Means over the positions of each sequence, fp64 (B, heads): heads are v's for cos_v_v and y's for the others; cos_z_v only
    where `attn` is exclusive. q (B, H, T, d), k and v (B, K, T, d) and y (B, H, T, d) are attention's, sinks first."""
    own = own_weights(attn, q, k, max_weights)[:, :, n_sink:].double()
    v, y = v[:, :, n_sink:].double(), y[:, :, n_sink:].double()
    K, T = v.shape[1:3]
    inverse = _inverse_norm(v)
    unit = v * inverse
    # The sum over all pairs of dot products is the square of the sum; without i = j, and each pair twice.
    pairs = (unit.sum(2).square().sum(-1) - unit.square().sum((2, 3))) / (T * (T - 1))
    y = y.unflatten(1, (K, -1))  # (B, K, G, T, d), as v (B, K, 1, T, d) has it
    direction = y * _inverse_norm(y)
    common = v.mean(2, keepdim=True)
    means = {
        "cos_v_v": pairs,
        "a_own": own.mean(-1),
        "cos_y_v": _mean_dot(direction, unit),
        "common": _mean_dot(direction, common * inverse),
        "token": _mean_dot(direction, (v - common) * inverse),
    }
    if attn.exclusive != "off":
        strength = attn.alpha.double().tanh().view(K, -1, 1, 1) if attn.exclusive == "learned" else 1.0
        z = y - strength * (y * unit[:, :, None]).sum(-1, keepdim=True) * unit[:, :, None]
        left = z.norm(dim=-1, keepdim=True) > RESIDUE * y.norm(dim=-1, keepdim=True)
        means["cos_z_v"] = _mean_dot(z * _inverse_norm(z) * left, unit)
    return means


def own_weights(attn: CausalSelfAttention, q: Tensor, k: Tensor, max_weights: int) -> Tensor:
    """a_ii (B, H, T), from at most max_weights a_ij at a time (or one row of each head and sequence)."""
    B, H, T, _ = q.shape
    n_rows = max(1, max_weights // (B * H * T))
    parts = []
    for start in range(0, T, n_rows):
        stop = min(start + n_rows, T)
        p = attn.probabilities(q[:, :, start:stop], k[:, :, :stop], start)
        parts.append(p.diagonal(start, -2, -1))
    return torch.cat(parts, dim=-1)


def _mean_dot(a: Tensor, b: Tensor) -> Tensor:
    """a (B, K, G, T, d), b (B, K, T, d) -> (B, K*G): dot products, averaged over positions."""
    return (a * b[:, :, None]).sum(-1).mean(-1).flatten(1)


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| over the last dimension, which stays with size 1; 0 where x is zero."""
    norm = x.norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, norm.reciprocal(), 0)


# --- a model ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(model: GPT, batches: Iterator[tuple[Tensor, Tensor]], max_weights: int) -> tuple[list[Means], float]:
    """Over batches of x and y (B, T), per layer the means of every sequence, fp64 (N, heads) on the CPU; and the mean loss."""
    layers: list[list[Means]] = [[] for _ in model.h]
    losses: list[Tensor] = []

    def note(layer: int, *tensors: Tensor) -> None:
        means = layer_means(model.h[layer].attn, *tensors, model.config.n_sink, max_weights)
        layers[layer].append({key: value.cpu() for key, value in means.items()})

    with watch(model, note):
        for x, y in batches:
            _, loss = model(x, y)
            losses.append(loss.double().expand(len(x)))
    joined = [{key: torch.cat([means[key] for means in parts]) for key in parts[0]} for parts in layers]
    return joined, torch.cat(losses).mean().item()


@contextmanager
def watch(model: GPT, note: Callable[..., None]) -> Iterator[None]:
    """While it lasts, note(layer, q, k, v, y) hears of what each layer's attention takes and gives."""

    def watched(layer: int, attn: CausalSelfAttention) -> Callable[..., Tensor]:
        attend = attn.attend

        def wrapper(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            y = attend(q, k, v, *others)
            note(layer, q, k, v, y)
            return y

        return wrapper

    for layer, block in enumerate(model.h):
        block.attn.attend = watched(layer, block.attn)
    try:
        yield
    finally:
        for block in model.h:
            del block.attn.attend


def in_batches(loader: Loader, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The windows of the loader's first step, the same ones whatever the batch_size."""
    sequences = loader.global_batch_size
    with loader.batches() as batches, tqdm(total=sequences, desc="sequences", unit="seq", disable=None) as progress:
        windows = islice(batches, sequences)
        while batch := list(islice(windows, batch_size)):
            x, y = (torch.cat(tensors) for tensors in zip(*batch, strict=True))
            yield x, y
            progress.update(len(batch))


# --- a checkpoint -----------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A model to look at, still on the CPU and mapped from its file, and the data set that it is shown."""

    path: Path
    step: int
    model: GPT
    attention: str
    dataset: Dataset
    trained_on: str | None  # fingerprint

    @property
    def label(self) -> str:
        folder = self.path.resolve().parent.name
        return f"{self.attention}{'' if folder == self.attention else f' ({folder})'}, step {self.step:,}"


def open_source(place: Path, dataset: str | None) -> Source:
    """Raises InputError."""
    path, model, state = open_checkpoint(place)
    config = state["config"]
    if model.config.block_size < 2:
        raise InputError(f"{path}: block_size: wanted at least 2 positions to compare, found {model.config.block_size}")
    return Source(path, state.get("step", 0), model, model.config.attention, open_dataset(dataset or config["dataset"]),
                  state.get("data", {}).get("fingerprint"))


def make_loader(source: Source, args: argparse.Namespace, device: torch.device) -> Loader:
    """Of training sequences one by one. Raises InputError."""
    config = source.model.config
    return Loader(source.dataset.train, block_size=config.block_size, global_batch_size=args.sequences, micro_batch_size=1,
                  rank=0, world_size=1, seed=args.seed, sampling="random", vocab_size=config.vocab_size, device=device)


def memory_bytes(model: GPT, batch_size: int, device: torch.device) -> int:
    """About how much a forward pass and layer_means hold at once beside the weights."""
    c = model.config
    tokens = batch_size * (c.block_size + c.n_sink)
    forward = 4 * tokens * (10 * c.n_embd + 2 * (c.n_head + 2 * c.n_kv_head) * c.head_dim)
    logits = 4 * 2 * min(loss_rows(device), tokens) * c.vocab_size
    fp64 = 8 * tokens * (4 * c.n_head + 4 * c.n_kv_head) * c.head_dim
    return forward + max(logits, fp64, 4 * 4 * MAX_WEIGHTS[device.type])


def analyse(source: Source, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What bias.json says of one checkpoint."""
    model = source.model.to(device)
    batches = in_batches(make_loader(source, args, device), args.batch_size)
    layers, loss = measure(model, batches, MAX_WEIGHTS[device.type])
    return {
        "checkpoint": str(source.path), "step": source.step, "attention": source.attention, "label": source.label,
        "block_size": model.config.block_size, "n_sink": model.config.n_sink, "dataset": str(source.dataset.folder),
        "fingerprint": source.dataset.fingerprint, "loss": loss, "layers": [summarize(means) for means in layers],
    }


def summarize(means: Means) -> dict[str, dict[str, Any]]:
    """A layer's means over sequences (N, heads) -> mean over heads with its standard error, and the same for each head."""

    def with_error(values: Tensor) -> tuple[Any, Any]:
        return values.mean(0).tolist(), (values.std(0) / len(values) ** 0.5).tolist()

    found = {}
    for key, values in means.items():
        mean, error = with_error(values.mean(1))
        head_means, head_errors = with_error(values)
        found[key] = {"mean": mean, "standard_error": error, "heads": head_means, "heads_standard_error": head_errors}
    return found


# --- telling ----------------------------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    """bias.md: a table per checkpoint, a line per layer and their mean."""
    lines = [f"# Attention similarity bias, {record['sequences']:,} training sequences", ""]
    for found in record["checkpoints"]:
        keys = [key for key in MEANS if any(key in layer for layer in found["layers"])]
        rows = [["layer", *(MEANS[key] for key in keys)]]
        for number, layer in enumerate(found["layers"], 1):
            rows.append([str(number), *(_cell(layer.get(key)) for key in keys)])
        means = ([layer[key]["mean"] for layer in found["layers"] if key in layer] for key in keys)
        rows.append(["mean", *(f"{sum(values) / len(values):z.4f}" for values in means)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        sinks = f" behind {found['n_sink']} sinks" if found["n_sink"] else ""
        lines += [
            f"## {found['label']}", "", f"T {found['block_size']}{sinks}; loss on these sequences {found['loss']:.4f}.", "",
            *("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows), "",
        ]
    lines += ["Means over heads and sequences, ± the standard error over sequences. cos(v_i, v_j) is over i ≠ j; the common and "
              "the token part add up to cos(y_i, v_i); z_i is what an exclusive attention leaves of y_i.", ""]
    return "\n".join(lines)


def _cell(value: dict[str, Any] | None) -> str:
    return "" if value is None else f"{value['mean']:z.4f} ± {value['standard_error']:.4f}"


def draw(record: dict[str, Any], path: Path) -> None:
    """bias.png from the content of bias.json: the three panels, the third with its parts. Raises InputError without
    matplotlib."""
    plt = pyplot()
    from matplotlib.lines import Line2D

    panels = [
        ("values: mean cos(v_i, v_j), i ≠ j", {"cos_v_v": "-"}),
        ("weight on the own position: mean a_ii", {"a_own": "-"}),
        ("output and own value: mean cos(y_i, v_i)", {"cos_y_v": "-", "common": "--", "token": ":", "cos_z_v": "-."}),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
        deepest = max(len(found["layers"]) for found in record["checkpoints"])
        for axis, (title, curves) in zip(axes, panels, strict=True):
            drawn = {}
            for i, found in enumerate(record["checkpoints"]):
                colour = BASELINE_COLOUR if i == 0 else COLOURS[(i - 1) % len(COLOURS)]
                for key, dashes in curves.items():
                    layers = [n for n, layer in enumerate(found["layers"], 1) if key in layer]
                    if not layers:
                        continue
                    mean, error = ([found["layers"][n - 1][key][part] for n in layers] for part in ("mean", "standard_error"))
                    axis.plot(layers, mean, color=colour, linestyle=dashes, linewidth=1.4, marker="o", markersize=3,
                              label=found["label"] if dashes == "-" else None)
                    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
                    axis.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
                    drawn[key] = dashes
            axis.set(title=title, xlabel="layer", xlim=(0.7, deepest + 0.3))
            axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True, nbins=8))
            axis.axhline(0, color="#999999", linewidth=0.8, zorder=1)
            if len(drawn) > 1:
                low, high = axis.get_ylim()
                axis.set_ylim(low, high + 0.22 * (high - low))  # room for the legend
                axis.legend([Line2D([], [], color="#555555", linestyle=dashes) for dashes in drawn.values()],
                            [MEANS[key] for key in drawn], ncols=2, loc="upper left", fontsize=8)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
        figure.suptitle(f"Attention similarity bias, means over heads and {record['sequences']:,} training sequences")
        save_picture(figure, path)


# --- command ----------------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises InputError."""
    parser = ArgumentParser(prog="python -m eval.bias", description=__doc__)
    parser.add_argument("places", nargs="+", type=Path, metavar="CHECKPOINT_OR_RUN", help="a checkpoint file, or a run's folder")
    parser.add_argument("--dataset", metavar="DIR")
    parser.add_argument("--sequences", type=int, default=1024, metavar="N")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", default="auto", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/bias"), metavar="DIR")
    args = parser.parse_args(argv)
    for key, least, most in (("sequences", 2, MAX_SEQUENCES), ("batch_size", 1, MAX_SEQUENCES), ("seed", 0, 2**64 - 1)):
        if not least <= getattr(args, key) <= most:
            raise InputError(f"--{key}: wanted {least:,} to {most:,}, found {getattr(args, key):,}")
    return args


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        device = choose_device(args.device)
        if device.type not in MAX_WEIGHTS:
            raise InputError(f"--device: wanted cpu or cuda, found {device}: sums are fp64")
        pyplot()
        sources = [open_source(place, args.dataset) for place in args.places]
        for source in sources:
            make_loader(source, args, device)
        make_output_folder("--out", args.out, ["bias.json", "bias.md", "bias.png"])
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record: dict[str, Any] = {"sequences": args.sequences, "seed": args.seed, "means": MEANS, "checkpoints": [],
                              **environment(device)}
    for source in sources:
        if source.trained_on not in (None, source.dataset.fingerprint):
            print(f"warning: {source.path} was trained on other data than {source.dataset.folder}", file=sys.stderr)
        weights = sum(p.nbytes for p in source.model.parameters())
        print(f"{source.path}: {source.label}; {args.sequences:,} sequences of {source.model.config.block_size} from "
              f"{source.dataset.folder.name} on {device}, {args.batch_size} at a time; memory: weights {weights / 1e6:,.0f} MB, "
              f"all else at most about {memory_bytes(source.model, args.batch_size, device) / 1e6:,.0f} MB", file=sys.stderr)
    kept = args.out / "bias.json"
    meanwhile = until_done(kept)
    try:
        while sources:
            record["checkpoints"].append(analyse(sources.pop(0), args, device))
            write_aside(meanwhile, json.dumps(record, indent=1) + "\n")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report(record)
    meanwhile.replace(kept)
    write_aside(args.out / "bias.md", text)
    draw(record, args.out / "bias.png")
    print(text)
    print(f"written: {', '.join(str(args.out / name) for name in ('bias.json', 'bias.md', 'bias.png'))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
