"""What a GPT is: its shape, the switches of its attention's four stages, and presets that name sets of switches. No torch.

    GPTConfig(n_layer=2, n_head=4, n_embd=128, attention="gsxa")                    # as published
    GPTConfig(n_layer=2, n_head=4, n_embd=128, attention="gsxa", gate="off")        # an explicit switch wins

Your own variant: a switch in GPTConfig and its value for plain attention in PLAIN, a line in PRESETS, what the switch does in
model.CausalSelfAttention, its formula in tests/reference.py. The tests take every preset.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args


def few_kv_heads(config: Any) -> int:
    """The largest divisor of n_head that is at most a quarter of it, at least 1; with differential, which pairs them, an even
    one, at least 2."""
    least = 2 if config.differential else 1
    return next((k for k in range(config.n_head // 4, 0, -1) if config.n_head % k == 0 and k % least == 0), least)


# The switches of attention and their values for plain softmax attention; a function takes the configuration.
PLAIN: dict[str, Any] = {
    "n_kv_head": lambda config: config.n_head, "qk_norm": False, "qk_clip": 0.0, "value_residual": False, "position": "rope",
    "logit_softcap": 0.0, "window": 0, "window_pattern": "w",
    "softmax": "softmax", "differential": False,
    "exclusive": "off", "exclusive_layers": "x", "gate": "off",
}


class Preset(NamedTuple):
    """A published attention: the stages that it changes, its paper on arXiv, what it is, its switches other than PLAIN's."""

    stage: str
    paper: str
    line: str
    switches: dict[str, Any]


def quarter(config: Any) -> int:
    return max(1, config.block_size // 4)


PRESETS: dict[str, Preset] = {
    "sa": Preset("-", "1706.03762", "softmax attention, the baseline", {}),
    "xsa": Preset("4", "2603.09078", "exclusive: the output without its part along the own value", {"exclusive": "on"}),
    "xsa_learned": Preset("4", "2603.09078", "exclusive, strength tanh(alpha) per head", {"exclusive": "learned"}),
    "gqa": Preset("1", "2305.13245", "grouped queries, at least four to a kv head", {"n_kv_head": few_kv_heads}),
    "qknorm": Preset("1", "2302.05442", "RMS norm with gains on q and k", {"qk_norm": True}),
    "qkclip": Preset("1", "2507.20534", "q and k scaled down after a step whose logits pass 100", {"qk_clip": 100.0}),
    "resformer": Preset("1", "2410.17897", "value residual: the first layer's values mixed in", {"value_residual": True}),
    "nope": Preset("1", "2305.19466", "no positions", {"position": "nope"}),
    "rnope": Preset("1", "2501.18795", "no positions in every fourth layer", {"position": "rrrn"}),
    "softcap": Preset("2", "2408.00118", "logits soft-capped at 50", {"logit_softcap": 50.0}),
    "swa": Preset("2", "2310.06825", "sliding window of block_size / 4", {"window": quarter}),
    "ssmax": Preset("3", "2501.19399", "scalable softmax: logits times s ln n", {"softmax": "ssmax"}),
    "sink": Preset("3", "2508.10925", "a learned logit per head in the softmax's sum", {"softmax": "sink"}),
    "sigmoid": Preset("3", "2409.04431", "sigmoid for softmax, with QK norm", {"softmax": "sigmoid", "qk_norm": True}),
    "diff": Preset("3", "2410.05258", "difference of two softmax maps", {"differential": True}),
    "gated": Preset("4", "2505.06708", "output gate per head", {"gate": "head"}),
    "gated_element": Preset("4", "2505.06708", "output gate per channel", {"gate": "element"}),
    "qwen3": Preset("1", "2505.09388", "GQA and QK norm", {"n_kv_head": few_kv_heads, "qk_norm": True}),
    "gemma2": Preset("1 2", "2408.00118", "GQA, soft-cap, a window in every other layer",
                     {"n_kv_head": few_kv_heads, "logit_softcap": 50.0, "window": quarter, "window_pattern": "wf"}),
    "gpt_oss": Preset("1 2 3", "2508.10925", "GQA, learned sink, a window in every other layer",
                      {"n_kv_head": few_kv_heads, "softmax": "sink", "window": quarter, "window_pattern": "wf"}),
    "gsxa": Preset("1 3 4", "-", "GQA, QK norm and clip, value residual, ssmax, exclusive, gate per head",
                   {"n_kv_head": few_kv_heads, "qk_norm": True, "qk_clip": 100.0, "value_residual": True, "softmax": "ssmax",
                    "exclusive": "on", "gate": "head"}),
}


def preset_switches(config: Any) -> dict[str, Any]:
    """The switches' values by config's preset; config needs attention, n_head and block_size."""
    values = PLAIN | PRESETS[config.attention].switches
    return {key: value(config) if callable(value) else value for key, value in values.items()}


Attention = Literal[tuple(PRESETS)]
Softmax = Literal["softmax", "ssmax", "sigmoid", "sink"]
Exclusive = Literal["off", "on", "learned"]
Gate = Literal["off", "head", "element"]


@dataclass
class GPTConfig:
    """The shape of a model; the defaults are the paper's baseline at GPT-2's 124M size.

    None stands for the value that the description gives, and is replaced by it. Raises ValueError, naming the key, what was
    wanted and what was found."""

    block_size: Annotated[int, "tokens in a training sequence (T)"] = 2048
    vocab_size: Annotated[int, "rows of the embedding; GPT-2's 50257 padded to a multiple of 64"] = 50304
    n_layer: Annotated[int, "blocks"] = 12
    n_head: Annotated[int, "query heads (H)"] = 12
    n_embd: Annotated[int, "model width (C)"] = 768
    head_dim: Annotated[int | None, "size of a head (d), even, independent of n_embd; None: n_embd / n_head"] = None
    attention: Annotated[Attention, "preset of the switches that follow; an explicit switch wins; list: show them all"] = "sa"
    # Stage 1, projection
    n_kv_head: Annotated[int | None, "key/value heads (K), a divisor of n_head; None, here and below: as the preset says"] = None
    qk_norm: Annotated[bool | None, "RMS norm of every q and k, with gains per head, before RoPE"] = None
    qk_clip: Annotated[float | None, "after a step scale q and k of heads with a logit above it down to it; 0: off"] = None
    value_residual: Annotated[bool | None, "learned mix of the first layer's values into every other layer's"] = None
    position: Annotated[str | None, "rope, nope, or letters r and n repeated over the layers, as rrrn"] = None
    # Stage 2, scores
    logit_softcap: Annotated[float | None, "c tanh(s / c) of every logit s, SSMax's factor included; 0: off"] = None
    window: Annotated[int | None, "keys that a query sees, its own position among them, sinks too only so far; 0: all"] = None
    window_pattern: Annotated[str | None, "letters w (window) and f (full) repeated over the layers"] = None
    # Stage 3, softmax
    softmax: Annotated[Softmax | None, "what makes weights of logits"] = None
    differential: Annotated[bool | None, "difference of two softmax maps, heads in pairs with values of size 2d"] = None
    # Stage 4, output
    exclusive: Annotated[Exclusive | None, "take out the part along the own value; learned: tanh(alpha) of it, per head"] = None
    exclusive_layers: Annotated[str | None, "letters x (exclusive) and s (not) repeated over the layers, as ssxx"] = None
    gate: Annotated[Gate | None, "gate 2 sigmoid(W x) on the heads' outputs"] = None

    n_sink: Annotated[int, "learned sink tokens put before every sequence (paper, Fig 6)"] = 0
    rope_base: Annotated[float, "base of RoPE's frequencies"] = 10000.0
    dropout: Annotated[float, "dropout on embeddings, attention weights and residual branches"] = 0.0
    bias: Annotated[bool, "biases in linear layers and LayerNorms"] = False

    def __post_init__(self):
        def require(condition: bool, key: str, wanted: str) -> None:
            if not condition:
                raise ValueError(f"{key} must be {wanted}, found {getattr(self, key)!r}")

        for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            require(getattr(self, key) >= 1, key, "at least 1")
        require(self.n_sink >= 0, "n_sink", "at least 0")
        # No model is near these: a slip of the keyboard shall not build layers for hours.
        require(self.n_layer <= 1000, "n_layer", "at most 1000")
        for key in ("block_size", "vocab_size", "n_head", "n_embd", "n_sink"):
            require(getattr(self, key) <= 2**24, key, "at most 2**24")
        require(0 <= self.dropout < 1, "dropout", "in [0, 1)")
        require(1 < self.rope_base < math.inf, "rope_base", "a number above 1")
        require(self.attention in PRESETS, "attention", "one of " + ", ".join(PRESETS))
        preset = preset_switches(self)
        for key, value in preset.items():
            if getattr(self, key) is None:
                setattr(self, key, value)

        divides = self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        require(divides, "n_kv_head", f"a divisor of n_head={self.n_head}")
        if self.head_dim is None:
            require(self.n_embd % self.n_head == 0, "n_embd", f"a multiple of n_head={self.n_head} (or set head_dim)")
            self.head_dim = self.n_embd // self.n_head
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", "even, because RoPE rotates pairs of channels")
        require(self.head_dim <= 2**24, "head_dim", "at most 2**24")
        for key in ("qk_clip", "logit_softcap", "window"):
            require(0 <= getattr(self, key) < math.inf, key, "finite and above 0, or 0 for off")
        in_range = self.logit_softcap == 0 or 1e-3 <= self.logit_softcap <= 1e9  # beyond, fp32 has no s / c or no c tanh
        require(in_range, "logit_softcap", "from 1e-3 to 1e9, or 0 for off")
        for key, kind in (("softmax", Softmax), ("exclusive", Exclusive), ("gate", Gate)):
            require(getattr(self, key) in get_args(kind), key, "one of " + ", ".join(get_args(kind)))
        if self.position not in ("rope", "nope"):
            require(_is_pattern(self.position, "rn"), "position", "rope, nope, or letters r and n")
        require(_is_pattern(self.window_pattern, "wf"), "window_pattern", "letters w and f")
        require(_is_pattern(self.exclusive_layers, "xs"), "exclusive_layers", "letters x and s")
        for key, of, on in (("window_pattern", "window", "w"), ("exclusive_layers", "exclusive", "x")):
            pattern, off = getattr(self, key), getattr(self, of) in (0, "off")
            require(not off or pattern == preset[key], of, f"on where {key}={pattern} is given")
            used = any(letter(pattern, layer) == on for layer in range(self.n_layer))
            require(off or used or pattern == preset[key], key, f"one with {on!r} for some of {self.n_layer} layers")
        if 1 in (self.window, self.block_size + self.n_sink):
            key = "window" if self.window == 1 else "block_size"
            require(self.exclusive == "off", key, "at least 2 with exclusive: the own value is all that one key gives")
            require(self.softmax != "ssmax", key, "at least 2 with ssmax, whose factor is 0 for one key")
        if self.differential:
            require(self.n_head % 2 == 0, "n_head", "even with differential, which takes heads in pairs")
            require(self.n_kv_head % 2 == 0, "n_kv_head", "even with differential, which takes heads in pairs")
            require(self.softmax != "sigmoid", "softmax", "another than sigmoid with differential, a difference of softmax maps")
            require(self.dropout == 0, "dropout", "0 with differential, whose maps are each applied twice, with other masks")
        if self.logit_softcap:
            require(self.qk_clip == 0, "qk_clip", "0 with logit_softcap: behind a cap, a logit does not follow its scale")

    def with_attention(self, name: str) -> Self:
        """The same with another preset. Switches that differ from what the present preset says were set on purpose and stay; one
        set to just that cannot be told from it, and becomes what the other says. Raises ValueError as the class does."""
        own = preset_switches(self)
        return replace(self, attention=name, **{key: None for key in own if getattr(self, key) == own[key]})


def letter(pattern: str, layer: int) -> str:
    """Layer `layer`'s letter of a pattern that is repeated over the layers."""
    return pattern[layer % len(pattern)]


def _is_pattern(text: str, letters: str) -> bool:
    return text != "" and set(text) <= set(letters)
