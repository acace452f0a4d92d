"""Base models of the lab, by supervised warm-up on sloppy teachers: python -m lab.bases NAME, into lab/bases/NAME.

The quickstart's script makes that of the task `sharpen` in its usual size, and has what all of them share.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import normalizers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.quickstart.make_base import sloppy, warm_up, write_random_moe, write_tokenizer
from megarl.data.prompts import Prompt
from megarl.distributed import become_single_process
from megarl.recipe.load import load_recipe

FOLDER = Path("lab/bases")
LETTERS = ["=", *string.ascii_lowercase]


@dataclass(frozen=True)
class Base:
    """Initial model, teacher and supervised steps of one base model."""

    recipe: str  # of lab/recipes
    initial: Callable[[Path], None]
    teach: Callable[[Prompt, random.Random], str]
    steps: int = 800


def spell(prompt: Prompt, rng: random.Random) -> str:
    """The quickstart's teacher: one letter in five is wrong."""
    return sloppy(prompt.answer, rng)


def sort(prompt: Prompt, rng: random.Random) -> str:
    """Always the right answer."""
    return prompt.answer


def reverse(prompt: Prompt, rng: random.Random) -> str:
    """One word in fifty is another of the list."""
    words = prompt.answer.split(", ")
    return ", ".join(rng.choice(words) if rng.random() < 0.02 else word for word in words)


def letters(path: Path, write_model: Callable[[Path, int], None]) -> None:
    """The quickstart's tokenizer, and a model of another size."""
    write_tokenizer(path, LETTERS, r"[\s\S]", normalizers.Lowercase())
    write_model(path, len(LETTERS) + 2)


def numbers(path: Path) -> None:
    """Lists of numbers as number_sorting writes them: a token a digit, bracket and separator."""
    pieces = ["ascending", "descending", "['", ".0', '", ".0']", "-", *string.digits]
    write_tokenizer(path, pieces, "|".join(map(re.escape, pieces)))
    write_random_moe(path, len(pieces) + 2)


def words(path: Path) -> None:
    """A token for every word of word_sequence_reversal's text, and for what stands between them."""
    known = sorted(set(reasoning_gym.create_dataset("word_sequence_reversal", seed=0, size=1).words))
    pieces = ["['", "', '", "']", ", ", *known]
    write_tokenizer(path, pieces, r"\['|', '|'\]|, |\w+")
    write_random_moe(path, len(pieces) + 2, max_position_embeddings=256)


def dense(path: Path, vocabulary: int, hidden: int, layers: int) -> None:
    """A dense Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.08 * (64 / hidden) ** 0.5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def moe(path: Path, vocabulary: int, hidden: int, layers: int) -> None:
    """A Qwen3-MoE of the quickstart's shape, wider and deeper."""
    shape = dict(hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden)
    heads = dict(num_attention_heads=hidden // 16, num_key_value_heads=hidden // 32, num_hidden_layers=layers)
    write_random_moe(path, vocabulary, **shape, **heads)


def sized(make: Callable[[Path, int, int, int], None], hidden: int, layers: int) -> Base:
    """Of the task `sharpen`; a wider model learns at a smaller rate than the recipe's."""
    return Base("sharpen", lambda path: letters(path, lambda p, n: make(p, n, hidden, layers)), spell)


BASES = {
    "learn": Base("learn", numbers, sort, steps=2000),
    "long": Base("long", words, reverse, steps=1200),
    "sharpen_dense": sized(dense, 64, 4),
    "sharpen_dense_1m": sized(dense, 128, 4),
    "sharpen_dense_4m": sized(dense, 192, 6),
    "sharpen_moe_1m": sized(moe, 128, 2),
    "sharpen_moe_4m": sized(moe, 192, 3),
}


def make(name: str) -> None:
    """Write lab/bases/``name``, unless it is there."""
    output, base = FOLDER / name, BASES[name]
    if output.exists():
        print(f"{output} is there already")
        return
    initial = output.with_name(f"{name}.initial")
    base.initial(initial)
    overrides = [f'model.path="{initial}"', "optimizer.betas=[0.9, 0.999]"]
    warm_up(load_recipe(Path(f"lab/recipes/{base.recipe}.toml"), overrides), base.teach, output, base.steps)
    shutil.rmtree(initial)
    print(f"base model: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BASES)
    name = parser.parse_args().name
    become_single_process()
    torch.set_num_threads(1)
    disable_progress_bar()
    make(name)


if __name__ == "__main__":
    main()
