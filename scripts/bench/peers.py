"""What a training step costs beside those of other repositories: NanoGPT's and a Hugging Face Trainer's, at one shape.

    python -m scripts.bench peers                                                      # a CPU-sized shape
    python -m scripts.bench peers config/gpt2_124m.py --global_batch_size=32 --micro_batch_size=16 --json=peers.json

This is `step` (its --help has flags and method) with the arms nanogpt, hf and sa. hf is GPT-NeoX of transformers, the model there
that has our matrices: pre-norm, rotary, exact GELU of four times the width, head tied to the embedding, SDPA; it lacks our
LayerNorm after the embedding. Around it is what Trainer does in a step: autocast, the loss over whole logits in fp32,
clip_grad_norm_, fused AdamW (its default), a schedule. Trainer's callbacks and logging are left out.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn

from configurator import Config
from scripts.bench import step
from scripts.bench.step import Batch, NanoGPTRun


def gpt_neox(config: Config) -> nn.Module:
    """GPT-NeoX with the matrices of attention sa, biases as config says."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = GPTNeoXForCausalLM(GPTNeoXConfig(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, intermediate_size=4 * config.n_embd, hidden_act="gelu",
        max_position_embeddings=config.block_size, layer_norm_eps=1e-5, use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base, "partial_rotary_factor": 1.0},
        attention_bias=config.bias, tie_word_embeddings=True, attn_implementation="sdpa", use_cache=False,
        attention_dropout=config.dropout, hidden_dropout=config.dropout,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ))
    if not config.bias:  # which its MLP and norms have in any case
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_parameter("bias", None)
    return model


class HuggingFaceRun(NanoGPTRun):
    """A Trainer's training step, with the interface of train.Run."""

    def build_model(self, config: Config) -> nn.Module:
        return gpt_neox(config)

    def build_optimizer(self, groups: list[dict], **settings) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(groups, **settings | {"fused": True})
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return optimizer

    def micro_step(self, x: torch.Tensor, y: torch.Tensor, n_micro_steps: int) -> torch.Tensor:
        with self.autocast:
            loss = self.forward(input_ids=x, labels=y, shift_labels=y.contiguous()).loss / n_micro_steps
        loss.backward()
        return loss.detach()

    def train_step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """One optimizer step; the loss is the mean over micro-batches."""
        n_micro_steps = self.config.accumulation(1)
        losses = [self.micro_step(*next(batches), n_micro_steps) for _ in range(n_micro_steps)]
        if self.config.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.schedule.step()
        self.model.zero_grad()
        return {"loss": math.fsum(loss.item() for loss in losses)}


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    return step.main(["--compare=nanogpt,hf", *argv], name="peers")
