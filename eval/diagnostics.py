"""What goes on in each layer of a model on some tokens: logits, attention, activations, gates. One forward pass without gradient.

    for layer, found in enumerate(diagnose(model, idx)):     # idx (B, T); a small batch is enough
        print(layer, found["attention_entropy"])

The blocks run uncompiled, stage by stage; the caller sets autocast. train.py does it every --diagnostics_interval steps, and

    python -m eval.diagnostics runs/sa runs/gsxa --out=diagnostics.png      # default: diagnostics.png in the first run's folder

draws what runs have logged: every quantity over steps, a column for each run and a line for each layer.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from command_line import ArgumentParser, InputError, check_output
from model import GPT, CausalSelfAttention, row_chunks


@torch.no_grad()
def diagnose(model: GPT, idx: Tensor) -> list[dict[str, float]]:
    """Per layer, means being over sequences, heads and positions; what a layer does not have is left out:

    largest_logit      as the softmax sees it, SSMax's factor and soft-cap included
    attention_entropy  nats, of a query's weights made to sum to 1 (their absolute values in differential attention)
    first_token_mass   weight on the first position, a sink token if there is one, of all later queries, where there are any
    cos_y_v            cosine of attention's output before XSA and the value of the same position (arXiv 2603.09078, Fig 1)
    kurtosis           of the block's output over channels, more than one, mean over positions: 3 where they are normal, more
                       with outliers
    largest_activation absolute, of the block's output
    gate_mean, ssmax   mean gate and mean s
    """
    training = model.training
    model.eval()
    try:
        x, rope = model.embed(idx)
        v1, results = None, []
        for block in model.h:
            attn, normed = block.attn, block.ln_1(x)
            q, k, v = attn.project(normed, rope, v1)
            y = attn.attend(q, k, v, attn.mask(q.shape[2], q.device))
            x = x + attn.output(y, v, normed)
            x = x + block.mlp(block.ln_2(x))
            if attn.first_of_residual:
                v1 = v
            found = {"largest_logit": attn.largest_logits(q, k).max(), **_weights(attn, q, k), **_activations(x)}
            own = v.repeat_interleave(y.shape[1] // v.shape[1], dim=1)
            found["cos_y_v"] = F.cosine_similarity(y.float(), own.float(), dim=-1).mean()
            if attn.gate != "off":
                found["gate_mean"] = attn.gates(normed).mean()
            if attn.softmax == "ssmax":
                found["ssmax"] = attn.ssmax.mean()
            results.append(found)
    finally:
        model.train(training)
    return [{key: value.item() for key, value in found.items()} for found in results]


def _weights(attn: CausalSelfAttention, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    T = k.shape[2]
    entropy, first = [], []
    for rows in row_chunks(q, T):
        p = attn.probabilities(q[:, :, rows], k[:, :, : rows.stop], rows.start)
        first.append(p[..., 0])
        size = p.abs()
        entropy.append(torch.special.entr(size / size.sum(-1, keepdim=True)).sum(-1))
    found = {"attention_entropy": torch.cat(entropy, dim=2).mean()}
    if T > 1:
        found["first_token_mass"] = torch.cat(first, dim=2)[..., 1:].mean()
    return found


def _activations(x: Tensor) -> dict[str, Tensor]:
    found = {"largest_activation": x.abs().max().float()}
    if x.shape[-1] > 1:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        found["kurtosis"] = (centred.pow(4).mean(-1) / centred.square().mean(-1).square()).mean()
    return found


# --- the picture ------------------------------------------------------------------------------------------------------------

Curves = dict[str, list[list[float | None]]]  # by quantity, for each logged step a value for each layer


def read_diagnostics(folder: Path) -> tuple[list[int], Curves]:
    """Steps and curves that a run has logged. Raises InputError, naming the file, where there are none."""
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # what follows the last end was cut off
        records = [record for record in map(json.loads, lines) if record["split"] == "diagnostics"]
        steps = [record["step"] for record in records]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is not the metrics file of a run") from None
    if not records:
        raise InputError(f"{path} has no diagnostics; train with --diagnostics_interval=100, say")
    return steps, {name: [record[name] for record in records] for name, value in records[0].items() if isinstance(value, list)}


def draw(runs: dict[str, tuple[list[int], Curves]], path: Path) -> None:
    """Rows of quantities, columns of runs, layers from dark (the first) to light."""
    from scripts.compare import STYLE, pyplot, save_picture

    plt = pyplot()
    names = list(dict.fromkeys(name for _, curves in runs.values() for name in curves))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(names), len(runs), figsize=(1 + 3.4 * len(runs), 0.6 + 1.5 * len(names)), sharex=True,
                                    sharey="row", squeeze=False, layout="constrained")
        for column, (label, (steps, curves)) in enumerate(runs.items()):
            axes[0, column].set_title(label)
            axes[-1, column].set_xlabel("step")
            for row, name in enumerate(names):
                axis = axes[row, column]
                axes[row, 0].set_ylabel("cos(y, v)" if name == "cos_y_v" else name.replace("_", " "))
                if name not in curves:
                    axis.text(0.5, 0.5, "has none", ha="center", va="center", transform=axis.transAxes, color="#777777")
                    continue
                layers = list(zip(*curves[name], strict=True))
                for i, values in enumerate(layers):
                    colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(layers) - 1))
                    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
                    axis.plot(*zip(*known, strict=True), color=colour, linewidth=1, marker="o", markersize=2) if known else None
        figure.suptitle("By layer, from the first (dark) to the last (light)")
        save_picture(figure, path)


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m eval.diagnostics", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE")
    try:
        args = parser.parse_args(argv)
        unique = len({folder.resolve().name for folder in args.folders}) == len(args.folders)
        runs = {folder.resolve().name if unique else str(folder): read_diagnostics(folder) for folder in args.folders}
        out = args.out or args.folders[0] / "diagnostics.png"
        check_output("--out", out, inputs=[folder / "metrics.jsonl" for folder in args.folders])
        draw(runs, out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
