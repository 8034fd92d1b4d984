"""Every preset of attention: whether it computes what it should as it runs on this machine, and what its training step costs
beside plain attention's.

    python -m scripts.bench presets                                              # a CPU-sized shape, some minutes
    python -m scripts.bench presets config/gpt2_124m.py --micro_batch_size=16 --global_batch_size=16 --json=presets.json

The command line is train.py's: config files, then --key=value. Flags of its own:
    --presets=A,B    these alone (default: all)
    --rounds=N       timed rounds (default 6); in each every arm makes one step, in an order that changes from round to round
    --minutes=X      begin nothing new after so many (default 8); what is left out is named
    --json=FILE      also write every measurement, with versions and hardware; FILE.md beside it has the table

First the checks, on a GPU three at a time, since most of them is compilation. They compare with tests/reference.py, attention by
its definition as T x T matrices in fp32, at weights as training might leave them, the path being that of training, compiled where
training is: logits and gradients of one sequence in fp32 without TF32 (soft-caps lowered to 2, where they are felt), and logits
in training's dtype. Errors are those of the whole vector, relative to its length; of gradients the largest over parameters.

Then time and memory of an optimizer step, train.py's own, a few presets and plain attention in memory at a time, taking turns.
Ratios of time are medians over rounds of the ratio within a round. Peak memory: of a step on its own; on CPU as scripts.bench
step has it. gsxa is also measured without QK-Clip, whose cost, a pass for the largest logits and the scaling, is the difference.
"""

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError, check_output
from configurator import Config, as_dict
from model import GPT
from presets import PRESETS
from scripts.bench import common
from scripts.bench.common import quartiles, quotient, shown
from scripts.bench.memory import end_with_parent
from scripts.bench.step import Arm, allow_compilations, brief, measure_group
from scripts.compare import markdown
from tests import reference
from tracker import environment, peak_flops

# Without a config file: what a CPU does in minutes, with room for GQA's groups and for windows.
DEFAULT_SHAPE = ["--n_layer=4", "--n_embd=256", "--n_head=8", "--block_size=512", "--vocab_size=4096", "--micro_batch_size=4",
                 "--global_batch_size=4"]
WITHOUT_CLIP = "gsxa without QK-Clip"
FELT_CAP = 2.0  # at logits of a few units a cap of 50 could not be told from none
LIMITS = {"logits": 1e-3, "gradients": 5e-3, "as_trained": 0.05}  # the last in bf16; fp32 holds the first as well
CHECKERS = 3  # processes on a GPU
CHECK_SHARE = 0.6  # of the minutes, for the checks
GROUP = 6  # presets in memory at a time, beside plain attention


def variants(names: list[str], config: Config) -> tuple[dict[str, Config], dict[str, str]]:
    """The settings of each arm by its label, plain attention first, and why a preset cannot be at this shape."""
    arms, refused = {}, {}
    for name in dict.fromkeys(["sa", *names]):
        try:
            arms[name] = config.with_attention(name)
        except ValueError as error:
            refused[name] = str(error)
    if arms.get("gsxa") is not None and arms["gsxa"].qk_clip:
        arms[WITHOUT_CLIP] = replace(arms["gsxa"], qk_clip=0.0)
    return arms, refused


# --- right? -----------------------------------------------------------------------------------------------------------------


def season(model: GPT) -> None:
    """Weights as training might leave them: logits of a few units, nothing at its start. A function of the model's shape."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or "c_gate" in name:
                noise = torch.randn(p.shape, generator=generator)
                p.add_(noise.to(p.device), alpha=0.3 if p.ndim == 1 else p.shape[1] ** -0.5)
            else:
                p.mul_(60 / math.sqrt(model.config.n_embd))


def check(config: Config) -> dict[str, float]:
    """Relative errors by LIMITS' names, and the seconds that it took. Compiles what training will, for its cache too."""
    start = time.perf_counter()
    device = distributed.start(config).device
    compiled = common.compiles(config, device)
    torch._dynamo.reset()
    allow_compilations(1)
    exact = replace(config, dropout=0.0, logit_softcap=min(config.logit_softcap, FELT_CAP))
    torch.set_float32_matmul_precision("highest")
    model = _seasoned(exact, device)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    if compiled:
        model.compile_parts()
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(config.vocab_size, (1, config.block_size + 1), generator=generator).to(device)
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    with device:  # where the reference makes what it needs
        wanted = reference.logits(exact, weights, idx)
    F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    model(idx, targets)[1].backward()
    found = {"logits": relative_error(model(idx)[0], wanted)}
    total = math.sqrt(sum(p.grad.double().square().sum().item() for p in weights.values()))
    found["gradients"] = max(relative_error(p.grad, weights[name].grad, least=1e-4 * total)
                             for name, p in model.named_parameters())
    del model, weights, wanted

    torch._dynamo.reset()  # which would make the batch size dynamic, as it is not in training
    plain = _seasoned(replace(config, dropout=0.0), device)
    arm = Arm(config.attention, replace(config, dropout=0.0), distributed.start(config))
    x, _ = next(arm.batches)
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad(), device:
        wanted = reference.logits(plain.config, dict(plain.named_parameters()), x[:1])
    torch.set_float32_matmul_precision("high")
    arm.run.model.load_state_dict(plain.state_dict())
    with arm.run.autocast():
        found["as_trained"] = relative_error(arm.run.model(x)[0][:1], wanted)
    if config.qk_clip:
        arm.run.model.take_max_logits()
    arm.step()
    return found | {"seconds": time.perf_counter() - start}


def _seasoned(config: Config, device: torch.device) -> GPT:
    with device:
        model = GPT(config.model_config(), seed=config.seed)
    season(model)
    return model


def relative_error(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """Length of the difference over that of `wanted`, or over `least` where that is more."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm().clamp(min=least)).item()


def check_all(arms: dict[str, Config], device: torch.device, deadline: float) -> dict[str, dict[str, float] | str]:
    """By label what check() found, or what went wrong. Those not begun at `deadline` (time.monotonic) are left out."""
    found: dict[str, dict[str, float] | str] = {}
    checkers, context = CHECKERS if device.type == "cuda" else 1, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(checkers, mp_context=context, initializer=end_with_parent) as pool:
        futures = {pool.submit(check, config): label for label, config in arms.items()}
        left = set(futures)
        with tqdm(total=len(futures), desc="checks", disable=None) as bar:
            while left:
                done, left = wait(left, timeout=1, return_when="FIRST_COMPLETED")
                if time.monotonic() > deadline:
                    for future in left:
                        future.cancel()
                bar.update(len(done))
                for future in done:
                    if not future.cancelled():
                        error = future.exception()
                        found[futures[future]] = future.result() if error is None else brief(error)
    return {label: found[label] for label in arms if label in found}


def faults(found: dict[str, float] | str) -> list[str]:
    """What a check found wrong, in words."""
    if isinstance(found, str):
        return [found]
    return [f"{key} differ by {found[key]:.1e}, at most {limit:.0e} wanted" for key, limit in LIMITS.items()
            if not found[key] <= limit]


# --- at what cost? ----------------------------------------------------------------------------------------------------------


def measure(arms: dict[str, Config], rounds: int, deadline: float) -> dict[str, dict[str, Any]]:
    """By label milliseconds of each step, those of plain attention in the same rounds, and peak bytes; or an "error"."""
    others = [label for label in arms if label != "sa"]
    groups = [["sa", *others[i : i + GROUP]] for i in range(0, len(others), GROUP)] or [["sa"]]
    result: dict[str, dict[str, Any]] = {}
    for group in tqdm(groups, desc="groups", disable=None):
        if time.monotonic() > deadline:
            break
        times, memory, errors = measure_group({label: arms[label] for label in group}, rounds)
        for label in group:
            if label in errors:
                result[label] = {"error": errors[label]}
            elif label not in result and "sa" in times:
                result[label] = {"ms": times[label], "sa_ms": times["sa"], "peak_memory_bytes": memory[label]}
    return result


# --- telling ----------------------------------------------------------------------------------------------------------------


def summarize(arms: dict[str, Config], checks: dict[str, Any], costs: dict[str, Any], peak: float | None,
              device: torch.device) -> dict[str, dict[str, Any]]:
    """Everything by label. `peak` is the device's in FLOP/s, None where it is not known."""
    result = {}
    for label, config in arms.items():
        with torch.device("meta"):
            gpt = GPT(config.model_config())
        record: dict[str, Any] = {"path": gpt.attention_path(device), "n_params": sum(p.numel() for p in gpt.parameters())}
        if label in checks:
            record["check"] = checks[label]
        cost = costs.get(label, {})
        if "ms" in cost:
            rate = config.global_batch_size * config.block_size / quartiles(cost["ms"])[1] * 1000
            record |= cost | {
                "ms_quartiles": quartiles(cost["ms"]), "tokens_per_s": rate,
                "mfu": rate * gpt.flops_per_token() / peak if peak else None,
                "time_to_sa": quartiles([a / b for a, b in zip(cost["ms"], cost["sa_ms"], strict=True)]),
                "memory_to_sa": quotient(cost["peak_memory_bytes"], costs["sa"]["peak_memory_bytes"]),
            }
        elif cost:
            record |= cost
        result[label] = record
    return result


def table(result: dict[str, dict[str, Any]]) -> str:
    """Markdown, a row for each arm."""
    rows = [["preset", "path", "error of logits", "of gradients", "in training's dtype", "ms a step", "tokens/s", "time / sa",
             "peak memory", "/ sa"]]
    for label, record in result.items():
        check = record.get("check")
        if isinstance(check, dict):
            errors = [f"{check[key]:.0e}" for key in LIMITS]
        else:
            errors = ["failed" if check else "not checked", "", ""]
        cost = ["failed" if "error" in record else "not measured", *[""] * 4]
        if "ms" in record:
            low, middle, high = record["time_to_sa"]
            cost = [f"{record['ms_quartiles'][1]:.1f}", f"{record['tokens_per_s']:,.0f}",
                    "1" if label == "sa" else f"{middle:.3f} ({low:.3f} - {high:.3f})",
                    f"{record['peak_memory_bytes'] / 2**20:,.0f} MiB", shown(record['memory_to_sa'])]
        rows.append([label, record["path"], *errors, *cost])
    return markdown(rows)


def clip_cost(result: dict[str, dict[str, Any]]) -> str | None:
    """What QK-Clip costs of a step, as far as it was measured."""
    def ratio(label: str) -> float | None:
        return result[label]["time_to_sa"][1] if "time_to_sa" in result.get(label, {}) else None

    parts = []
    if (on := ratio("qkclip")) is not None:
        parts.append(f"qkclip / sa {on:.3f}")
    if (on := ratio("gsxa")) is not None and (off := ratio(WITHOUT_CLIP)) is not None:
        parts.append(f"gsxa / gsxa without it {on / off:.3f}")
    return f"QK-Clip's share of a step's time: {', '.join(parts)}" if parts else None


# --- command line -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags and the run's settings. Raises InputError."""
    parser = common.parser("presets", rounds=6)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--minutes", type=float, default=8.0)
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    if own.json:
        check_output("--json", own.json.with_name(own.json.name + ".md"))
    own.presets = own.presets.split(",")
    if unknown := [name for name in own.presets if name not in PRESETS]:
        raise InputError(f"--presets: wanted some of {', '.join(PRESETS)}, found {unknown[0]!r}")
    if not 0 < own.minutes < math.inf:
        raise InputError(f"--minutes: wanted above 0, found {own.minutes}")
    return own, common.step_settings(rest, DEFAULT_SHAPE)


def main(argv: list[str]) -> int:
    """Runs the benchmark; 1 where a preset is not right or fails. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    start = time.monotonic()
    device = common.measurable(distributed.start(config).device)
    arms, refused = variants(own.presets, config)
    facts = environment(device)
    dtype = common.dtype_name(config, device)
    described = (
        f"{facts['hardware']['device']}, torch {torch.__version__}, {dtype}, "
        f"{'compiled' if common.compiles(config, device) else 'eager'}; {config.n_layer} layers, width {config.n_embd}, "
        f"{config.n_head} heads of {config.head_dim}, vocabulary {config.vocab_size}; a step is {config.global_batch_size} "
        f"sequences of {config.block_size} tokens, {config.micro_batch_size} at a time"
    )
    print(f"{len(arms)} arms on {described}\nchecks first, then {own.rounds} timed rounds in groups of {GROUP + 1}; nothing new "
          f"is begun after {own.minutes:g} minutes", flush=True)
    for name, reason in refused.items():
        print(f"left out: {name}, {reason}")
    checks = check_all({label: arm for label, arm in arms.items() if label != WITHOUT_CLIP}, device,
                       start + 60 * CHECK_SHARE * own.minutes)
    costs = measure(arms, own.rounds, start + 60 * own.minutes)
    peak = peak_flops(facts["hardware"]["device"]) if device.type == "cuda" else None
    result = summarize(arms, checks, costs, peak, device)
    text = "\n".join(filter(None, [described, "", table(result), "", clip_cost(result)]))
    print(text)
    wrong = [f"{label}: {fault}" for label, found in checks.items() for fault in faults(found)]
    wrong += [f"{label}: {record['error']}" for label, record in result.items() if "error" in record]
    unseen = [label for label, record in result.items() if "ms" not in record and "error" not in record
              or "check" not in record and label != WITHOUT_CLIP]
    for line in [*(f"wrong: {line}" for line in wrong), *(f"no time was left for {label}" for label in unseen)]:
        print(line)
    if own.json:
        record = {"arms": result, "refused": refused, "wrong": wrong, "config": as_dict(config), "rounds": own.rounds, **facts}
        write_aside(own.json, json.dumps(record, indent=1) + "\n")
        write_aside(own.json.with_name(own.json.name + ".md"), text + "\n")
    return 1 if wrong else 0
