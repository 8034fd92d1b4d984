"""A guard against spikes of loss and gradient (skip_spikes), and runs that repeat bit for bit (deterministic)."""

import math
import os
from collections import deque
from typing import Any

import torch

WINDOW = 128  # steps that a new one is held against
MOST_IN_ROW = 10  # spikes; what comes again and again is no spike


class SpikeGuard:
    """Picks the steps to skip: those whose loss or gradient norm lies more than `limit` standard deviations above the mean of the
    last WINDOW steps that were taken. OLMo 2 skips steps by this rule, with 6 standard deviations and 128 steps (OLMo-core's
    SkipStepOptimizer); here a spike does not count among the steps that the next is held against, so that the first does not
    open the door to others.

    After MOST_IN_ROW spikes in a row the next step is taken, and the statistic starts anew: training has moved to another level.

    All is computed from numbers that every rank has, in an order that does not depend on anything else. `limit` 0: no guard."""

    def __init__(self, limit: float):
        self.limit = limit
        self.count = self.in_row = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float, warming_up: bool) -> str:
        """Why a step, of finite numbers, is to be skipped; "" where it is to be taken. In learning rate warm-up all are."""
        if not self.limit:
            return ""
        found = []
        if self.in_row == MOST_IN_ROW:
            self._recent.clear()
        elif not warming_up and len(self._recent) == WINDOW:
            losses, norms = zip(*self._recent, strict=True)
            for name, value, past in (("loss", loss, losses), ("gradient norm", grad_norm, norms)):
                mean = math.fsum(past) / len(past)
                deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in past) / len(past))
                if value > mean + self.limit * deviation:
                    found.append(f"{name} {value:.4f} (mean {mean:.4f}, standard deviation {deviation:.4f})")
        if found:
            self.count += 1
            self.in_row += 1
            return f"spike of {' and '.join(found)}; skipped ({self.in_row} in a row, {self.count} in all)"
        self.in_row = 0
        self._recent.append((loss, grad_norm))
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "in_row": self.in_row, "recent": [list(step) for step in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.in_row = state["count"], state["in_row"]
        self._recent = deque((tuple(step) for step in state["recent"]), maxlen=WINDOW)


def set_deterministic(wanted: bool) -> None:
    """Makes torch take the same algorithm in the same order every time, and raise a RuntimeError where it has none that does.
    For a GPU before anything runs on it: cuBLAS reads its variable when it is first used.

    Under it the backward of flash and of memory-efficient attention adds up in a fixed order, cuDNN's attention is not chosen,
    embeddings' gradients are not added up by atomics, and Inductor times no candidates whose choice would change rounding
    (pytorch/pytorch#165950). FlexAttention adds up by atomics only gradients of tensors that a score_mod captures
    (pytorch/pytorch#137452), and none here captures any."""
    if wanted == torch.are_deterministic_algorithms_enabled():
        return  # the call below imports Inductor, some seconds
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)
