"""Makes the quickstart's base model by supervised training on an imperfect teacher, with the RL run's Megatron actor.

The teacher spells words backwards but gets about one letter in five wrong. So the model learns the task without being
sure of it, and reinforcement learning can improve it: accuracy at temperature 1 is between .15 and .5 afterwards.
"""

from __future__ import annotations

import argparse
import random
import shutil
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.actor import parallel
from megarl.batch import TokenBatch
from megarl.data.prompts import Prompt, build_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.distributed import become_single_process
from megarl.objectives import Objective, Terms
from megarl.objectives.parts.terms import make_terms
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe

HERE = Path(__file__).parent
STEPS, BATCH, PEAK_LR, WRONG_LETTERS = 800, 64, 3e-3, 0.2


def write_initial_model(path: Path) -> None:
    """Write a random Qwen3-MoE of 0.2M parameters, and a tokenizer with one token per character."""
    pieces = ["=", *string.ascii_lowercase]
    write_tokenizer(path, pieces, r"[\s\S]", normalizers.Lowercase())
    write_random_moe(path, len(pieces) + 2)


def write_tokenizer(
    path: Path, pieces: Sequence[str], pattern: str, normalizer: normalizers.Normalizer | None = None
) -> None:
    """A tokenizer with padding (0), end (1) and one token per piece; the regex ``pattern`` splits texts into pieces."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{piece: 2 + i for i, piece in enumerate(pieces)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)


def write_random_moe(path: Path, vocabulary: int, **shape: int) -> None:
    """A Qwen3-MoE of 0.2M parameters plus embeddings; ``shape`` overrides settings of its configuration."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM serves on a CPU
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.08,
        tie_word_embeddings=False,
        pad_token_id=None,  # with one, its embedding starts at zero, where RMSNorm multiplies gradients by 1000
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | shape)).save_pretrained(path)


class Supervised(Objective):
    """Plain cross-entropy on the teacher's tokens; always computed in torch, whatever the recipe's kernels."""

    def __call__(self, batch: TokenBatch, statistics: None = None, backend: str = "torch") -> Terms:
        log_ratio = torch.zeros_like(batch.logprobs)  # there is no behaviour policy to compare with
        return make_terms(self, batch, -batch.logprobs, batch.loss_mask, log_ratio, log_ratio.bool(), {})


def sloppy(answer: str, rng: random.Random) -> str:
    """``answer`` with each letter replaced, with probability WRONG_LETTERS, by a random letter of the answer."""
    return "".join(rng.choice(answer) if rng.random() < WRONG_LETTERS else letter for letter in answer)


def warm_up(recipe: Recipe, teach: Callable[[Prompt, random.Random], str], output: Path, steps: int) -> None:
    """Train the recipe's model for ``steps`` on the answers of ``teach`` to its prompts; export it to ``output``."""
    initial = recipe.model.path
    device = parallel.initialize(recipe)
    from megarl.actor import hf, packing, step

    tokenizer = load_tokenizer(initial)
    prompts = build_prompts(recipe, tokenizer)
    actor, objective, rng = step.Actor.build(recipe, initial, device), Supervised(), random.Random(0)
    for number in range(steps):
        samples = []
        for index in range(number * BATCH, (number + 1) * BATCH):
            prompt = prompts.train(index)
            target = tokenizer.encode(teach(prompt, rng), add_special_tokens=False) + [tokenizer.eos_token_id]
            zeros = np.zeros(len(target), np.float32)
            samples.append(packing.Sample(np.array(prompt.tokens), np.array(target), zeros, advantage=0.0))
        lr = PEAK_LR * min(1, (number + 1) / 40) * (1 - 0.95 * number / steps)
        batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, device)
        metrics = step.train_step(actor, batches, objective, lr)
        if (number + 1) % 100 == 0:
            print(f"warm-up {number + 1}/{steps}  loss {metrics['loss']:.3f}", flush=True)
    hf.export_hf(actor.models, output, like=initial, version=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default="examples/quickstart/base", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override recipe.toml")
    options = parser.parse_args()
    output = options.output
    if output.exists():
        print(f"{output} exists already, nothing to do")
        return
    become_single_process()
    torch.set_num_threads(1)
    disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    initial = output.with_name(output.name + ".initial")
    write_initial_model(initial)
    overrides = [f'model.path="{initial}"', "optimizer.betas=[0.9, 0.999]", *options.set]
    try:
        warm_up(
            load_recipe(HERE / "recipe.toml", overrides),
            lambda prompt, rng: sloppy(prompt.answer, rng),
            output,
            options.steps,
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; the next start makes the base model from the beginning")
    shutil.rmtree(initial)
    print(f"base model: {output}")


if __name__ == "__main__":
    main()
