"""The GPT of "Exclusive Self Attention" (arXiv 2603.09078) in one file: NanoGPT with RoPE in place of learned positions, a
LayerNorm after the token embedding, a head size free of the model width, and an attention that a flag selects.

    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=128, attention="xsa"), seed=0)
    logits, _ = model(idx)              # idx (B, T) -> logits (B, T, V)
    _, loss = model(idx, targets)       # mean cross entropy in nats; the logits are never held as a whole

Shape letters: B batch, T time, C model width, H query heads, K key/value heads, G = H/K, d head size, V vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -1  # a target that takes no part in the loss, as in NanoGPT

Attention = Literal["sa", "xsa"]
Rope = tuple[Tensor, Tensor]


@dataclass
class GPTConfig:
    """The shape of a model; the defaults are the paper's baseline at GPT-2's 124M size.

    None stands for the value that the description gives, and is replaced by it. Raises ValueError, naming the key, what was
    wanted and what was found."""

    block_size: Annotated[int, "tokens in a training sequence (T)"] = 2048
    vocab_size: Annotated[int, "rows of the embedding; GPT-2's 50257 padded to a multiple of 64"] = 50304
    n_layer: Annotated[int, "blocks"] = 12
    n_head: Annotated[int, "query heads (H)"] = 12
    n_kv_head: Annotated[int | None, "key/value heads (K), a divisor of n_head; None: n_head"] = None
    n_embd: Annotated[int, "model width (C)"] = 768
    head_dim: Annotated[int | None, "size of a head (d), even, independent of n_embd; None: n_embd / n_head"] = None
    attention: Annotated[Attention, "sa: softmax attention; xsa: exclusive self attention"] = "sa"
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
        require(0 <= self.dropout < 1, "dropout", "in [0, 1)")
        require(1 < self.rope_base < math.inf, "rope_base", "a number above 1")
        require(self.attention in get_args(Attention), "attention", "one of " + ", ".join(get_args(Attention)))
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        divides = self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        require(divides, "n_kv_head", f"a divisor of n_head={self.n_head}")
        if self.head_dim is None:
            require(self.n_embd % self.n_head == 0, "n_embd", f"a multiple of n_head={self.n_head} (or set head_dim)")
            self.head_dim = self.n_embd // self.n_head
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", "even, because RoPE rotates pairs of channels")


def rope_table(start: int, stop: int, head_dim: int, base: float, like: Tensor) -> Rope:
    """Cosines and sines, each (stop - start, 1, d/2), of RoPE (arXiv 2104.09864) for positions start .. stop - 1.

    At least fp32. Made anew for every forward pass, beside which it costs nothing: a buffer would have to be kept out of
    the state dict, of DDP's broadcasts and of casts to half precision."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    inverse = base ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim)
    angle = torch.arange(start, stop, dtype=dtype, device=like.device)[:, None, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x (B, T, heads, d) rotated: channel i is paired with channel i + d/2, as in GPT-NeoX and Llama. Keeps x's dtype."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


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
        y5, v5 = _by_group(y, v.shape[1]), _by_group(v, v.shape[1])
        a = (y5 * v5).sum(-1, keepdim=True) * _inverse_square(v5)
        z = _by_token(torch.addcmul(y5, a, v5, value=-1), y.dtype)
        return _project(z, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        y, v, weight = ctx.saved_tensors
        dz = (dout @ weight.to(dout.dtype)).unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
        y5, v5, dz5 = (_by_group(t, v.shape[1]) for t in (y, v, dz))
        # With a = y.v/||v||^2 and b = -dz.v/||v||^2 the product rule gives dy = dz + b v and dv = b y - a dz - 2ab v, which
        # is b z - a dy; a kv head gathers dv from its group.
        inverse = _inverse_square(v5)
        a, b = (y5 * v5).sum(-1, keepdim=True) * inverse, (dz5 * v5).sum(-1, keepdim=True) * -inverse
        z = torch.addcmul(y5, a, v5, value=-1)
        dy = torch.addcmul(dz5, b, v5)
        dv = torch.addcmul(b * z, a, dy, value=-1)
        dv = dv.sum(2) if dv.shape[2] > 1 else dv.squeeze(2)
        dweight, dbias = _project_backward(dout, _by_token(z, y.dtype), weight, ctx.needs_input_grad[3])
        return dy.flatten(1, 2).to(y.dtype), dv.to(v.dtype), dweight, dbias


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
    """(B, heads, T, d) -> (B, K, heads/K, T, d), a view, in fp32 or wider."""
    return x.unflatten(1, (n_kv_head, -1)).to(torch.promote_types(x.dtype, torch.float32))


def _by_token(z: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, K, G, T, d) -> (B, T, H*d)."""
    return z.to(dtype).flatten(1, 2).transpose(1, 2).flatten(2)


def _inverse_square(v: Tensor) -> Tensor:
    """1 / ||v||^2 over the last dimension, which stays with size 1; 0 where v is zero or so small that this would overflow."""
    square = (v * v).sum(-1, keepdim=True)
    return torch.where(square >= torch.finfo(v.dtype).tiny, square.reciprocal(), 0)


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
    """Rotated keys and values (B, K, up to `length`, d) of one layer, for decoding."""

    def __init__(self, length: int):
        self.length, self.used = length, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts k, v (B, K, T, d) behind what is there; returns all keys and values so far."""
        if self.used == 0:
            B, K, _, d = k.shape
            self.k, self.v = k.new_empty(B, K, self.length, d), v.new_empty(B, K, self.length, d)
        stop = self.used + k.shape[2]
        self.k[:, :, self.used : stop], self.v[:, :, self.used : stop] = k, v
        self.used = stop
        return self.k[:, :, :stop], self.v[:, :, :stop]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.exclusive = config.attention == "xsa"
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        H, K, d = self.n_head, self.n_kv_head, self.head_dim

        # projection
        qk, v = self.c_attn(x).view(B, T, H + 2 * K, d).split((H + K, K), dim=2)
        q, k = rotate(qk, rope).transpose(1, 2).split((H, K), dim=1)  # (B, H, T, d), (B, K, T, d)
        v = v.contiguous().transpose(1, 2)  # a copy: as a view it would keep the unrotated q and k until backward

        # scores and softmax. With a cache, T > 1 only fills an empty one and T = 1 sees everything: causal in both cases.
        keys, values = cache.append(k, v) if cache is not None else (k, v)
        y = F.scaled_dot_product_attention(
            q, keys, values, is_causal=T > 1, dropout_p=self.dropout if self.training else 0.0, enable_gqa=H != K
        )

        # output. XSA takes the values of the queries' own positions, which are never the cached ones.
        if self.exclusive:
            return ExclusiveProjection.apply(y, v, self.c_proj.weight, self.c_proj.bias)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, H * d))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return GELUProjection.apply(self.c_fc(x), self.c_proj.weight, self.c_proj.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), rope, cache))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """The language model. Weights are drawn from `seed` alone, tensor by tensor: two variants have every weight in common
    that both have. Without a seed one is drawn from torch's global generator.

    `activation_checkpointing`: keep each block's input alone and run the block again in backward."""

    def __init__(self, config: GPTConfig, seed: int | None = None):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        device = torch.get_default_device()
        with torch.device("meta"):  # init_weights sets every tensor, so the modules' own initialisation would be lost work
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.sink = nn.Parameter(torch.empty(config.n_sink, config.n_embd)) if config.n_sink else None
            self.ln_emb = nn.LayerNorm(config.n_embd, bias=config.bias)
            self.drop = nn.Dropout(config.dropout)
            self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
            self.chunk_loss = ChunkLoss()
        self.to_empty(device=device)
        if device.type != "meta":
            self.init_weights(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, 0.02) for matrices, embedding and sinks, divided by sqrt(2 n_layer) for those that write into the residual
        stream; gains 1, biases 0 (GPT-2, NanoGPT)."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
                generator = torch.Generator(p.device).manual_seed(int.from_bytes(digest, "little"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                p.normal_(0.0, std, generator=generator)

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

    def _hidden(self, idx: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """The final LayerNorm's output (B, T, C). Sinks take the first positions and are gone from the result."""
        config = self.config
        if idx.shape[1] > config.block_size:
            raise ValueError(f"a sequence has at most block_size={config.block_size} tokens, found {idx.shape[1]}")
        x = self.wte(idx)
        start = caches[0].used if caches else 0
        sinks = config.n_sink if start == 0 else 0
        if sinks:
            x = torch.cat((self.sink.expand(len(x), -1, -1).to(x.dtype), x), dim=1)
        x = self.drop(self.ln_emb(x))
        rope = rope_table(start, start + x.shape[1], config.head_dim, config.rope_base, like=self.wte.weight)
        for i, block in enumerate(self.h):
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, caches[i] if caches else None)
        return self.ln_f(x[:, sinks:])

    def compile_parts(self) -> None:
        """torch.compile, part by part and in place: one block's code serves all, and no parameter changes its name."""
        for part in (*self.h, self.chunk_loss):
            part.compile()

    def num_params(self) -> int:
        """Weights of the blocks' matrices: the paper's count. Not the embedding (the head is tied to it) and the sinks, nor
        gains and biases, which are 0.01% of the paper's models."""
        return sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and name not in ("wte.weight", "sink"))

    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of one training token: 6 per weight in a matrix product, the tied head included, and
        12 H d T a layer for attention without a discount for the causal half (PaLM, arXiv 2204.02311, appendix B)."""
        config = self.config
        weights = self.num_params() + self.wte.weight.numel()
        return 6 * weights + 12 * config.n_layer * config.n_head * config.head_dim * (config.block_size + config.n_sink)

    @classmethod
    def from_checkpoint(cls, path: str | Path, device: str | torch.device = "cpu") -> "GPT":
        """The model in a checkpoint of train.py, in eval mode. Raises ValueError for any other file."""
        try:
            state = torch.load(path, map_location=device, weights_only=True, mmap=True)
            config = GPTConfig(**{f.name: state["config"][f.name] for f in fields(GPTConfig)})
            with torch.device("meta"):
                model = cls(config)
            model.load_state_dict(state["model"], assign=True)
        except OSError:
            raise
        except Exception as error:  # torch.load raises whatever the bytes provoke
            raise ValueError(f"{path} is not a checkpoint of train.py: {error}") from error
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
        block_size = self.config.block_size
        caches = [KVCache(self.config.n_sink + block_size) for _ in self.h]
        training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                if idx.shape[1] > block_size:
                    x = self._hidden(idx[:, -block_size:])
                else:
                    cached = max(0, caches[0].used - self.config.n_sink)
                    x = self._hidden(idx[:, cached:], caches)
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
