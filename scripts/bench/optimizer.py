"""What the optimizer's step costs, clipping included: fused AdamW, as train.py has it, beside torch's foreach and for-loop forms.

    python -m scripts.bench optimizer                                       # GPT-2's 124M shape
    python -m scripts.bench optimizer config/1.4b.py --json=optimizer.json

The command line is train.py's: config files, then --key=value, of which the model's shape and attention, the optimizer's
settings, device and seed count. Gradients are random and so large that every step clips them. Flags of its own:
    --rounds=N       timed rounds (default 10); in each every arm makes one step, in an order that changes from round to round
    --json=FILE      also write every measurement, with versions and hardware

Every arm has weights and state of its own: 16 bytes a parameter, three times. The others clip by torch's clip_grad_norm_. GB/s
counts the bytes that must be moved: the gradient read for its norm, read and written for clipping, then weight, two moments and
gradient read, weight and moments written.
"""

import argparse
import json
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from configurator import Config, as_dict, load
from model import GPT
from scripts.bench import common
from scripts.bench.common import milliseconds, quartiles, take_turns
from tracker import environment
from train import configure_optimizer

FORMS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for_loop": {"foreach": False}}
NUMBERS_MOVED = 1 + 2 + 4 + 3  # of a parameter: for the norm; for clipping; AdamW's reads; its writes


class Arm:
    """Clipping and AdamW in one of FORMS, ready to make steps."""

    def __init__(self, form: str, config: Config, device: torch.device):
        with device:
            model = GPT(config.model_config(), seed=config.seed)
        self.form, self.clip, self.device, self.parameters = form, config.grad_clip, device, list(model.parameters())
        self.optimizer = configure_optimizer(model, config)
        if form != "fused":
            groups = [{key: group[key] for key in ("params", "weight_decay")} for group in self.optimizer.param_groups]
            self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), **FORMS[form])
        generator = torch.Generator(device).manual_seed(config.seed)
        for p in self.parameters:
            p.grad = torch.empty_like(p).normal_(generator=generator)

    def run(self) -> None:
        if self.form == "fused":  # as train.Run.train_step
            gradients = [p.grad for p in self.parameters]
            norm = nn.utils.get_total_norm(gradients).item()
            if self.clip and norm > self.clip:
                torch._foreach_mul_(gradients, self.clip / norm)
        elif self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=self.form == "foreach")
        self.optimizer.step()

    def step(self) -> float:
        """Milliseconds of one step."""
        torch._foreach_mul_([p.grad for p in self.parameters], 1.5)  # the step before has clipped them
        return milliseconds(self.run, self.device)


def summarize(times: dict[str, list[float]], n_parameters: int) -> dict[str, Any]:
    """Per form milliseconds, GB/s of the bytes that must be moved, and its time to that of fused."""
    return {form: {"ms": ms, "ms_quartiles": quartiles(ms), "gb_per_s": 4 * NUMBERS_MOVED * n_parameters / quartiles(ms)[1] / 1e6,
                   "time_to_fused": quartiles([a / b for a, b in zip(ms, times["fused"], strict=True)])}
            for form, ms in times.items()}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'AdamW':9} {'ms a step':>10} {'quartiles':>21}  {'GB/s':>7}  {'to fused':>8} (quartiles)"]
    for form, arm in result.items():
        low, median, high = arm["ms_quartiles"]
        ratio = "{1:8.3f} ({0:.3f} - {2:.3f})".format(*arm["time_to_fused"])
        lines.append(f"{form:9} {median:10.2f} {low:9.2f} - {high:9.2f}  {arm['gb_per_s']:7.1f}  {ratio}")
    return "\n".join(lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags and the run's settings. Raises InputError."""
    own, rest = common.parser("optimizer", rounds=10).parse_known_args(argv)
    common.check(own)
    return own, load(rest)


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    device = distributed.start(config).device
    facts = environment(device)
    arms = {form: Arm(form, config, device) for form in tqdm(FORMS, desc="arms", disable=None)}
    n_parameters = sum(p.numel() for p in arms["fused"].parameters)
    print(f"AdamW and clipping on {facts['hardware']['device']}, torch {torch.__version__}: {n_parameters:,} parameters in "
          f"{len(arms['fused'].parameters)} tensors ({config.attention}, {config.n_layer} layers, width {config.n_embd}), "
          f"{own.rounds} rounds", flush=True)
    result = summarize(take_turns(arms, own.rounds), n_parameters)
    print(table(result))
    if own.json:
        write_aside(own.json, json.dumps({"arms": result, "n_parameters": n_parameters, "config": as_dict(config), **facts},
                                         indent=1) + "\n")
    return 0
