"""model.py against independent references: Hugging Face models, formulas in fp64, finite differences, brute force. Attention's
methods and presets have tests/test_attention.py."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from configurator import load
from model import (
    GPT,
    IGNORE,
    ChunkLoss,
    ExclusiveProjection,
    GELUProjection,
    GPTConfig,
    LinearCrossEntropy,
    linear_cross_entropy,
    rope_table,
    rotate,
)
from scripts.bench.decode import as_gpt_neox

VARIANTS = ["sa", "xsa"]
TINY = {"block_size": 16, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32}


def tiny(attention="sa", seed=0, **changes) -> GPT:
    """A small model in fp64, its weights larger than at the start so that attention is far from uniform."""
    model = GPT(GPTConfig(**TINY | {"attention": attention} | changes), seed=seed).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5) if p.ndim == 2 else None
    return model


def tokens(B=2, T=11, seed=0) -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


# --- the whole model against Hugging Face ------------------------------------------------------------------------------------


def test_logits_equal_gpt_neox_with_the_same_weights():
    """GPT-NeoX has the paper's parts: LayerNorm, full rotary in halves, 4x exact GELU, sequential residual."""
    pytest.importorskip("transformers")
    ours = tiny(bias=True)
    with torch.no_grad():
        for p in ours.parameters():
            if p.ndim == 1:  # gains and biases as training would leave them: not 1 and 0
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    theirs = as_gpt_neox(ours)
    idx = tokens()
    # Hugging Face's rotary table is fp32 whatever the model is.
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)


def test_rope_depends_on_the_difference_of_positions_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i, j):
        return (rotate(q, rope_table(i, i + 1, 16, 1e4, q)) * rotate(k, rope_table(j, j + 1, 16, 1e4, k))).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.isclose(score(7, 3), score(7, 4))


# --- XSA -------------------------------------------------------------------------------------------------------------------


def paper_xsa(y, v):
    """PAPER: z_i = y_i - (y_i . v_i) / ||v_i||^2 v_i, kv heads repeated for their group."""
    v = v.repeat_interleave(y.shape[1] // v.shape[1], dim=1)
    return y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v


def xsa(y, v):
    """XSA alone: the projection is the identity."""
    B, H, T, d = y.shape
    return ExclusiveProjection.apply(y, v, torch.eye(H * d, dtype=y.dtype), None).view(B, T, H, d).transpose(1, 2)


def random_yv(H=4, K=2, dtype=torch.float64, d=8, T=5):
    g = torch.Generator().manual_seed(H * 10 + K)
    return tuple(torch.randn(2, heads, T, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for heads in (H, K))


@pytest.mark.parametrize("H, K", [(4, 4), (4, 2), (6, 1)])
def test_xsa_and_its_gradients_equal_the_formula_in_fp64(H, K):
    y, v = random_yv(H, K)
    z, expected = xsa(y, v), paper_xsa(y, v)
    torch.testing.assert_close(z, expected)
    assert (z * v.repeat_interleave(H // K, dim=1)).sum(-1).abs().max() < 1e-14
    upstream = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(3))
    found, wanted = (torch.autograd.grad(t, (y, v), upstream) for t in (z, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(xsa, (y, v))


def test_xsa_with_its_projection_passes_gradcheck():
    y, v = random_yv()
    weight, bias = torch.randn(6, 32, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = ExclusiveProjection.apply(y, v, weight, bias)
    torch.testing.assert_close(found, F.linear(paper_xsa(y, v).transpose(1, 2).flatten(2), weight, bias))
    assert torch.autograd.gradcheck(ExclusiveProjection.apply, (y, v, weight.requires_grad_(), bias.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_xsa_keeps_the_dtype_and_computes_in_fp32(dtype):
    """Half-precision inputs: the error is that of rounding the result, also under autocast."""
    y, v = random_yv(dtype=dtype, d=64)
    with torch.autocast("cpu", torch.bfloat16):
        z = xsa(y, v)
    assert z.dtype == dtype
    exact = paper_xsa(y.double(), v.double())
    eps = torch.finfo(dtype).eps
    assert (z.double() - exact).abs().max() <= eps * (exact.abs().max() + y.double().abs().max() * 0.01)
    dy, dv = torch.autograd.grad(z, (y, v), torch.ones_like(z))
    assert dy.dtype == dv.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_xsa_of_a_zero_value_is_finite_with_its_gradients(dtype):
    y, v = random_yv(dtype=dtype)
    with torch.no_grad():
        v[0, 0, 2] = 0
        for t, size in enumerate((1e-19, 1e-22, 1e-30)):  # squares normal, subnormal and zero in fp32
            v[1, 1, t] = size * torch.randn(8, generator=torch.Generator().manual_seed(t))
    z = xsa(y, v)
    z.sum().backward()
    assert torch.equal(z[0, :2, 2], y[0, :2, 2])
    assert all(t.isfinite().all() for t in (z, y.grad, v.grad))


def test_xsa_saves_nothing_beyond_y_and_v():
    y, v = random_yv()
    weight = torch.eye(32, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ExclusiveProjection.apply(y, v, weight, None)
    assert {t.data_ptr() for t in saved} == {y.data_ptr(), v.data_ptr(), weight.data_ptr()}


def test_gelu_projection_keeps_its_input_alone():
    g = torch.Generator().manual_seed(0)
    shapes = (2, 3, 8), (5, 8), (5,)
    h, weight, bias = (torch.randn(shape, dtype=torch.float64, generator=g, requires_grad=True) for shape in shapes)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = GELUProjection.apply(h, weight, bias)
    assert {t.data_ptr() for t in saved} == {h.data_ptr(), weight.data_ptr()}
    exact = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    torch.testing.assert_close(found, exact @ weight.T + bias)
    assert torch.autograd.gradcheck(GELUProjection.apply, (h, weight, bias))


@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 2}, {"head_dim": 24, "bias": True}], ids=str)
def test_first_position_of_xsa_is_zero(shape):
    """Position 0 attends to itself alone, so y_0 = v_0 and z_0 = 0: its attention output is the projection's bias."""
    attn = tiny("xsa", **shape).h[0].attn
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    out = attn(x, rope_table(0, 5, attn.head_dim, 10000.0, like=x))[0][:, 0]
    bias = torch.zeros(32, dtype=torch.float64) if attn.c_proj.bias is None else attn.c_proj.bias
    torch.testing.assert_close(out, bias.expand_as(out), rtol=0, atol=1e-13)


# --- the whole model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", VARIANTS)
def test_sinks_are_learned_and_seen_but_not_predicted(attention):
    model, idx = tiny(attention, n_sink=2), tokens()
    logits, _ = model(idx)
    assert logits.shape == (2, 11, TINY["vocab_size"])
    _, loss = model(idx, idx)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), idx.flatten()))
    loss.backward()
    assert (model.sink.grad.abs().amax(dim=1) > 1e-9).all()
    # A sink is a token before the sequence: the same logits when it is written into the vocabulary and put there.
    plain = GPT(dataclasses.replace(model.config, n_sink=0, vocab_size=TINY["vocab_size"] + 2)).double().eval()
    state = {k: v for k, v in model.state_dict().items() if k != "sink"}
    plain.load_state_dict(state | {"wte.weight": torch.cat((model.wte.weight, model.sink))})
    written = torch.tensor([[61, 62]]).expand(2, 2)
    expected = plain(torch.cat((written, idx), dim=1))[0][:, 2:, :61]
    torch.testing.assert_close(logits, expected)


def test_variants_differ_in_attention_alone():
    sa, xsa = GPT(GPTConfig(**TINY), seed=3), GPT(GPTConfig(**TINY, attention="xsa"), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(sa.state_dict().values(), xsa.state_dict().values(), strict=True))
    assert (sa(tokens())[0] - xsa(tokens())[0]).abs().max() > 1e-4


@pytest.mark.slow  # torch.compile builds C++ code
@pytest.mark.parametrize("attention", [*VARIANTS, "gsxa"])
def test_compiled_blocks_equal_eager_ones(attention):
    plain, compiled = tiny(attention, n_kv_head=2), tiny(attention, n_kv_head=2)
    names = list(compiled.state_dict())
    compiled.compile_parts()
    for dtype in (torch.float64, torch.bfloat16):
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model.to(torch.promote_types(dtype, torch.float32))(tokens(), tokens(seed=1))[1]
            loss.backward()
            results.append([loss, *(p.grad for p in model.parameters())])
        for a, b in zip(*results, strict=True):
            assert (a - b).norm() <= (1e-9 if dtype == torch.float64 else 0.05) * a.norm()
    assert list(compiled.state_dict()) == names


# --- the loss ----------------------------------------------------------------------------------------------------------------


def loss_inputs(dtype, N=37, C=16, V=101):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, C, generator=g), torch.randn(V, C, generator=g)
    targets = torch.randint(0, V, (N,), generator=g)
    targets[::5] = IGNORE
    return x.to(dtype).requires_grad_(), w.requires_grad_(), targets


def own_form(x, w, targets):
    return LinearCrossEntropy.apply(x, w, targets, ChunkLoss(), 8, True)


def chosen_form(x, w, targets):
    return linear_cross_entropy(x, w, targets, ChunkLoss())


@pytest.mark.parametrize("form", [own_form, chosen_form])
def test_chunked_loss_and_gradients_equal_the_plain_ones(form):
    x, w, targets = loss_inputs(torch.float64)
    w = w.detach().double().requires_grad_()
    found, expected = form(x, w, targets), F.cross_entropy(x @ w.T, targets, ignore_index=IGNORE)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, (x, w), torch.tensor(3.0, dtype=torch.float64))
    for a, b in zip(torch.autograd.grad(found, (x, w), torch.tensor(3.0, dtype=torch.float64)), theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loss_is_fp32_and_its_gradients_survive(dtype):
    """The loss keeps fp32's resolution; small gradients are not lost to fp16's range before the loss scale is known."""
    x, w, targets = loss_inputs(dtype)
    loss = chosen_form(x, w, targets)
    exact = F.cross_entropy(x.double() @ w.to(dtype).double().T, targets, ignore_index=IGNORE)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.01  # rounding of the logits; a half-precision loss alone would be 0.03 off
    scale = 2.0**16
    dx, dw = torch.autograd.grad(loss, (x, w), torch.tensor(scale))
    ex, ew = torch.autograd.grad(exact, (x, w))
    assert dw.dtype == torch.float32 and dx.dtype == dtype
    assert (dw.double() / scale - ew.double()).norm() < 0.02 * ew.double().norm()
    assert (dx.double() / scale - ex.double()).norm() < 0.02 * ex.double().norm()


def test_second_backward_through_the_own_loss_is_refused():
    x, w, targets = loss_inputs(torch.float32)
    loss = own_form(x, w, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_logits_are_never_materialised():
    """No tensor of N x V elements appears in a training step's forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel())
            return out

    B, T, V = 8, 256, 1031
    model = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=1, n_head=2, n_embd=16), seed=0)
    idx = torch.randint(0, V, (B, T))
    for dtype in (torch.float32, torch.bfloat16):
        with Watch(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            model(idx, idx)[1].backward()
        assert 0 < largest < B * T * V / 2


# --- shape, initialisation, generation, loading ------------------------------------------------------------------------------


@pytest.mark.parametrize("config, billions", [("0.7b", 0.679), ("1.4b", 1.409), ("2.7b", 2.684)])
@pytest.mark.parametrize("attention", VARIANTS)
def test_paper_sizes(config, billions, attention):
    """Table 1, in the digits that it gives."""
    settings = load([f"config/{config}.py", f"--attention={attention}"])
    with torch.device("meta"):
        model = GPT(settings.model_config())
    assert round(model.num_params() / 1e9, 3) == billions
    C, inner = settings.n_embd, settings.n_head * settings.head_dim
    assert model.num_params() == settings.n_layer * (4 * C * inner + 8 * C * C)
    matrices = settings.n_layer * (4 * C * inner + 8 * C * C) + settings.vocab_size * C
    assert model.flops_per_token() == 6 * matrices + 12 * settings.n_layer * inner * settings.block_size


def test_initialisation():
    config = GPTConfig(n_layer=8, n_head=4, n_embd=256, vocab_size=1000, bias=True, n_sink=4)
    model = GPT(config, seed=1)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            error = 5 / math.sqrt(p.numel())  # five standard errors of mean and deviation
            assert abs(p.mean() / std) < error and abs(p.std() / std - 1) < error, name
    # The first loss: logits are N(0, 0.02^2 C), but for the input token's own, which the embedding's LayerNorm and the tied
    # head put at 0.02 C.
    g = torch.Generator().manual_seed(0)
    idx, targets = torch.randint(0, 1000, (2, 4, 64), generator=g)
    expected = math.log(math.exp(0.02 * 256) + 1000 * math.exp(0.02**2 * 256 / 2))
    assert model(idx, targets)[1].item() == pytest.approx(expected, abs=0.1)


def test_weights_come_from_the_seed_alone():
    state = torch.get_rng_state()
    a, b, c = (GPT(GPTConfig(**TINY), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.wte.weight, b.wte.weight) and not torch.equal(a.wte.weight, c.wte.weight)
    deeper = GPT(GPTConfig(**TINY | {"n_sink": 2, "n_kv_head": 4}), seed=1)
    assert torch.equal(a.h[1].mlp.c_fc.weight, deeper.h[1].mlp.c_fc.weight)
    torch.manual_seed(5)
    d = GPT(GPTConfig(**TINY))
    torch.manual_seed(5)
    assert torch.equal(d.wte.weight, GPT(GPTConfig(**TINY)).wte.weight)


def test_generate_draws_from_the_softmax():
    """Temperature and top-k as frequencies over many draws of one next token."""
    model = tiny()
    idx = tokens(B=1).expand(20_000, -1)
    logits = model(idx[:1])[0][0, -1]
    found = model.generate(idx, 1, temperature=0.7, top_k=5, seed=1)[:, -1]
    kept = logits.topk(5).indices
    expected = torch.zeros_like(logits).index_copy(0, kept, (logits[kept] / 0.7).softmax(0))
    frequency = torch.bincount(found, minlength=len(logits)) / len(found)
    assert (frequency - expected).abs().max() < 0.02
    assert set(found.tolist()) <= set(kept.tolist())


def test_generate_is_repeatable_and_leaves_the_global_generator():
    model, state = tiny(n_sink=1).train(), torch.get_rng_state()
    a, b, c = (model.generate(tokens(), 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert (model.generate(tokens(), 200, temperature=5.0, seed=1, n_vocab=7)[:, 11:] < 7).all()
    assert model.generate(tokens(), 0).shape == (2, 11)


@pytest.mark.parametrize("arguments", [{"temperature": -1.0}, {"top_k": 0}, {"idx": torch.zeros(2, 0, dtype=torch.long)}])
def test_generate_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="generate wants"):
        tiny().generate(**{"idx": tokens(), "max_new_tokens": 1} | arguments)


@pytest.mark.parametrize("changes, key", [
    ({"n_layer": 0}, "n_layer"), ({"n_kv_head": 3}, "n_kv_head"), ({"n_embd": 30}, "n_embd"), ({"head_dim": 7}, "head_dim"),
    ({"attention": "xxa"}, "attention"), ({"dropout": 1.0}, "dropout"), ({"n_sink": -1}, "n_sink"),
    ({"rope_base": 0.5}, "rope_base"),
])
def test_impossible_shapes_are_refused_by_key(changes, key):
    with pytest.raises(ValueError, match=f"^{key} must be .*, found "):
        GPTConfig(**TINY | changes)


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="block_size=16 tokens, found 17"):
        tiny()(tokens(T=17))


def test_from_checkpoint(tmp_path):
    model = GPT(GPTConfig(**TINY, attention="xsa", n_sink=2), seed=1)
    path = tmp_path / "c.pt"
    settings = dataclasses.asdict(load([])) | dataclasses.asdict(model.config)
    torch.save({"config": settings, "model": model.state_dict()}, path)
    loaded = GPT.from_checkpoint(path)
    assert loaded.config == model.config and not loaded.training
    assert torch.equal(loaded(tokens())[0], model(tokens())[0])
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="c.pt is not a checkpoint"):
        GPT.from_checkpoint(path)


def test_generating_loads_no_compiler():
    """torch's, a second of every start: nothing that needs it may come into the way from a model to its text."""
    program = ("import sys, torch; from model import GPT, GPTConfig; "
               "model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=7, block_size=8), seed=0); "
               "model.generate(torch.zeros(1, 2, dtype=torch.long), 2); sys.exit('torch._dynamo' in sys.modules)")
    result = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or "torch._dynamo was imported"
