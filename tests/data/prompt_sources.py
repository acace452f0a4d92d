"""A character-level tokenizer and small recipes for the tests of prompts and rewards."""

import json
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.files import Item, read_rows
from megarl.recipe.data_table import SourceTable
from megarl.recipe.tables import Recipe

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/.,:;?!'\"()[]{}<>_|\n%$&^@#~`\\"


def char_tokenizer(directory: Path, **more: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per lower-case character, saved to ``directory`` and loaded from there."""
    vocabulary = {"<unk>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", **more)
    tokenizer.save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def write(path: Path, rows: Any) -> Path:
    """Write rows as the suffix says: objects, a table of Arrow for Parquet, or the file's text."""
    if isinstance(rows, str):
        path.write_text(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
        (pyarrow.csv.write_csv if path.suffix == ".csv" else pyarrow.parquet.write_table)(table, path)
    return path


def read(path: Path, rows: Any, **settings: Any) -> list[Item]:
    """The items that a source with these settings reads of a file with these rows."""
    table = SourceTable.model_validate({"source": "file", "train": str(write(path, rows)), **settings})
    return [item for _, item in read_rows(table)]


def recipe(
    generator: str = "",
    *,
    file: Path | None = None,
    heldout: int = 16,
    seed: int = 0,
    evaluation: dict[str, Any] | None = None,
    kind: str | None = None,
    reward: dict[str, Any] | None = None,
    model: Path | str = "unused",
    **data: Any,
) -> Recipe:
    """A recipe with the prompts of a generator, of a file, or of ``sources``; heldout: 0 for no evaluation."""
    if "sources" not in data:
        data |= {"source": "file", "train": str(file)} if file else {"source": "reasoning_gym", "train": generator}
    return Recipe.model_validate(
        {
            "model": {"path": str(model)},
            "data": data,
            "reward": reward or {"kind": kind or ("reasoning_gym" if generator else "exact")},
            "eval": {"prompts": heldout, **(evaluation or {})} if heldout else {"every": 0},
            "run": {"seed": seed},
        }
    )
