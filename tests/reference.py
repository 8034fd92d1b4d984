"""The GPT by its definitions: explicit T x T matrices, head by head, in the weights' dtype. The slow, plain reference that
model.py is tested against. It shares no code with it, only the names of weights and settings.

Papers, by switch: value_residual 2410.17897, qk_norm 2302.05442, RoPE 2104.09864, ssmax 2501.19399, logit_softcap 2408.00118,
sink 2508.10925, sigmoid 2409.04431, differential 2410.05258, exclusive 2603.09078, gate 2505.06708.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


def logits(config, weights: Weights, idx: Tensor) -> Tensor:
    """idx (B, T) -> (B, T, V)."""
    c, w = config, weights
    x = w["wte.weight"][idx]
    if c.n_sink:
        x = torch.cat((w["sink"].expand(len(x), -1, -1), x), dim=1)
    x = layer_norm(x, w, "ln_emb")
    first_values = None
    for layer in range(c.n_layer):
        prefix = f"h.{layer}."
        block = {name.removeprefix(prefix): p for name, p in w.items() if name.startswith(prefix)}
        own = {name.removeprefix("attn."): p for name, p in block.items()}
        out, first_values = attention(c, layer, own, layer_norm(x, block, "ln_1"), first_values)
        x = x + out
        hidden = linear(layer_norm(x, block, "ln_2"), block, "mlp.c_fc")
        x = x + linear(0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))), block, "mlp.c_proj")
    return layer_norm(x, w, "ln_f")[:, c.n_sink :] @ w["wte.weight"].T


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"))


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, base: float) -> Tensor:
    """x (B, T, d), position t being row t."""
    T, d = x.shape[1:]
    angle = torch.arange(T, dtype=x.dtype)[:, None] * base ** (-2 * torch.arange(d // 2, dtype=x.dtype) / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def attention(config, layer: int, w: Weights, x: Tensor, first_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (B, T, C) and the first layer's values (B, T, K d), where value_residual wants them -> (B, T, C) and the latter."""
    c, T = config, x.shape[1]
    H, K, d = c.n_head, c.n_kv_head, c.head_dim
    size = 2 * d if c.differential else d  # of a value
    window_here = c.window and c.window_pattern[layer % len(c.window_pattern)] == "w"
    rope_here = c.position == "rope" or (c.position != "nope" and c.position[layer % len(c.position)] == "r")
    exclusive_here = c.exclusive != "off" and c.exclusive_layers[layer % len(c.exclusive_layers)] == "x"

    qkv = linear(x, w, "c_attn")
    q, k, v = qkv[..., : H * d], qkv[..., H * d : (H + K) * d], qkv[..., (H + K) * d :]
    if c.value_residual and layer == 0:
        first_values = v
    elif c.value_residual:
        v = w["value_mix"][0] * first_values + w["value_mix"][1] * v

    longest = c.block_size + c.n_sink
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (c.window if window_here else longest))
    maps = []
    for h in range(H):
        qh, kh = q[..., h * d : (h + 1) * d], k[..., h * K // H * d : (h * K // H + 1) * d]
        if c.qk_norm:
            gains = w["qk_gain"].view(H + K, d)
            qh, kh = rms(qh, 1e-6) * gains[h], rms(kh, 1e-6) * gains[H + h * K // H]
        if rope_here:
            qh, kh = rotated(qh, c.rope_base), rotated(kh, c.rope_base)
        s = qh @ kh.transpose(1, 2) / math.sqrt(d)
        if c.softmax == "ssmax":
            s = s * w["ssmax"][h] * torch.log(seen.sum(1, keepdim=True).to(s.dtype))
        if c.logit_softcap:
            s = c.logit_softcap * torch.tanh(s / c.logit_softcap)
        if c.softmax == "sigmoid":
            n = min(c.window, longest) if window_here else longest
            p = torch.where(seen, 1 / (1 + n * torch.exp(-s)), 0)
        else:
            e = torch.where(seen, torch.exp(s), 0)
            p = e / (e.sum(-1, keepdim=True) + (torch.exp(w["sink_logit"][h]) if c.softmax == "sink" else 0))
        maps.append(p)
    if c.differential:
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        lam = torch.exp(w["lambda_q1"] @ w["lambda_k1"]) - torch.exp(w["lambda_q2"] @ w["lambda_k2"]) + start
        maps = [first - lam * second for first, second in zip(maps[::2], maps[1::2], strict=True)]

    heads = []
    for h, p in enumerate(maps):
        g = h * K // H
        vh = v[..., g * size : (g + 1) * size]
        z = p @ vh
        if c.differential:
            z = rms(z, 1e-5) * (1 - start)
        if exclusive_here:
            strength = torch.tanh(w["alpha"][h]) if c.exclusive == "learned" else 1
            z = z - strength * (z * vh).sum(-1, keepdim=True) / (vh * vh).sum(-1, keepdim=True) * vh
        if c.gate != "off":
            rows = 1 if c.gate == "head" else size
            z = z * 2 / (1 + torch.exp(-x @ w["c_gate.weight"][h * rows : (h + 1) * rows].T))
        heads.append(z)
    return linear(torch.cat(heads, dim=-1), w, "c_proj"), first_values
