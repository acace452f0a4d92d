"""The tokenizer of a model: loading it, checking it against the model, and finding the tokens that end a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import UserError
from megarl.models.hf_config import language_settings, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = "additional_chat_templates"  # a model's folder of chat templates beside the usual one
# the names of a tokenizer's files begin or end so, in all of transformers' classes
_BEGINNINGS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "tekken")
_ENDS = (".model", ".tiktoken", ".spm", ".codes", ".tokenizer", "_vocab.json", "_pronunciation.json", "_shape.json")
_NAMES = ("dict.txt", "emoji.json", "normalizer.json", "byte_maps.json")
# text that tokenizers cut in different places: digits, white space, punctuation, composed letters, other scripts
_PROBE = "".join(map(chr, range(32, 127))) + "I'LL  we've 12345\n\n \t x\r\n é e\u0301 ﬁ ½ 你好、世界 привет 🙂"


def files_of(directory: Path) -> list[str]:
    """The names of a model's files, those in its folder of chat templates included; it needs no other folder."""
    found = [file for pattern in ("*", f"{TEMPLATES}/*.jinja") for file in Path(directory).glob(pattern)]
    return sorted(str(file.relative_to(directory)) for file in found if file.is_file())


def is_of_tokenizer(name: str) -> bool:
    """Whether a model's file of this name belongs to its tokenizer."""
    return name.startswith((*_BEGINNINGS, f"{TEMPLATES}/")) or name.endswith(_ENDS) or name in _NAMES


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the Hugging Face tokenizer of a local directory; nothing is ever downloaded."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no tokenizer: {path} is not a directory; set model.path or model.tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged tokenizer.json
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read a tokenizer from {path}: {reason[0]}") from error


def check_copied(tokenizer_dir: Path, copy: Path) -> None:
    """`UserError` unless the tokenizer in ``copy`` is that of its source.

    transformers chooses a tokenizer's class by config.json too, and some classes cut texts in their own way, whatever
    tokenizer.json says. In a copy beside another model that may be another class.
    """
    own, found = (_behaviour(load_tokenizer(path)) for path in (tokenizer_dir, copy))
    if found[1:] != own[1:]:
        raise UserError(
            f"the tokenizer in {tokenizer_dir} gives other tokens beside the model's config.json, where policies and "
            f"exports have it: transformers then reads it as {found[0]}, and alone as {own[0]}. Copy the model's "
            f"config.json to {tokenizer_dir} if the first is right, or choose another tokenizer"
        )


def _behaviour(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    tokens = tokenizer(_PROBE)["input_ids"]
    begin = "bos_token" in str(tokenizer.chat_template) and tokenizer.bos_token
    return type(tokenizer).__name__, tokens, tokenizer.decode(tokens), begin, tokenizer.eos_token


def load_decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text, special tokens included.

    It uses only tokenizer.json if there is one, because importing transformers takes seconds.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        tokenizer = load_tokenizer(path)
        return lambda ids: str(tokenizer.decode(list(ids)))
    from tokenizers import Tokenizer

    try:
        fast = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"cannot read {file}: {str(error).strip() or type(error).__name__}") from error
    return lambda ids: fast.decode(list(ids), skip_special_tokens=False)


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, model_dir: Path, vocab_size: int) -> None:
    """Raise `UserError` unless every token id is a row of the model's embedding and a response can end."""
    if (largest := max(tokenizer.get_vocab().values())) >= vocab_size:
        raise UserError(
            f"the tokenizer does not fit the model: its largest token id is {largest}, but {model_dir}/config.json has "
            f"vocab_size = {vocab_size}; set model.tokenizer to the tokenizer that the model was trained with"
        )
    too_large = [token for token in stop_token_ids(tokenizer, model_dir) if token >= vocab_size]
    if too_large:
        raise UserError(f"stop token id {too_large[0]} is not below vocab_size = {vocab_size} of {model_dir}")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> tuple[int, ...]:
    """The token ids that end a response, ascending: the end-of-sequence tokens of tokenizer and model."""
    ids = end_of_sequence(model_dir)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError(f"there is no stop token: neither the tokenizer nor {model_dir} names an eos token")
    return tuple(sorted(ids))


def end_of_sequence(model_dir: Path) -> set[int]:
    """The end-of-sequence tokens (``eos_token_id``) that a model's generation_config.json and config.json name."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        eos = language_settings(read_settings(path)).get("eos_token_id") if path.exists() else None
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return ids
