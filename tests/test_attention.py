"""Attention's methods and presets, each by itself and combined, against tests/reference.py, public code, limits and one another.

A new preset is tested by being in presets.PRESETS, a combination by a line in COMBINATIONS; what the method is by its formula in
tests/reference.py, and where it is plain attention by a line in PLAIN_WHERE."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import model as model_module
from model import GPT, CausalSelfAttention, Rope, block_mask, rope_table
from presets import PRESETS, GPTConfig
from tests import reference

TINY = {"block_size": 16, "vocab_size": 61, "n_layer": 4, "n_head": 8, "n_embd": 32, "head_dim": 8}
COMBINATIONS = {
    "everything fused": {"attention": "gsxa", "differential": True, "position": "rn", "n_sink": 2},
    "everything else": {"attention": "gsxa", "qk_clip": 0.0, "logit_softcap": 2.0, "softmax": "sink", "window": 5,
                        "window_pattern": "fw", "gate": "element", "exclusive": "learned", "bias": True},
    "ssmax in windows": {"softmax": "ssmax", "window": 5, "n_sink": 3},
    "ssmax under a cap": {"softmax": "ssmax", "logit_softcap": 2.0},
    "sink in windows": {"softmax": "sink", "window": 4, "n_kv_head": 1},
    "sigmoid in windows": {"softmax": "sigmoid", "window": 5, "window_pattern": "wf", "exclusive": "on", "n_sink": 1},
    "differential, cap": {"differential": True, "logit_softcap": 2.0, "n_kv_head": 4},
    "differential, sink": {"differential": True, "softmax": "sink", "n_kv_head": 2, "exclusive": "learned", "gate": "element"},
    "xsa in deep layers": {"exclusive": "on", "exclusive_layers": "ssxx", "gate": "element"},
    "xsa, mqa, sinks, bias": {"exclusive": "on", "n_kv_head": 1, "n_sink": 3, "bias": True},
    "gqa, sinks, bias": {"n_kv_head": 2, "n_sink": 3, "bias": True, "value_residual": True},
}
VARIANTS = {name: {"attention": name} for name in PRESETS} | COMBINATIONS
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
each_preset = pytest.mark.parametrize("name", PRESETS)


def trained(seed: int = 0, **settings) -> GPT:
    """A small model in fp64 with weights as training might leave them: attention far from uniform, nothing at its start."""
    model = GPT(GPTConfig(**TINY | settings), seed=seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or "c_gate" in name:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.3)
            else:
                p.mul_(5)
    return model


def tokens(B: int = 2, T: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


def attention_input(attn: CausalSelfAttention, T: int = 11) -> tuple[Tensor, Rope]:
    """Input of an attention in fp64."""
    x = torch.randn(2, T, attn.c_attn.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, rope_table(0, T, attn.head_dim, 10000.0, like=x)


def run(attn: CausalSelfAttention, x: Tensor, rope: Rope, v1: Tensor | None = None) -> Tensor:
    return attn(x, rope, v1, attn.mask(x.shape[1], x.device))[0]


# --- (1) the definition ------------------------------------------------------------------------------------------------------


@each_variant
def test_loss_and_gradients_equal_the_reference(variant):
    model, idx, targets = trained(**variant), tokens(), tokens(seed=1)
    _, loss = model(idx, targets)
    logits = reference.logits(model.config, dict(model.named_parameters()), idx)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@each_variant
def test_first_loss_of_an_untrained_fp32_model_equals_the_reference(variant):
    model = GPT(GPTConfig(**TINY | variant), seed=5)
    weights = {name: p.double() for name, p in model.state_dict().items()}
    expected = F.cross_entropy(reference.logits(model.config, weights, tokens()).flatten(0, 1), tokens(seed=1).flatten())
    assert model(tokens(), tokens(seed=1))[1].item() == pytest.approx(expected.item(), abs=2e-6)


@each_variant
def test_probabilities_are_what_attend_computes(variant):
    """Also for rows that do not begin at 0."""
    model = trained(**variant)
    _, _, v1 = values_of_first_layer(model)
    for block in model.h:
        attn = block.attn
        x, rope = attention_input(attn)
        q, k, v = attn.project(x, rope, v1)
        y = attn.attend(q, k, v, attn.mask(11, x.device))
        for start, stop in ((0, 11), (4, 7)):
            p = attn.probabilities(q[:, :, start:stop], k, start)
            assert not p[..., stop:].any()
            if attn.softmax in ("softmax", "ssmax") and not attn.differential:
                torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
            found = p @ v.repeat_interleave(p.shape[1] // v.shape[1], dim=1)
            if attn.differential:
                found = reference.rms(found, 1e-5) * (1 - attn.lambda_start)
            torch.testing.assert_close(found, y[:, :, start:stop])


def values_of_first_layer(model: GPT) -> tuple[Tensor, Tensor, Tensor]:
    attn = model.h[0].attn
    return attn.project(*attention_input(attn))


# --- (2) plain attention at the exact start or in the limit -----------------------------------------------------------------

# Per variant the settings and weights with which it is plain attention. Those without such a place have a test of their own
# below: qknorm, ssmax, sigmoid, diff.
PLAIN_WHERE = {
    "gqa": ({"n_kv_head": 8}, {}),
    "qkclip": ({}, {}),
    "resformer": ({}, {"value_mix": torch.tensor([0.0, 1.0])}),
    "softcap": ({"logit_softcap": 1e8}, {}),
    "swa": ({"window": 16}, {}),
    "sink": ({}, {"sink_logit": torch.tensor(-1e3)}),
    "xsa_learned": ({}, {"alpha": torch.tensor(0.0)}),
    "gated": ({}, {"c_gate.weight": torch.tensor(0.0)}),
    "gated_element": ({}, {"c_gate.weight": torch.tensor(0.0)}),
    "gemma2": ({"n_kv_head": 8, "logit_softcap": 1e8, "window": 16}, {}),
    "gpt_oss": ({"n_kv_head": 8, "window": 16}, {"sink_logit": torch.tensor(-1e3)}),
}
STARTS_PLAIN = ("qkclip", "xsa_learned", "gated", "gated_element")


@pytest.mark.parametrize("name", PLAIN_WHERE)
def test_variant_is_plain_attention_where_it_should_be(name):
    settings, values = PLAIN_WHERE[name]
    model, plain = trained(attention=name, **settings), trained()
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if (own := parameter.partition("attn.")[2]) in values:
                p.copy_(values[own].expand(p.shape))
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if key in plain.state_dict()})
    torch.testing.assert_close(model(tokens(T=16))[0], plain(tokens(T=16))[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", STARTS_PLAIN)
def test_variant_starts_as_plain_attention_bit_for_bit(name):
    model, plain = (GPT(GPTConfig(**TINY, attention=n), seed=3) for n in (name, "sa"))
    if name == "xsa_learned":  # its output is rounded on the way
        torch.testing.assert_close(model(tokens())[0], plain(tokens())[0], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(model(tokens())[0], plain(tokens())[0])


def test_other_start_values():
    attn = GPT(GPTConfig(**TINY, attention="resformer", differential=True, softmax="sink", qk_norm=True), seed=0).h[1].attn
    assert attn.value_mix.tolist() == [0.5, 0.5] and not attn.sink_logit.any() and (attn.qk_gain == 1).all()
    drawn = torch.cat([getattr(attn, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")])
    assert drawn.std().item() == pytest.approx(0.1, rel=0.4) and len(set(drawn.tolist())) == 32
    assert attn.lambda_start == pytest.approx(0.8 - 0.6 * math.exp(-0.3))


def test_learned_exclusion_at_full_strength_is_xsa():
    model, xsa = trained(attention="xsa_learned"), trained(attention="xsa")
    with torch.no_grad():
        for block in model.h:
            block.attn.alpha.fill_(100.0)
    xsa.load_state_dict({key: value for key, value in model.state_dict().items() if "alpha" not in key})
    torch.testing.assert_close(model(tokens())[0], xsa(tokens())[0])


def test_exclusion_of_a_zero_value_is_finite_with_its_gradients():
    y, v = torch.randn(1, 4, 3, 8).requires_grad_(), torch.randn(1, 2, 3, 8)
    v[0, 0, 1] = 0
    v[0, 1, 2] = 1e-22 * torch.randn(8)
    z = model_module.exclude(y, v.requires_grad_(), torch.full((4,), 0.5))
    z.sum().backward()
    assert torch.equal(z[0, :2, 1], y[0, :2, 1]) and all(t.isfinite().all() for t in (z, y.grad, v.grad))


def test_nope_is_attention_with_every_position_the_same():
    model = trained(attention="nope")
    plain = trained()
    plain.load_state_dict(model.state_dict())
    x, rope = attention_input(model.h[0].attn)
    still = rope._replace(cos=torch.ones_like(rope.cos), sin=torch.zeros_like(rope.sin))
    torch.testing.assert_close(run(model.h[0].attn, x, rope), run(plain.h[0].attn, x, still))
    assert (run(plain.h[0].attn, x, rope) - run(plain.h[0].attn, x, still)).abs().max() > 1e-3
    assert [block.attn.rotated for block in trained(attention="rnope").h] == [True, True, True, False]


def test_qk_norm_undoes_any_scale():
    attn = trained(attention="qknorm").h[0].attn
    x, rope = attention_input(attn)
    before = run(attn, x, rope)
    with torch.no_grad():
        attn.c_attn.weight[: 16 * 8] *= 37.0
    torch.testing.assert_close(run(attn, x, rope), before, rtol=1e-4, atol=1e-5)  # but for the norm's epsilon


def test_ssmax_is_plain_attention_for_the_query_whose_factor_is_one():
    model, T = trained(attention="ssmax"), 11
    attn, plain = model.h[0].attn, trained().h[0].attn
    plain.load_state_dict({key: value for key, value in attn.state_dict().items() if key != "ssmax"})
    with torch.no_grad():
        attn.ssmax.fill_(1 / math.log(T))
    x, rope = attention_input(attn, T)
    found, expected = run(attn, x, rope), run(plain, x, rope)
    torch.testing.assert_close(found[:, -1], expected[:, -1])
    torch.testing.assert_close(found[:, 0], expected[:, 0])  # which sees itself alone
    assert ((found - expected)[:, 1:-1].abs().amax(dim=(0, 2)) > 1e-4).all()


def test_ssmax_starts_with_a_mean_factor_of_one():
    """0.151 at the paper's 2048 tokens."""
    with torch.device("meta"):
        attn = CausalSelfAttention(GPTConfig(attention="ssmax"), 0)
    assert attn.starts["ssmax"] == (pytest.approx(0.151, abs=5e-4), 0.0)
    start = GPT(GPTConfig(**TINY, attention="ssmax"), seed=0).h[0].attn.ssmax
    assert (start * torch.arange(1, 17).log().mean()).tolist() == pytest.approx([1.0] * 8)


def test_sigmoid_of_far_negative_logits_is_softmax_without_its_sum():
    model = trained(attention="sigmoid")
    attn, plain = model.h[0].attn, trained(attention="qknorm").h[0].attn
    plain.load_state_dict(attn.state_dict())
    attn.most_seen = 10**17
    x, rope = attention_input(attn)
    q, k, v = attn.project(x, rope)
    total = attn.probabilities(q, k).sum(-1, keepdim=True)
    torch.testing.assert_close(attn.attend(q, k, v) / total, plain.attend(q, k, v))


def test_differential_attention_without_its_second_map():
    """With lambda = 0 it is softmax attention of every other head, its output normed."""
    attn = trained(attention="diff").h[1].attn
    lam = math.log(1 + attn.lambda_start)  # lambda = exp(0) - exp(lq2.lk2) + its start
    with torch.no_grad():
        attn.lambda_q1.zero_()
        attn.lambda_q2.fill_(lam / 8)
        attn.lambda_k2.fill_(1.0)
    q, k, v = attn.project(*attention_input(attn))
    y = F.scaled_dot_product_attention(q[:, ::2], k[:, ::2], v, is_causal=True)
    torch.testing.assert_close(attn.attend(q, k, v), reference.rms(y, 1e-5) * (1 - attn.lambda_start))


# --- (3) public implementations with the same weights ------------------------------------------------------------------------


def their_rope(rope: Rope) -> tuple[Tensor, Tensor]:
    return tuple(torch.cat((t, t), dim=-1).squeeze(1)[None] for t in (rope.cos, rope.sin))


def their_mask(T: int, window: int | None = None) -> Tensor:
    """As transformers' eager attention takes it, made by its own rule for windows."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    rule = sliding_window_causal_mask_function(window) if window else causal_mask_function
    seen = torch.tensor([[bool(rule(0, 0, torch.tensor(i), torch.tensor(j))) for j in range(T)] for i in range(T)])
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(~seen, -math.inf)[None, None]


def give_projections(attn: CausalSelfAttention, theirs: torch.nn.Module, **more: Tensor) -> None:
    H, K, d = attn.n_head, attn.n_kv_head, attn.head_dim
    sizes = (H * d, K * d, K * d)
    state = {f"{n}_proj.weight": p for n, p in zip("qkv", attn.c_attn.weight.split(sizes), strict=True)}
    state["o_proj.weight"] = attn.c_proj.weight
    if attn.c_attn.bias is not None:
        state |= {f"{n}_proj.bias": p for n, p in zip("qkv", attn.c_attn.bias.split(sizes), strict=True)}
        state["o_proj.bias"] = attn.c_proj.bias
    theirs.load_state_dict(state | more)


SHAPE = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager",
         "num_hidden_layers": 4}


def test_gqa_equals_llama():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaAttention

    ours = trained(attention="gqa").h[0].attn
    theirs = LlamaAttention(transformers.LlamaConfig(**SHAPE), 0).double()
    give_projections(ours, theirs)
    x, rope = attention_input(ours)
    torch.testing.assert_close(run(ours, x, rope), theirs(x, their_rope(rope), their_mask(11))[0])


def test_qk_norm_equals_qwen3():
    """Whose gains are the same for all heads."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    ours = trained(attention="qwen3").h[0].attn
    theirs = Qwen3Attention(transformers.Qwen3Config(**SHAPE, rms_norm_eps=1e-6), 0).double()
    q_gain, k_gain = 1 + 0.3 * torch.randn(2, 8, dtype=torch.float64)
    with torch.no_grad():
        ours.qk_gain.copy_(torch.cat((q_gain.repeat(8), k_gain.repeat(2))))
    give_projections(ours, theirs, **{"q_norm.weight": q_gain, "k_norm.weight": k_gain})
    x, rope = attention_input(ours)
    found, expected = run(ours, x, rope), theirs(x, position_embeddings=their_rope(rope), attention_mask=their_mask(11))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # theirs norms in fp32


@pytest.mark.parametrize("layer", [0, 1])
def test_softcap_and_window_equal_gemma_2(layer):
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    ours = trained(attention="gemma2", logit_softcap=3.0).h[layer].attn
    config = transformers.Gemma2Config(**SHAPE, query_pre_attn_scalar=8, attn_logit_softcapping=3.0, sliding_window=4)
    theirs = Gemma2Attention(config, layer).double()
    assert (theirs.sliding_window or 0) == ours.window == (4, 0)[layer]
    give_projections(ours, theirs)
    x, rope = attention_input(ours)
    expected = theirs(x, their_rope(rope), their_mask(11, theirs.sliding_window))[0]
    torch.testing.assert_close(run(ours, x, rope), expected, rtol=1e-5, atol=1e-6)  # theirs takes the softmax in fp32


@pytest.mark.parametrize("layer", [0, 1])
def test_sink_and_window_equal_gpt_oss(layer):
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    ours = trained(attention="gpt_oss", bias=True).h[layer].attn
    theirs = GptOssAttention(transformers.GptOssConfig(**SHAPE, sliding_window=4), layer).double()
    assert (theirs.sliding_window or 0) == ours.window == (4, 0)[layer]
    give_projections(ours, theirs, sinks=ours.sink_logit)
    x, rope = attention_input(ours)
    half = tuple(t.squeeze(1)[None] for t in rope[:2])
    torch.testing.assert_close(run(ours, x, rope), theirs(x, half, their_mask(11, theirs.sliding_window))[0])


@pytest.mark.parametrize("layer", [0, 3])
def test_differential_attention_equals_diffllama(layer):
    """Whose pairs are heads i and i + H/2, where ours are neighbours as in the paper's own code."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    ours = trained(attention="diff").h[layer].attn
    config = transformers.DiffLlamaConfig(**SHAPE | {"num_key_value_heads": 8}, rms_norm_eps=1e-5)
    theirs = DiffLlamaAttention(config, layer).double()
    give_projections(ours, theirs, **{f"lambda_{n}": getattr(ours, f"lambda_{n}") for n in ("q1", "k1", "q2", "k2")})
    with torch.no_grad():
        for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj):
            projection.weight.copy_(projection.weight.unflatten(0, (4, 2, 8)).transpose(0, 1).flatten(0, 2))
    x, rope = attention_input(ours)
    found, expected = run(ours, x, rope), theirs(x, position_embeddings=their_rope(rope), attention_mask=their_mask(11))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # theirs has lambda in fp32


# --- (4) to (7), for every variant -------------------------------------------------------------------------------------------


@each_variant
def test_changing_a_token_moves_no_earlier_logit_and_every_later_one_that_sees_it(variant):
    model, idx, t = trained(**variant), tokens(T=16), 6
    changed = idx.clone()
    changed[:, t] = (changed[:, t] + 1) % TINY["vocab_size"]
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :t], after[:, :t])
    assert ((before[:, t:] - after[:, t:]).abs().amax(dim=(0, 2)) > 1e-9).all()  # over four layers a window of 4 reaches 12 on


@each_preset
def test_a_window_hides_what_lies_before_it(name):
    """In one attention, the output at a position depends on `window` keys and no others."""
    attn = trained(attention=name, window=4, window_pattern="w").h[0].attn
    x, rope = attention_input(attn)
    changed = x.clone()
    changed[:, 2] += 1.0
    moved = (run(attn, x, rope) - run(attn, changed, rope)).abs().amax(dim=(0, 2)) > 1e-9
    assert moved.tolist() == [i in (2, 3, 4, 5) for i in range(11)]


@each_variant
def test_every_parameter_has_a_gradient_after_two_steps(variant):
    model = GPT(GPTConfig(**TINY | variant), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(tokens(4, 16, step), tokens(4, 16, step + 9))[1].backward()
        optimizer.step() if step < 2 else None
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@each_variant
@pytest.mark.parametrize("prompt", [1, 5, 16])
def test_cached_greedy_decoding_equals_uncached(variant, prompt):
    """Up to block_size = 16 and past it, where each token is predicted from the last block_size ones."""
    model, idx = trained(**variant), tokens(T=prompt)
    expected = idx
    for _ in range(13):
        logits = model(expected[:, -TINY["block_size"] :])[0][:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(idx, 13, temperature=0), expected)


@each_variant
def test_round_trip_through_a_checkpoint(variant, tmp_path):
    model = GPT(GPTConfig(**TINY | variant), seed=1)
    assert GPTConfig(**dataclasses.asdict(model.config)) == model.config
    assert None not in dataclasses.asdict(model.config).values()
    torch.save({"config": dataclasses.asdict(model.config), "model": model.state_dict()}, tmp_path / "c.pt")
    loaded = GPT.from_checkpoint(tmp_path / "c.pt")
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens())[0], model(tokens())[0])
    assert not list(model.buffers())  # DDP would broadcast them in every forward pass


@each_variant
def test_activation_checkpointing_changes_no_gradient(variant):
    grads = []
    for flag in (False, True):
        model = trained(**variant).train()
        model.activation_checkpointing = flag
        model(tokens(), tokens(seed=1))[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@each_variant
def test_autocast_stays_close_to_fp32_and_hands_on_half_precision(variant):
    model = GPT(GPTConfig(**TINY | variant), seed=0)
    exact = model(tokens(), tokens(seed=1))[1]
    seen = []
    model.h[-1].attn.c_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(tokens(), tokens(seed=1))
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.02
    assert all(dtype == torch.bfloat16 for dtype in seen)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@each_variant
def test_only_matrices_are_counted_and_decayed(variant):
    """What attention learns beside matrices is flat: AdamW's weight decay goes by the number of dimensions."""
    model = GPT(GPTConfig(**TINY | variant), seed=0)
    matrices = ("c_attn.weight", "c_proj.weight", "c_gate.weight", "c_fc.weight")
    counted = {name for name, p in model.named_parameters() if p.ndim != 1} - {"wte.weight", "sink"}
    assert counted == {name for name, _ in model.named_parameters() if name.endswith(matrices)}
    assert model.num_params() == sum(model.get_parameter(name).numel() for name in counted)


@pytest.mark.parametrize("variant", COMBINATIONS.values(), ids=list(COMBINATIONS))
def test_compilation_does_not_come_near_torch_s_limit(variant):
    """Past eight versions of a block torch silently runs it uncompiled; what differs between layers must not make versions."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = GPT(GPTConfig(**TINY | {"n_layer": 10} | variant), seed=0)
    for block in model.h:
        block.compile(backend=counter)
    for _ in range(2):
        model(tokens(), tokens())[1].backward()
    assert 1 <= counter.frame_count <= 4 and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("variant", ["everything fused", "everything else", "differential, cap", "sigmoid in windows"])
def test_traced_blocks_equal_eager_ones(variant):
    """All of torch.compile but its code generation, which tests/test_model.py has."""
    torch._dynamo.reset()
    plain, compiled = (trained(**COMBINATIONS[variant] | {"n_layer": 2}).train() for _ in range(2))
    names = list(compiled.state_dict())
    for block in compiled.h:
        block.compile(backend="aot_eager")
    results = []
    for model in (plain, compiled):
        _, loss = model(tokens(), tokens(seed=1))
        loss.backward()
        watched = [model.max_logits] if model.config.qk_clip else []
        results.append([loss, *(p.grad for p in model.parameters()), *watched])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert list(compiled.state_dict()) == names


# --- the ways to compute it ---------------------------------------------------------------------------------------------------


@each_variant
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_other_ways(variant, monkeypatch):
    """Forward, and uncompiled: on a CPU it has no backward. Every variant can be computed by it."""
    monkeypatch.setattr(model_module, "_compiled_flex", lambda: flex_attention)
    model = trained(**variant)
    _, _, v1 = values_of_first_layer(model)
    for block in model.h:
        attn, device = block.attn, torch.device("cpu")
        if attn.softcap:
            attn.softcap = 2.0
        with torch.no_grad():
            q, k, v = attn.project(*attention_input(attn), v1)
            expected = attn.attend(q, k, v, attn.mask(11, device))
            found = attn.attend(q, k, v, block_mask(11, attn.window or 11, device))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # FlexAttention computes in fp32


def four_rows(q: Tensor, n_keys: int) -> Iterator[slice]:
    """In place of model.row_chunks: several chunks, the last of them shorter."""
    return (slice(i, min(i + 4, q.shape[2])) for i in range(0, q.shape[2], 4))


@each_variant
def test_explicit_rows_equal_the_fused_form_with_their_gradients(variant, monkeypatch):
    results = []
    for explicit in (False, True):
        model = trained(**variant)
        if explicit:
            monkeypatch.setattr(model_module, "row_chunks", four_rows)
            for block in model.h:
                block.attn.softcap = block.attn.softcap or 1e8  # no more than rounding
        loss = model(tokens(), tokens(seed=1))[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["softcap", "sigmoid"])
def test_explicit_rows_keep_no_logits(name):
    """What autograd holds of them grows with T, not with its square."""
    def kept(T: int) -> int:
        attn = GPT(GPTConfig(**TINY | {"block_size": T, "attention": name}), seed=0).h[0].attn
        x = torch.randn(1, T, 32)
        held = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.setdefault(t.data_ptr(), t), lambda t: t):
            attn(x, rope_table(0, T, 8, 1e4, x))
        return sum(t.numel() for t in held.values())

    assert kept(256) < 2 * kept(128)


@each_preset
def test_path_names_what_runs(name, monkeypatch):
    """On a CPU; on a GPU FlexAttention takes what a CPU needs more than plain fused attention for, and sinks."""
    model, cpu, cuda = GPT(GPTConfig(**TINY, attention=name), seed=0), torch.device("cpu"), torch.device("cuda")
    ran: list[str] = []
    explicit, sdpa = CausalSelfAttention._explicit, CausalSelfAttention._sdpa
    monkeypatch.setattr(CausalSelfAttention, "_explicit", lambda self, *a: (ran.append("explicit"), explicit(self, *a))[1])
    monkeypatch.setattr(CausalSelfAttention, "_sdpa", lambda self, *a: (
        ran.append("sdpa" if a[3] is None else "masked"), sdpa(self, *a))[1])
    model(torch.zeros(1, 16, dtype=torch.long))
    maps = model.h[0].attn.maps  # each of which is applied twice, to halves of the values
    assert ran == [block.attn.path(16, cpu) for block in model.h for _ in range(maps)]
    for block in model.h:
        attn = block.attn
        assert (attn.path(16, cuda) == "flex") == (attn.path(16, cpu) != "sdpa" or attn.softmax == "sink")
        assert attn.path(7, cuda) != "flex"  # another length would be compiled anew
        attn.dropout = 0.1
        assert attn.path(16, cuda) != "flex"  # which has no dropout


def test_dropout_drops_weights_in_every_form():
    for name in ("sa", "softcap", "swa", "sink"):
        attn = trained(attention=name, dropout=0.5).train().h[0].attn
        x, rope = attention_input(attn)
        assert (run(attn, x, rope) - run(attn, x, rope)).abs().max() > 1e-3
        attn.eval()
        assert torch.equal(run(attn, x, rope), run(attn, x, rope))


# --- QK-Clip -----------------------------------------------------------------------------------------------------------------

CLIPPED = {
    "plain": {}, "bias": {"bias": True}, "gqa": {"n_kv_head": 2}, "qk_norm": {"attention": "qknorm"},
    "ssmax in windows": {"softmax": "ssmax", "window": 5}, "gsxa": {"attention": "gsxa", "n_sink": 2},
    "diff": {"attention": "diff", "n_kv_head": 4}, "sink": {"attention": "sink"}, "sigmoid": {"attention": "sigmoid"},
}


def logits_by_definition(attn: CausalSelfAttention, q: Tensor, k: Tensor) -> Tensor:
    """Largest q.k / sqrt(d) of every head over batch and visible keys, pair by pair."""
    largest = torch.full((attn.n_head,), -math.inf, dtype=q.dtype)
    for h in range(attn.n_head):
        s = q[:, h] @ k[:, h * attn.n_kv_head // attn.n_head].transpose(1, 2) / math.sqrt(attn.head_dim)
        for i in range(s.shape[1]):
            first = max(0, i + 1 - attn.window) if attn.window else 0
            largest[h] = max(largest[h], s[:, i, first : i + 1].max())
    return largest


@pytest.mark.parametrize("variant", CLIPPED.values(), ids=list(CLIPPED))
def test_qk_clip_brings_the_largest_logits_down_to_tau(variant, monkeypatch):
    monkeypatch.setattr(model_module, "row_chunks", four_rows)
    model = trained(**variant | {"qk_clip": 1.0}).train()
    seen = []
    for block in model.h:
        block.attn.register_forward_hook(lambda attn, _, out: seen.append(logits_by_definition(attn, *out[2])))
    model(tokens(), tokens(seed=1))
    model(tokens(seed=2), tokens(seed=3))  # a second micro-step
    by_pass = torch.stack(seen).view(2, 4, 8)
    largest = model.take_max_logits()
    torch.testing.assert_close(largest, by_pass.amax(0).float())
    tau = largest[0].median().item()
    for block in model.h:
        block.attn.qk_clip = tau

    # Inputs of the first layer do not depend on it: its logits shrink by exactly gamma.
    clipped = model.qk_clip_(largest)
    K = model.config.n_kv_head
    groups = largest.view(4, K, -1).amax(2)
    assert torch.equal(clipped, groups > tau)
    gamma = torch.where(clipped, tau / groups, 1.0).repeat_interleave(8 // K, dim=1)
    model(tokens(), tokens(seed=1))
    model(tokens(seed=2), tokens(seed=3))
    after = model.take_max_logits()
    assert after[0].max() <= tau * (1 + 1e-5)
    torch.testing.assert_close(after[0], largest[0] * gamma[0], rtol=1e-4, atol=1e-6)


def test_qk_clip_leaves_heads_below_tau_as_they_are():
    model = trained(qk_clip=1e4).train()
    model(tokens(), tokens())
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert not model.qk_clip_(model.take_max_logits()).any()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="no forward pass in training mode"):
        model.take_max_logits()


def test_only_training_passes_with_qk_clip_are_watched():
    off, on = trained().train(), trained(qk_clip=1.0).eval()
    for model in (off, on):
        model(tokens(), tokens())
        assert model.max_logits is None
    on.train()(tokens(), tokens())
    assert on.max_logits.shape == (4, 8) and not on.max_logits.requires_grad and "max_logits" not in on.state_dict()
