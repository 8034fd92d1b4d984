"""The GPT of "Exclusive Self Attention" (arXiv 2603.09078) in one file: NanoGPT with RoPE in place of learned positions, a
LayerNorm after the token embedding, a head size free of the model width, and an attention whose four stages (projection,
scores, softmax, output) the switches of presets.py change.

    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=128, attention="xsa"), seed=0)
    logits, _ = model(idx)              # idx (B, T) -> logits (B, T, V)
    _, loss = model(idx, targets)       # mean cross entropy in nats; the logits are never held as a whole

Shape letters: B batch, T time, S keys, C model width, H query heads, K key/value heads, G = H/K, d head size, V vocabulary.
"""

import functools
import hashlib
import math
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from presets import GPTConfig, letter

IGNORE = -1  # a target that takes no part in the loss, as in NanoGPT
Mask = Tensor | BlockMask | None  # for F.scaled_dot_product_attention, for FlexAttention, or plainly causal


class Rope(NamedTuple):
    """What attention knows of positions: cosines and sines, each (T, 1, d/2), and how many keys each query sees, (T,)."""

    cos: Tensor
    sin: Tensor
    seen: Tensor


def rope_table(start: int, stop: int, head_dim: int, base: float, like: Tensor) -> Rope:
    """RoPE (arXiv 2104.09864) for positions start .. stop - 1.

    At least fp32. Made anew for every forward pass, beside which it costs nothing: a buffer would have to be kept out of
    the state dict, of DDP's broadcasts and of casts to half precision."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    inverse = base ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim)
    position = torch.arange(start, stop, dtype=dtype, device=like.device)
    angle = position[:, None, None] * inverse
    return Rope(angle.cos(), angle.sin(), position + 1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x (B, T, heads, d) rotated: channel i is paired with channel i + d/2, as in GPT-NeoX and Llama. Keeps x's dtype."""
    return Rotation.apply(x, rope.cos, rope.sin) if torch.is_grad_enabled() else _rotate(x, rope.cos, rope.sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1).to(x.dtype)


class Rotation(torch.autograd.Function):
    """The gradient is rotated back: a third of the operations that autograd would find, and one rounding instead of three."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dout: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(dout, cos, -sin), None, None


class ExclusiveProjection(torch.autograd.Function):
    """XSA (arXiv 2603.09078, Method) and the output projection: z = y - (y.v) / ||v||^2 v at every position and head, so that
    z is orthogonal to v; returns z @ weight.T + bias, (B, T, C).

    y (B, H, T, d) is attention's output, v (B, K, T, d) the values of the same positions; query head h has kv head h // G.
    Dot products and norms are fp32 or wider whatever autocast does; z has y's dtype; where v is zero, z = y.
    One function, because autograd would keep z for the projection and products of y's size for z. This keeps y and v alone,
    which attention's own backward holds anyway: the backward below needs z in passing, and so recomputes it."""

    @staticmethod
    def forward(ctx, y: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, v, weight)
        return _project(exclude(y, v).transpose(1, 2).flatten(2), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        y, v, weight = ctx.saved_tensors
        dy, dv, z = exclude_backward(y, v, dout @ weight.to(dout.dtype))
        return dy, dv, *_project_backward(dout, z, weight, ctx.needs_input_grad[3])


def exclude(y: Tensor, v: Tensor, strength: Tensor | None = None) -> Tensor:
    """XSA without the output projection: y - strength (y.v) / ||v||^2 v, (B, H, T, d), strength (H,) being 1 where it is None."""
    y5, v5 = _by_group(y, v.shape[1]), _by_group(v, v.shape[1])
    a = (y5 * v5).sum(-1, keepdim=True) * _inverse_square(v5)
    if strength is not None:
        a = strength.view(v.shape[1], -1, 1) * a
    return torch.addcmul(y5, a, v5, value=-1).flatten(2, 3).transpose(1, 2).to(y.dtype)


def exclude_backward(y: Tensor, v: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y and v from that of z = exclude(y, v), dz (B, T, H*d); and z again, in dz's shape.

    With a = y.v/||v||^2 and b = -dz.v/||v||^2 the product rule gives dy = dz + b v and dv = b y - a dz - 2ab v, which is
    b z - a dy; a kv head gathers dv from its group."""
    y5, v5 = _by_group(y, v.shape[1]), _by_group(v, v.shape[1])
    dz5 = dz.view_as(y5).to(y5.dtype)
    inverse = _inverse_square(v5)
    a, b = (y5 * v5).sum(-1, keepdim=True) * inverse, (dz5 * v5).sum(-1, keepdim=True) * -inverse
    z = torch.addcmul(y5, a, v5, value=-1)
    dy = torch.addcmul(dz5, b, v5)
    dv = torch.addcmul(b * z, a, dy, value=-1)
    dv = dv.sum(3) if dv.shape[3] > 1 else dv.squeeze(3)
    return dy.flatten(2, 3).transpose(1, 2).to(y.dtype), dv.transpose(1, 2).to(v.dtype), z.to(y.dtype).flatten(2)


class GELUProjection(torch.autograd.Function):
    """gelu(h) @ weight.T + bias, (B, T, C), from h (B, T, 4C). Keeps h alone, and computes gelu(h), the largest activation of
    a block, again in backward."""

    @staticmethod
    def forward(ctx, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(h, weight)
        return _project(F.gelu(h), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        h, weight = ctx.saved_tensors
        dh = torch.ops.aten.gelu_backward(dout @ weight.to(dout.dtype), h)
        return dh, *_project_backward(dout, F.gelu(h), weight, ctx.needs_input_grad[2])


def _project(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in z's dtype, whatever autocast says."""
    with torch.autocast(z.device.type, enabled=False):
        return F.linear(z, weight.to(z.dtype), None if bias is None else bias.to(z.dtype))


def _project_backward(dout: Tensor, z: Tensor, weight: Tensor, need_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of _project's weight and bias."""
    dout, z = dout.flatten(0, -2), z.flatten(0, -2)
    return (dout.T @ z).to(weight.dtype), dout.sum(0).to(weight.dtype) if need_bias else None


def _by_group(x: Tensor, n_kv_head: int) -> Tensor:
    """(B, heads, T, d) -> (B, T, K, heads/K, d), a view in the order in which attention's kernels have their memory, in fp32 or
    wider."""
    return x.transpose(1, 2).unflatten(2, (n_kv_head, -1)).to(torch.promote_types(x.dtype, torch.float32))


def _inverse_square(v: Tensor) -> Tensor:
    """1 / ||v||^2 over the last dimension, which stays with size 1; 0 where v is zero or so small that this would overflow."""
    square = (v * v).sum(-1, keepdim=True)
    return square.masked_fill(square < torch.finfo(v.dtype).tiny, math.inf).reciprocal()


class ChunkLoss(nn.Module):
    """Loss and gradient of some rows of logits (N, V): reads and writes that many numbers and nothing else, so that on a GPU it
    is worth compiling. A module without weights, to be compiled in place as the blocks are."""

    def forward(self, logits: Tensor, targets: Tensor, need_grad: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Summed cross entropy over targets (N,) but IGNORE, in fp32 or wider; with need_grad also its gradient by the logits,
        in their dtype: (N, V) of softmax, and (N, 1) of what belongs in its place at the targets."""
        p = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counted = (targets != IGNORE)[:, None].to(p.dtype)
        top = p.amax(-1, keepdim=True)
        picked = p.gather(-1, targets.clamp(min=0)[:, None]) - top
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        loss = ((total.log() - picked) * counted).sum()
        if not need_grad:
            return loss, None, None
        share = counted / total
        return loss, p.mul_(share).to(logits.dtype), (picked.exp() * share - counted).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of x (N, C) @ weight.T (C, V) against targets (N,), `rows` rows of logits at a time.

    The gradients are taken in the forward pass, while a chunk's logits exist, so that nothing of size N x V is ever held.
    Matrix products in x's dtype, everything else and the result in fp32 or wider. No double backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk_loss: ChunkLoss, rows: int, need_grad: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        w = weight.to(x.dtype)
        loss = x.new_zeros((), dtype=wide)
        dx = torch.empty_like(x) if need_grad else None
        dweight = torch.zeros_like(weight, dtype=wide) if need_grad else None
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            chunk_sum, dlogits, at_target = chunk_loss(x[chunk] @ w.T, targets[chunk], need_grad)
            loss += chunk_sum
            if need_grad:
                # The 1/N of the mean waits until backward, where fp16's loss scale is known: applied here it would round small
                # entries to zero.
                dlogits.scatter_(-1, targets[chunk].clamp(min=0)[:, None], at_target)
                torch.mm(dlogits, w, out=dx[chunk])
                dweight += dlogits.T @ x[chunk]
        n = (targets != IGNORE).sum()
        ctx.save_for_backward(dx, dweight, n)
        return loss / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss: Tensor):
        dx, dweight, n = ctx.saved_tensors
        scale = dloss / n
        # In place: a second backward through the same graph then fails on the saved tensor's version instead of costing V x C.
        return (dx * scale).to(dx.dtype), dweight.mul_(scale), None, None, None, None


def loss_rows(device: torch.device) -> int:
    """Rows of logits that linear_cross_entropy holds at a time: few enough for a CPU's memory, enough to fill a GPU."""
    return 512 if device.type == "cpu" else 4096


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk_loss: ChunkLoss) -> Tensor:
    """Mean cross entropy in nats of logits x (N, C) @ weight.T (C, V), targets (N,) with IGNORE left out; no N x V tensor."""
    rows = loss_rows(x.device)
    # torch's chunked form (2.13 and newer) rounds the loss itself to a half-precision input's dtype, steps of 0.016 at a
    # loss of 3, so it serves fp32 and fp64 alone.
    if hasattr(nn, "LinearCrossEntropyOptions") and x.dtype in (torch.float32, torch.float64):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(x, weight, targets, ignore_index=IGNORE, options=options)
    return LinearCrossEntropy.apply(x, weight, targets, chunk_loss, rows, torch.is_grad_enabled())


class KVCache:
    """Keys and values (B, K, up to `length`, d) of one layer as attention takes them, rotated and mixed, for decoding. Layers
    with a window keep the whole sequence too."""

    def __init__(self, length: int):
        self.length, self.used = length, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts k, v (B, K, T, d) behind what is there; returns all keys and values so far."""
        if self.used == 0:
            self.k, self.v = (t.new_empty(*t.shape[:2], self.length, t.shape[3]) for t in (k, v))
        stop = self.used + k.shape[2]
        self.k[:, :, self.used : stop], self.v[:, :, self.used : stop] = k, v
        self.used = stop
        return self.k[:, :, :stop], self.v[:, :, :stop]


class CausalSelfAttention(nn.Module):
    """Layer `layer`'s attention, in four stages: project, scores, softmax, output. `attend` is scores and softmax by the fastest
    form there is for the variant; `probabilities` is their definition. A parameter exists only in layers that use it."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        H, K, d, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.n_head, self.n_kv_head, self.head_dim = H, K, d
        self.dropout = config.dropout
        self.longest = config.n_sink + config.block_size
        self.starts: dict[str, tuple[float, float]] = {}  # mean and deviation at the start, where not init_weights' usual ones
        self.c_attn = nn.Linear(C, (H + 2 * K) * d, bias=config.bias)
        self.c_proj = nn.Linear(H * d, C, bias=config.bias)

        self.rotated = config.position == "rope" or (config.position != "nope" and letter(config.position, layer) == "r")
        self.qk_norm, self.qk_clip = config.qk_norm, config.qk_clip
        if config.qk_norm:
            self.qk_gain = self._learned("qk_gain", (H + K) * d, 1.0)  # flat, as all but matrices: no weight decay
        self.first_of_residual = config.value_residual and layer == 0
        self.mixes_values = config.value_residual and layer > 0
        if self.mixes_values:
            self.value_mix = self._learned("value_mix", 2, 0.5)

        self.softcap = config.logit_softcap
        self.window = config.window if letter(config.window_pattern, layer) == "w" else 0

        self.softmax, self.differential = config.softmax, config.differential
        self.most_seen = min(self.window or self.longest, self.longest)
        if self.softmax == "ssmax":  # at the start the factor's mean over a sequence is 1
            mean_log = sum(math.log(min(t, self.most_seen)) for t in range(1, self.longest + 1)) / self.longest
            self.ssmax = self._learned("ssmax", H, 1 / (mean_log or 1.0))
        if self.softmax == "sink":
            self.sink_logit = self._learned("sink_logit", H, 0.0)
        if self.differential:
            self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * layer)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, self._learned(name, d, 0.0, 0.1))

        self.exclusive = config.exclusive if letter(config.exclusive_layers, layer) == "x" else "off"
        if self.exclusive == "learned":
            self.alpha = self._learned("alpha", H // self.maps, 0.0)
        self.gate = config.gate
        if self.gate != "off":
            self.c_gate = nn.Linear(C, H // self.maps if self.gate == "head" else H * d, bias=False)
            self.starts["c_gate.weight"] = (0.0, 0.0)

    @property
    def maps(self) -> int:
        """Softmax maps to a head of the output; with two, there are half as many output heads and kv values, twice as wide."""
        return 2 if self.differential else 1

    @property
    def explicit(self) -> bool:
        """Whether the weights are such that no fused kernel knows of them, FlexAttention apart."""
        return bool(self.softcap) or self.softmax == "sigmoid"

    def _learned(self, name: str, size: int, mean: float, std: float = 0.0) -> nn.Parameter:
        self.starts[name] = (mean, std)
        return nn.Parameter(torch.empty(size))

    def forward(
        self, x: Tensor, rope: Rope, v1: Tensor | None = None, mask: Mask = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """x (B, T, C) -> (B, T, C); v1, the first layer's values for later layers; (q, k) where QK-Clip wants to see them.
        `mask` is self.mask's. With a cache, T > 1 only fills an empty one and T = 1 sees everything."""
        q, k, v = self.project(x, rope, v1)
        keys, values = cache.append(k, v) if cache is not None else (k, v)
        y = self.attend(q, keys, values, mask)
        out = self.output(y, v, x)  # XSA takes the values of the queries' own positions, which are never the cached ones
        watched = (q.detach(), k.detach()) if self.qk_clip and self.training else None
        return out, v if self.first_of_residual else v1, watched

    # --- stage 1: projection -----------------------------------------------------------------------------------------------

    def project(self, x: Tensor, rope: Rope, v1: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, d), k (B, K, T, d), v (B, K, T, d), as scores, weighted sum and XSA take them; v is
        (B, K/2, T, 2d) with differential attention.

        SSMax's factor (arXiv 2501.19399), s ln n with n the keys that the query sees, is in q: scores are linear in it."""
        B, T, _ = x.shape
        H, K, d = self.n_head, self.n_kv_head, self.head_dim
        qk, v = self.c_attn(x).view(B, T, H + 2 * K, d).split((H + K, K), dim=2)
        # A copy: as a view v would keep the unrotated q and k until backward.
        v = v.contiguous().view(B, T, -1, self.maps * d).transpose(1, 2)
        if self.mixes_values:
            a, b = self.value_mix.split(1)
            v = (a * v1 + b * v).to(v.dtype)
        if self.qk_norm:
            wide = torch.promote_types(qk.dtype, torch.float32)
            qk = F.rms_norm(qk.to(wide), (d,), eps=1e-6) * self.qk_gain.view(H + K, d)
        if self.rotated:
            qk = rotate(qk, rope)
        q, k = qk.to(v.dtype).transpose(1, 2).split((H, K), dim=1)
        if self.softmax == "ssmax":
            n = rope.seen.clamp(max=self.window) if self.window else rope.seen
            q = (q * (self.ssmax[:, None] * n.log())[..., None]).to(q.dtype)
        return q, k, v

    # --- stage 2: scores ---------------------------------------------------------------------------------------------------

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """Logits (B, H, r, S) of the queries q (B, H, r, d) at positions start .. start + r - 1 with the keys k (B, K, S, d) at
        positions 0 .. S - 1, in q's dtype; -inf where a query does not see a key."""
        B, H, r, d = q.shape
        K, S = k.shape[1:3]
        s = ((q / math.sqrt(d)).reshape(B, K, H // K * r, d) @ k.mT).view(B, H, r, S)
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        i, j = torch.arange(start, start + r, device=s.device)[:, None], torch.arange(S, device=s.device)
        return s.masked_fill(~_sees(i, j, self.window or self.longest), -math.inf)

    # --- stage 3: softmax --------------------------------------------------------------------------------------------------

    def probabilities(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """Weights (B, H, r, S), in fp32 or wider, of the values for queries and keys as `scores` takes them; (B, H/2, r, S)
        of differential attention. What attention is by definition, for analysis."""
        p = self._map(q, k, start)
        return self._difference(p) if self.differential else p

    def _map(self, q: Tensor, k: Tensor, start: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            s = self.scores(q.to(wide), k.to(wide), start)
        if self.softmax == "sigmoid":
            return torch.sigmoid(s - math.log(self.most_seen))  # of weights that sum to about 1 at the start (arXiv 2409.04431)
        if self.softmax == "sink":
            logit = self.sink_logit.to(wide).view(-1, 1, 1).expand(*s.shape[:3], 1)
            return torch.cat((logit, s), dim=-1).softmax(-1)[..., 1:]
        return s.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None) -> Tensor:
        """Weighted sums of values y (B, H, T, d), or (B, H/2, T, 2d) of differential attention, in v's dtype."""
        if q.shape[2] == 1 and self.window:  # one new position at the end of a cache
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        if not self.differential:
            return self._attend(q, k, v, mask)
        # Fused kernels want values of the keys' size, so each map is applied to either half of its pair's values.
        k = k.repeat_interleave(self.n_head // self.n_kv_head, dim=1)
        halves = (half.repeat_interleave(self.n_head // v.shape[1], dim=1) for half in v.chunk(2, dim=-1))
        y = self._difference(torch.cat([self._attend(q, k, half, mask) for half in halves], dim=-1))
        # Differential Transformer's norm of every head (arXiv 2410.05258, Eq 3), without gains, which c_proj has already.
        wide = torch.promote_types(y.dtype, torch.float32)
        return (F.rms_norm(y.to(wide), y.shape[-1:], eps=1e-5) * (1 - self.lambda_start)).to(v.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, BlockMask):
            return self._flex(q, k, v, mask)
        if self.explicit:
            return self._explicit(q, k, v)
        return self._sdpa(q, k, v, mask)

    def _difference(self, maps: Tensor) -> Tensor:
        """(B, H, ...) -> (B, H/2, ...): of each pair the first less lambda times the second (arXiv 2410.05258, Eq 1-2)."""
        first, second = maps.unflatten(1, (-1, 2)).unbind(2)
        a, b = (self.lambda_q1 * self.lambda_k1).sum(-1, keepdim=True), (self.lambda_q2 * self.lambda_k2).sum(-1, keepdim=True)
        return (first - (a.exp() - b.exp() + self.lambda_start) * second).to(maps.dtype)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        T, scale = q.shape[2], None
        if self.softmax == "sink":
            # The sink is a key before all others whose logit is sink_logit and whose value is zero. One more channel carries
            # it: logit sqrt(d) in every query, 1 in the sink's key, 0 in the others. A query more, before all others and
            # thrown away, keeps the causal mask square.
            scale, rows = 1 / math.sqrt(self.head_dim), int(T > 1)
            channel = (self.sink_logit / scale).to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
            q = F.pad(torch.cat((q, channel), dim=-1), (0, 0, rows, 0))
            k, v = F.pad(k, (0, 1, 1, 0)), F.pad(v, (0, 1, 1, 0))
            k[:, :, 0, -1] = 1
            mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, dropout_p=self.dropout if self.training else 0.0,
            scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )
        return y[:, :, -T:, :-1] if self.softmax == "sink" else y

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        """FlexAttention; what is not a change of one logit follows from the log of the softmax's sum."""
        cap, log_n, sigmoid = self.softcap, math.log(self.most_seen), self.softmax == "sigmoid"

        def score_mod(s: Tensor, *_: Tensor) -> Tensor:
            if cap:
                s = cap * torch.tanh(s / cap)
            return -F.softplus(log_n - s) if sigmoid else s

        y, aux = _compiled_flex()(
            q, k, v, score_mod if cap or sigmoid else None, block_mask, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        if sigmoid:  # softmax of log sigmoid, times its sum
            y = y * aux.lse.exp()[..., None]
        if self.softmax == "sink":  # one more term in the sum
            y = y * torch.sigmoid(aux.lse - self.sink_logit[:, None])[..., None]
        return y.to(v.dtype)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the definition, some rows at a time, which autograd does not keep but computes again."""
        T, S = q.shape[2], k.shape[2]

        def rows(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
            p = F.dropout(self._map(q, k, start), self.dropout, self.training)
            with torch.autocast(q.device.type, enabled=False):
                return (p @ v.to(p.dtype).repeat_interleave(p.shape[1] // v.shape[1], dim=1)).to(v.dtype)

        parts, first = [], S - T  # the first query's position
        for chunk in row_chunks(q, S):
            stop = first + chunk.stop
            part = q[:, :, chunk], k[:, :, :stop], v[:, :, :stop], first + chunk.start
            parts.append(checkpoint(rows, *part, use_reentrant=False) if torch.is_grad_enabled() else rows(*part))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def path(self, T: int, device: torch.device) -> Literal["sdpa", "masked", "flex", "explicit"]:
        """How `attend` computes sequences of T. FlexAttention serves training's length alone: each length is compiled anew, and
        past torch's limit it would silently run uncompiled."""
        windowed = 0 < self.window < T
        if device.type == "cuda" and T == self.longest and not self.dropout:
            return "flex" if self.explicit or windowed or self.softmax == "sink" else "sdpa"
        return "explicit" if self.explicit else "masked" if windowed else "sdpa"

    def mask(self, T: int, device: torch.device) -> Mask:
        """What `attend` takes for sequences of T; the same for layers with the same window. Not for compiled code."""
        path = self.path(T, device)
        if path == "flex":
            return block_mask(T, self.window or T, device)
        if path != "masked":
            return None
        i = torch.arange(T, device=device)
        return _sees(i[:, None], i, self.window)

    # --- stage 4: output ---------------------------------------------------------------------------------------------------

    def output(self, y: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """y (B, H, T, d) of `attend`, v and x of the same positions -> (B, T, C): XSA, gate, projection."""
        if self.gate == "head":  # it commutes with XSA, whose function has the projection in it
            y = (y * self.gates(x)).to(y.dtype)
        if self.exclusive == "on" and self.gate != "element" and torch.is_grad_enabled():
            return ExclusiveProjection.apply(y, v, self.c_proj.weight, self.c_proj.bias)
        if self.exclusive != "off":
            y = exclude(y, v, self.alpha.tanh() if self.exclusive == "learned" else None)
        if self.gate == "element":
            y = (y * self.gates(x)).to(y.dtype)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def gates(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, H, T, 1), or (B, H, T, d) with a gate per element, in fp32 or wider; exactly 1 at the start."""
        gates = 2 * torch.sigmoid(self.c_gate(x).to(torch.promote_types(x.dtype, torch.float32)))
        return gates.unflatten(-1, (self.n_head // self.maps, -1)).transpose(1, 2)

    # --- QK-Clip (arXiv 2507.20534) ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def largest_logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Largest logit (H,) of all queries q (B, H, T, d) and the keys k (B, K, T, d) that they see, in fp32."""
        wide = torch.promote_types(q.dtype, torch.float32)  # bf16 has steps of half a logit at 100
        q, k = q.to(wide), k.to(wide)
        with torch.autocast(q.device.type, enabled=False):
            chunks = (self.scores(q[:, :, c], k[:, :, : c.stop], c.start).amax(dim=(0, 2, 3)) for c in row_chunks(q, k.shape[2]))
            return functools.reduce(torch.maximum, chunks).float()

    @torch.no_grad()
    def qk_clip_(self, largest: Tensor) -> Tensor:
        """Scales q and k of heads whose `largest` (H,) passes qk_clip so that it would not have; under QK norm by the gains, the
        norm undoing any other scale. A kv head's queries are scaled alike, by the largest of them. Returns which kv heads (K,)
        were."""
        H, K, d = self.n_head, self.n_kv_head, self.head_dim
        largest = largest.view(K, H // K).amax(1)
        clipped = largest > self.qk_clip
        root = torch.where(clipped, self.qk_clip / largest, 1.0).sqrt()
        scale = torch.cat((root.repeat_interleave(H // K), root)).repeat_interleave(d)
        if self.qk_norm:
            self.qk_gain.mul_(scale)
        else:  # the rows of v too, by 1: part of a sharded weight could not be changed
            scale = F.pad(scale, (0, K * d), value=1.0)
            self.c_attn.weight.mul_(scale[:, None])
            if self.c_attn.bias is not None:
                self.c_attn.bias.mul_(scale)
        return clipped


def _sees(i: Tensor, j: Tensor, window: int) -> Tensor:
    """Whether the query at position i sees the key at position j: `window` keys up to its own, which is one of them."""
    return (j <= i) & (i - j < window)


def row_chunks(q: Tensor, n_keys: int) -> Iterator[slice]:
    """Rows of q (B, H, T, d) whose logits are few enough to be held: 64 MB in fp32 on a CPU, on a GPU enough to fill it."""
    B, H, T, _ = q.shape
    rows = max(1, 2 ** (24 if q.device.type == "cpu" else 27) // (B * H * n_keys))
    return (slice(start, min(start + rows, T)) for start in range(0, T, rows))


@functools.lru_cache(maxsize=8)
def block_mask(T: int, window: int, device: torch.device) -> BlockMask:
    """FlexAttention's form of the causal mask with a window: which blocks of the T x T logits are computed at all."""
    return create_block_mask(lambda b, h, i, j: _sees(i, j, window), None, None, T, T, device=device)


@functools.cache
def _compiled_flex() -> Any:
    """Uncompiled, FlexAttention would hold all T x T logits. Inside a compiled block this is compiled with it."""
    return torch.compile(flex_attention, dynamic=False)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c_fc(x)
        if not torch.is_grad_enabled():  # in decoding an autograd function takes as long as the products of one token
            return self.c_proj(F.gelu(h))
        return GELUProjection.apply(h, self.c_proj.weight, self.c_proj.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rope: Rope, v1: Tensor | None = None, mask: Mask = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """As CausalSelfAttention.forward, around the residual stream."""
        y, v1, watched = self.attn(self.ln_1(x), rope, v1, mask, cache)
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.ln_2(x))), v1, watched


class GPT(nn.Module):
    """The language model. Weights are drawn from `seed` alone, tensor by tensor: two variants have every weight in common
    that both have. Without a seed one is drawn from torch's global generator.

    `activation_checkpointing`: keep each block's input alone and run the block again in backward.

    `max_logits`: with qk_clip, the largest logit (n_layer, H) of the forward passes in training mode since it was last taken;
    None before the first. A plain tensor: a buffer would be broadcast by DDP."""

    def __init__(self, config: GPTConfig, seed: int | None = None):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.max_logits: Tensor | None = None
        device = torch.get_default_device()
        with torch.device("meta"):  # init_weights sets every tensor, so the modules' own initialisation would be lost work
            # Drawing weights, even those without data, would import torch's compiler, which decoding never needs: a second.
            self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
            self.sink = nn.Parameter(torch.empty(config.n_sink, config.n_embd)) if config.n_sink else None
            self.ln_emb = nn.LayerNorm(config.n_embd, bias=config.bias)
            self.drop = nn.Dropout(config.dropout)
            self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
            self.chunk_loss = ChunkLoss()
        self.to_empty(device=device)
        if device.type != "meta":
            self.init_weights(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, 0.02) for matrices, embedding and sinks, divided by sqrt(2 n_layer) for those that write into the residual
        stream; gains 1, biases 0 (GPT-2, NanoGPT); what else attention learns, as its modules say."""
        starts = {f"h.{i}.attn.{name}": start for i, block in enumerate(self.h) for name, start in block.attn.starts.items()}
        for name, p in self.named_parameters():
            if name in starts:
                mean, std = starts[name]
            elif p.ndim == 1:
                mean, std = 0.0 if name.endswith("bias") else 1.0, 0.0
            else:
                mean, std = 0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            generator = torch.Generator(p.device).manual_seed(int.from_bytes(digest, "little"))
            p.normal_(mean, std, generator=generator) if std else p.fill_(mean)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx (B, T), T <= block_size -> (logits (B, T, V) of every position, None).
        With targets (B, T), IGNORE where there is none -> (None, mean cross entropy in nats), without holding the logits."""
        x = self._hidden(idx)
        if targets is None:
            return F.linear(x, self.wte.weight), None
        if torch.is_autocast_enabled(x.device.type):  # as it would for F.linear; LayerNorm's result is fp32
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            return None, linear_cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten(), self.chunk_loss)

    def _hidden(self, idx: Tensor, caches: list[KVCache] | None = None, table: Rope | None = None) -> Tensor:
        """The final LayerNorm's output (B, T, C). Sinks take the first positions and are gone from the result."""
        if idx.shape[1] > self.config.block_size:
            raise ValueError(f"a sequence has at most block_size={self.config.block_size} tokens, found {idx.shape[1]}")
        x, rope = self.embed(idx, caches[0].used if caches else 0, table)
        masks: dict[int, Mask] = {}
        v1, largest = None, []
        for i, block in enumerate(self.h):
            if (window := block.attn.window) not in masks:
                masks[window] = block.attn.mask(x.shape[1], x.device)
            if self.activation_checkpointing and self.training:
                x, v1, watched = checkpoint(block, x, rope, v1, masks[window], use_reentrant=False)
            else:
                x, v1, watched = block(x, rope, v1, masks[window], caches[i] if caches else None)
            if watched is not None:  # outside of the block, whose compiled code the loop over chunks would swell
                largest.append(block.attn.largest_logits(*watched))
        if largest:
            found = torch.stack(largest)
            self.max_logits = found if self.max_logits is None else torch.maximum(self.max_logits, found)
        return self.ln_f(x[:, -idx.shape[1] :])

    def embed(self, idx: Tensor, start: int = 0, table: Rope | None = None) -> tuple[Tensor, Rope]:
        """What the first block takes: idx (B, T) at positions from `start` on embedded, at the very start behind the sinks.
        `table`, of positions from 0 on, saves its making."""
        config = self.config
        x = self.wte(idx)
        if config.n_sink and start == 0:
            x = torch.cat((self.sink.expand(len(x), -1, -1).to(x.dtype), x), dim=1)
        stop = start + x.shape[1]
        if table is None:
            rope = rope_table(start, stop, config.head_dim, config.rope_base, like=self.wte.weight)
        else:
            rope = Rope(*(t[start:stop] for t in table))
        return self.drop(self.ln_emb(x)), rope

    def take_max_logits(self) -> Tensor:
        """max_logits (n_layer, H) of the step's forward passes on this rank, which are forgotten. The step's are their maximum
        over ranks; for qk_clip_ if the optimizer made its step, for nothing if it did not."""
        found, self.max_logits = self.max_logits, None
        if found is None:
            raise ValueError("no forward pass in training mode with qk_clip since max_logits was last taken")
        return found

    def qk_clip_(self, max_logits: Tensor) -> Tensor:
        """QK-Clip (arXiv 2507.20534, Alg 1) after an optimizer step, by the largest logits (n_layer, H) of its whole batch.
        Returns which kv heads were scaled, bool (n_layer, K)."""
        return torch.stack([block.attn.qk_clip_(largest) for block, largest in zip(self.h, max_logits, strict=True)])

    def attention_path(self, device: torch.device) -> str:
        """What computes attention in training on `device`, and in how many layers, for people to read."""
        names = {"sdpa": "fused (SDPA)", "masked": "fused with a mask (SDPA)", "flex": "FlexAttention, compiled",
                 "explicit": "explicit, some rows at a time"}
        counts = Counter(names[block.attn.path(block.attn.longest, device)] for block in self.h)
        return ", ".join(name if len(counts) == 1 else f"{name} in {n} layers" for name, n in counts.items())

    def compile_parts(self) -> None:
        """torch.compile, part by part and in place: one block's code serves all, and no parameter changes its name."""
        for part in (*self.h, self.chunk_loss):
            part.compile()

    def num_params(self) -> int:
        """Weights of the blocks' matrices: the paper's count. Not the embedding (the head is tied to it) and the sinks, nor
        gains and biases, which are 0.01% of the paper's models."""
        return sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and name not in ("wte.weight", "sink"))

    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of one training token: 6 per weight in a matrix product, the tied head included, and per
        layer 12 H d for every key that a query sees, without a discount for the causal half (PaLM, arXiv 2204.02311, appendix
        B): all T of them, or the window's. Differential attention's values are 2d wide, 18 H d in place of 12. GQA saves weights
        alone. Whatever is no matrix product is not counted, nor is what an implementation does twice."""
        config = self.config
        weights = self.num_params() + self.wte.weight.numel()
        keys = sum(block.attn.most_seen for block in self.h)
        return 6 * weights + (18 if config.differential else 12) * config.n_head * config.head_dim * keys

    def kv_cache_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Of one sequence in decoding; layers with a window keep all of it too, as KVCache does."""
        config = self.config
        return 2 * config.n_layer * config.n_kv_head * config.head_dim * bytes_per_number

    @classmethod
    def from_checkpoint(cls, path: str | Path, device: str | torch.device = "cpu") -> "GPT":
        """The model in a checkpoint of train.py, in eval mode. Raises OSError for a file that cannot be opened, ValueError for
        any other file."""
        with open(path, "rb"):
            pass
        try:
            with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums that it wrote
                if (bad := archive.testzip()) is not None:
                    raise ValueError(f"checksum of {bad} does not match")
            state = torch.load(path, map_location=device, weights_only=True, mmap=True)
            names = {f.name for f in fields(GPTConfig)}
            config = GPTConfig(**{key: value for key, value in state["config"].items() if key in names})
            with torch.device("meta"):
                model = cls(config)
            model.load_state_dict(state["model"], assign=True)
        except pickle.UnpicklingError:  # torch advises to load it all the same, and run the code in it
            raise ValueError(f"{path} is not a checkpoint of train.py: it holds more than tensors and plain Python") from None
        except Exception as error:  # torch.load raises whatever the bytes provoke
            raise ValueError(f"{path} is not a checkpoint of train.py: {str(error) or type(error).__name__}") from error
        return model.eval()

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        n_vocab: int | None = None,
    ) -> Tensor:
        """Continues idx (B, T), T >= 1 -> (B, T + max_new_tokens).

        temperature 0 is greedy. top_k keeps the k likeliest tokens. seed makes the draw repeatable without touching torch's
        global generator. n_vocab keeps to ids below it, where the embedding has padding rows that no text ever uses.

        Up to block_size tokens a KV cache is used. Beyond, each token is predicted from the last block_size tokens, as in
        NanoGPT; cached values there have seen tokens that left the window, so every such token costs a whole forward pass."""
        if idx.ndim != 2 or idx.shape[1] < 1:
            raise ValueError(f"generate wants idx of shape (B, T) with T at least 1, found {tuple(idx.shape)}")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"generate wants a finite temperature >= 0 and top_k >= 1, found {temperature} and {top_k}")
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        config, block_size = self.config, self.config.block_size
        length = config.n_sink + block_size
        caches = [KVCache(length) for _ in self.h]
        table = rope_table(0, length, config.head_dim, config.rope_base, like=self.wte.weight)
        training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                if idx.shape[1] > block_size:
                    x = self._hidden(idx[:, -block_size:], table=table)
                else:
                    cached = max(0, caches[0].used - config.n_sink)
                    x = self._hidden(idx[:, cached:], caches, table)
                logits = F.linear(x[:, -1], self.wte.weight)[:, :n_vocab]
                idx = torch.cat((idx, _sample(logits, temperature, top_k, generator)), dim=1)
        finally:
            self.train(training)
        return idx


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """logits (B, V) -> ids (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # 0 and below: a tiny temperature gives no infinity
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
