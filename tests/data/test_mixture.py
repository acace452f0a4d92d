"""Mixtures of several prompt sources with weights."""

import json
from collections import Counter

import pytest

from megarl.data.prompts import build_prompts
from megarl.data.sources import PATTERN
from megarl.errors import UserError
from megarl.recipe.data_table import DataTable
from tests.data.prompt_sources import recipe, write

# the order of a single source, which must never change: each epoch has all training rows, in another order
GOLDEN = [f"a{n}" for n in (0, 1, 4, 6, 9, 5, 11, 10, 8, 1, 6, 5, 8, 11, 0, 4, 9, 10, 6, 4)]
GOLDEN_HELDOUT = ["a7", "a2", "a3"]


def numbers(path, name, count):
    """The table of a source: a file whose prompts begin with ``name``."""
    file = write(path / f"{name}.jsonl", [{"prompt": f"{name}{i}", "answer": "1"} for i in range(count)])
    return {"source": "file", "train": str(file)}


def test_each_source_has_its_share_and_its_own_order(tokenizer, tmp_path):
    a, b, c = numbers(tmp_path, "a", 50), numbers(tmp_path, "b", 400), numbers(tmp_path, "c", 7)
    weighted = ({**a, "weight": 7}, {**b, "weight": 2.5}, {**c, "weight": 0.5})
    prompts = build_prompts(recipe(sources=weighted, heldout=0), tokenizer)
    order = [prompts.train(i).text for i in range(3 * PATTERN)]
    assert Counter(text[0] for text in order) == {"a": 2100, "b": 750, "c": 150}
    for start in range(0, 3 * PATTERN, PATTERN):
        assert Counter(text[0] for text in order[start : start + PATTERN]) == {"a": 700, "b": 250, "c": 50}
    for name, count in (("a", 50), ("b", 400), ("c", 7)):
        file = tmp_path / f"{name}.jsonl"
        alone = build_prompts(recipe(file=file, heldout=0), tokenizer)
        own = [text for text in order if text[0] == name]
        assert own == [alone.train(i).text for i in range(len(own))]
        assert len(set(own[:count])) == min(count, len(own)), "no repetition within an epoch"
    assert len({tuple(text[0] for text in order[n : n + PATTERN]) for n in (0, PATTERN)}) == 2
    again, other = (build_prompts(recipe(sources=weighted, heldout=0, seed=seed), tokenizer) for seed in (0, 1))
    assert [again.train(i).text for i in (2999, 3, 1000, 3)] == [order[i] for i in (2999, 3, 1000, 3)]
    assert [other.train(i).text for i in range(50)] != order[:50]


def test_the_order_of_a_single_source_is_the_recorded_one(tokenizer, tmp_path):
    """Else a run that another version of megarl resumes would see other prompts."""
    a = numbers(tmp_path, "a", 12)
    plain = build_prompts(recipe(file=tmp_path / "a.jsonl", heldout=3), tokenizer)
    assert [plain.train(i).text for i in range(20)] == GOLDEN
    other_seed = build_prompts(recipe(file=tmp_path / "a.jsonl", heldout=3, seed=1), tokenizer)
    assert [prompt.text for prompt in plain.heldout()] == GOLDEN_HELDOUT
    assert other_seed.heldout() == plain.heldout()
    alone = build_prompts(recipe(sources=[a], heldout=3), tokenizer)
    assert [alone.train(i) for i in range(2100)] == [plain.train(i) for i in range(2100)]
    assert alone.heldout() == plain.heldout()


def test_held_out_prompts_come_from_all_sources_and_are_trained_in_none(tokenizer, tmp_path):
    a, b = numbers(tmp_path, "a", 40), numbers(tmp_path, "b", 200)
    with open(b["train"], "a") as file:
        file.writelines(json.dumps({"prompt": f"a{i}", "answer": "1"}) + "\n" for i in range(40))
    prompts = build_prompts(recipe(sources=[a, {**b, "weight": 3}], heldout=40), tokenizer)
    heldout = {prompt.text for prompt in prompts.heldout()}
    assert [prompt.index for prompt in prompts.heldout()] == list(range(len(heldout)))
    assert 36 <= len(heldout) <= 40 and 10 <= sum(text[0] == "a" for text in heldout) <= 20
    assert heldout.isdisjoint(prompts.train(i).text for i in range(2000))
    epoch = [text for i in range(200) if (text := prompts.train(i).text)[0] == "b"]
    assert len(set(epoch)) == len(epoch), "held-out rows are not part of the epoch"


def test_files_and_generators_can_be_mixed(tokenizer, tmp_path):
    words = {"source": "reasoning_gym", "train": "spell_backward"}
    prompts = build_prompts(recipe(sources=[numbers(tmp_path, "q", 9), words], heldout=4), tokenizer)
    order = [prompts.train(i) for i in range(400)]
    assert 150 < sum("generator" in prompt.entry for prompt in order) < 250
    assert prompts.scorers.keys() == {"spell_backward"}
    assert sum("generator" in prompt.entry for prompt in prompts.first_epoch(1000)) == 1


def test_mistakes_in_sources_are_refused(tokenizer, tmp_path):
    a, b = numbers(tmp_path, "a", 4), numbers(tmp_path, "b", 4)
    with pytest.raises(UserError, match="less than one of 1000 prompts"):
        build_prompts(recipe(sources=[a, {**b, "weight": 1e-6}], heldout=0), tokenizer)
    words = {"source": "reasoning_gym", "train": "spell_backward"}
    with pytest.raises(UserError, match=r'generator .spell_backward. with different options.*train = "composite"'):
        build_prompts(recipe(sources=[words, {**words, "options": {"min_word_len": 4}}], heldout=0), tokenizer)
    with pytest.raises(ValueError, match=r"needs source and train, or \[\[data.sources\]\], to say where"):
        DataTable.model_validate({"source": "file"})
    with pytest.raises(ValueError, match="eval.source.* whichever .s.jsonl. is"):
        recipe(sources=[a, b], evaluation={"suite": "s.jsonl"})
