"""What goes on in each layer of a model on some tokens: logits, attention, activations, gates. One forward pass without gradient.

    for layer, found in enumerate(diagnose(model, idx)):     # idx (B, T); a small batch is enough
        print(layer, found["attention_entropy"])

The blocks run uncompiled, stage by stage; the caller sets autocast.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, CausalSelfAttention, row_chunks


@torch.no_grad()
def diagnose(model: GPT, idx: Tensor) -> list[dict[str, float]]:
    """Per layer, means being over sequences, heads and positions:

    largest_logit      as the softmax sees it, SSMax's factor and soft-cap included
    attention_entropy  nats, of a query's weights made to sum to 1 (their absolute values in differential attention)
    first_token_mass   weight on the first position, a sink token if there is one, of all later queries
    cos_y_v            cosine of attention's output before XSA and the value of the same position (arXiv 2603.09078, Fig 1)
    kurtosis           of the block's output over channels, mean over positions: 3 where they are normal, more with outliers
    largest_activation absolute, of the block's output
    gate_mean, ssmax   mean gate and mean s, in layers that have them
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
        p = attn.probabilities(q[:, :, rows], k[:, :, : rows.stop], rows.start).abs()
        first.append(p[..., 0])
        entropy.append(torch.special.entr(p / p.sum(-1, keepdim=True)).sum(-1))
    return {"attention_entropy": torch.cat(entropy, dim=2).mean(), "first_token_mass": torch.cat(first, dim=2)[..., 1:].mean()}


def _activations(x: Tensor) -> dict[str, Tensor]:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    kurtosis = centred.pow(4).mean(-1) / centred.square().mean(-1).square()
    return {"kurtosis": kurtosis.mean(), "largest_activation": x.abs().max().float()}
