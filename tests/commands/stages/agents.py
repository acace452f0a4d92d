"""A tiny model that calls a tool in about half of its turns, and a tokenizer with a chat template."""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import write_guessing_model

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")
WORDS = ("assistant", "user", "tool", "system", "\n", CALL, *"52+3 ?!", "again", "tools", "add", "?x")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\ntools{% for t in tools %} {{ t.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def write_agent_model(source, path):
    """Write a copy of ``source`` that begins a turn with a tool call or an answer, and then mostly stops."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    turns = [vocabulary[word] for word in (CALL, "5")]
    write_guessing_model(source, path, begins=vocabulary["\n"], guesses=turns, said=turns, again=0.0)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?x"))
    pieces = "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    for file in path.glob("tokenizer*"):
        file.unlink()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
