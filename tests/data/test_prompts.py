"""Files and generators as sources of prompts: order, held-out prompts, mistakes."""

import json
import shutil

import pytest

from megarl.data.prompts import build_prompts, open_prompts
from megarl.data.sources import BLOCK
from megarl.errors import UserError
from megarl.rewards import row_of
from tests.data.prompt_sources import char_tokenizer, recipe, write


def numbers(path, count):
    return write(path / "numbers.jsonl", [{"prompt": f"{i}+1", "answer": i + 1, "level": i % 3} for i in range(count)])


def test_a_row_is_kept_without_long_texts_and_with_its_source(tokenizer, tmp_path):
    row = {"prompt": "1+1", "gold": "2", "level": 3, "share": 0.5, "hard": True, "proof": "x" * 201, "no": None}
    file = write(tmp_path / "p.jsonl", [row])
    prompt = build_prompts(recipe(file=file, heldout=0, columns={"answer": "gold"}), tokenizer).train(0)
    assert json.loads(prompt.row) == {"source": "p.jsonl", "gold": "2", "level": 3, "share": 0.5, "hard": True}
    assert row_of(prompt)["gold"] == row_of(prompt)["answer"] == "2"  # a renamed column keeps its own name
    generated = build_prompts(recipe("spell_backward", heldout=0), tokenizer).train(0)
    assert json.loads(generated.row)["source"] == "spell_backward"


def test_columns_of_metrics_are_checked_before_a_run(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}+1", "answer": "1", "level": i % 3, "id": i} for i in range(40)]
    prompts = build_prompts(recipe(file=write(tmp_path / "p.jsonl", rows), heldout=0), tokenizer)
    prompts.check(100, ["level", "source"])
    with pytest.raises(UserError, match=r"no prompt keeps a column 'levle'; did you mean 'level'\?"):
        prompts.check(100, ["levle"])
    with pytest.raises(UserError, match=r"column 'id' has 40 values; metrics are for at most 32"):
        prompts.check(100, ["id"])


def test_repeated_rows_are_not_both_held_out_and_trained_on(tokenizer, tmp_path):
    rows = [{"prompt": p, "answer": "1"} for p in [f"{i}" for i in range(30)] * 3 + ["A", "a"] * 20]
    prompts = build_prompts(recipe(file=write(tmp_path / "p.jsonl", rows), heldout=12), tokenizer)
    heldout = {p.tokens for p in prompts.heldout()}
    assert len(heldout) == 12
    assert heldout.isdisjoint(prompts.train(i).tokens for i in range(300))


def test_prompts_of_a_separate_suite_are_held_out(tokenizer, tmp_path):
    suite = write(tmp_path / "suite.jsonl", [{"prompt": f"{i}+1", "answer": "1"} for i in range(5)])
    file = numbers(tmp_path, 20)
    with pytest.warns(UserWarning, match="evaluation uses only the 5 distinct prompts"):
        prompts = build_prompts(recipe(file=file, heldout=9, evaluation={"suite": str(suite)}), tokenizer)
    assert sorted(p.text for p in prompts.heldout()) == [f"{i}+1" for i in range(5)]
    assert {prompts.train(i).text for i in range(15)} == {f"{i}+1" for i in range(5, 20)}
    with pytest.raises(UserError, match="nothing is left to train on"):
        build_prompts(recipe(file=suite, heldout=20, evaluation={"suite": str(file)}), tokenizer)


GOOD = b'{"prompt": "1", "answer": "2"}\n'
NO_ANSWER = "answer must be a non-empty string or a finite number, got None"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "contains no prompts"),
        ("p.jsonl", GOOD + b'{"prompt": "3"}\n', r"line 2: no column 'answer' \(or 'tests', .*\); it has prompt"),
        ("p.jsonl", b'{"prompt": "3", "tests": []}\n', r"a row without answer must have tests, got \[\]"),
        ("p.jsonl", GOOD + b"\n" + b'{"prompt": "3", "ans', r"p.jsonl, line 3 is not JSON"),
        ("p.jsonl", b'{"prompt": 3, "answer": "2"}\n', "line 1: prompt must be a string or a list of messages"),
        ("p.jsonl", GOOD, "too few different prompts to hold one out"),
        ("p.parquet", b"not parquet", "cannot read .*p.parquet"),
        ("p.csv", b"prompt,answer\n1,2\n3\n", f"p.csv, row 2: {NO_ANSWER}"),
        ("p.csv", b"prompt,answer,answer\np,1,2\n", "two columns 'answer'"),
        ("p.csv", b'prompt,answer\n1,"2', "cannot read .*p.csv: unexpected end of data"),
        ("p.json", GOOD, r"p.json: expected a list of rows, got dict"),
        ("p.jsonl.gz", GOOD, r"must end in .jsonl, .json, .csv or .parquet; unpack it: gunzip -k \S*/p.jsonl.gz$"),
    ],
)
def test_unusable_prompt_files_are_errors(tokenizer, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        build_prompts(recipe(file=tmp_path / name), tokenizer)


def test_prompts_are_opened_again_only_when_something_has_changed(tmp_path):
    """Each policy has a copy of the tokenizer, so its path does not count."""
    char_tokenizer(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "policy")
    wanted = recipe(file=numbers(tmp_path, 50), heldout=10)
    opened = open_prompts(wanted, tmp_path / "base")
    again = open_prompts(wanted.model_copy(deep=True), tmp_path / "policy")
    assert all(new is old for new, old in zip(again, opened, strict=True))

    numbers(tmp_path, 60)
    of_new_rows = open_prompts(wanted, tmp_path / "base")[1]
    assert of_new_rows is not opened[1]
    assert [p.text for p in of_new_rows.heldout()] != [p.text for p in opened[1].heldout()]

    char_tokenizer(tmp_path / "policy", bos_token="<eos>")
    assert open_prompts(wanted, tmp_path / "policy")[0].bos_token == "<eos>"

    other_order = open_prompts(recipe(file=tmp_path / "numbers.jsonl", heldout=10, seed=1), tmp_path / "base")[1]
    assert other_order.train(0) != of_new_rows.train(0)


# single digits: the generator has only 200 prompts
FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}


def test_seeds_and_blocks_do_not_overlap(tokenizer):
    """In reasoning-gym dataset(seed=1)[1] is dataset(seed=2)[0]."""
    options = {"min_digits": 5, "max_digits": 6}
    streams = []
    for seed in (0, 1, 2):
        prompts = build_prompts(recipe("chain_sum", options=options, seed=seed), tokenizer)
        indices = [*range(60), *range(BLOCK - 30, BLOCK + 30)]
        streams.append([prompts.train(i).text for i in indices] + [p.text for p in prompts.heldout()])
    assert min(len(set(stream)) for stream in streams) >= len(streams[0]) - 2, "blocks do not overlap either"
    assert streams[0][-16:] == streams[1][-16:], "held-out prompts do not depend on run.seed"
    a, b, c = (set(s[:-16]) for s in streams)
    assert max(len(a & b), len(b & c), len(a & c)) <= 2  # by chance


def test_heldout_prompts_are_distinct_and_never_trained_on(tokenizer):
    """Every fifth item is a held-out prompt and must be replaced."""
    prompts = build_prompts(recipe("chain_sum", options=FEW, heldout=40), tokenizer)
    heldout = {p.tokens for p in prompts.heldout()}
    assert len(heldout) == len(prompts.heldout()) == 40
    trained = [prompts.train(i) for i in range(2000)]
    assert heldout.isdisjoint(p.tokens for p in trained)
    assert len({p.tokens for p in trained}) > 60
    again = build_prompts(recipe("chain_sum", options=FEW, heldout=40), tokenizer)
    assert [again.train(i) for i in (1999, 77, 0)] == [trained[i] for i in (1999, 77, 0)]


def test_of_a_generator_with_few_prompts_half_are_held_out_with_a_warning(tokenizer):
    with pytest.warns(UserWarning, match=r"only the \d+ distinct prompts of chain_sum"):
        prompts = build_prompts(recipe("chain_sum", options=FEW, heldout=500), tokenizer)
    heldout = {p.tokens for p in prompts.heldout()}
    assert 60 <= len(heldout) <= 100
    assert heldout.isdisjoint(prompts.train(i).tokens for i in range(200))


def test_evaluation_with_another_generator_holds_out_its_prompts_and_adds_its_scorer(tokenizer):
    prompts = build_prompts(recipe("spell_backward", evaluation={"suite": "letter_counting"}), tokenizer)
    assert prompts.train(0).entry["generator"] == "spell_backward"
    assert {prompt.entry["generator"] for prompt in prompts.heldout()} == {"letter_counting"}
    assert set(prompts.scorers) == {"spell_backward", "letter_counting"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": "spell_backwards"}, "no generator 'spell_backwards'; did you mean 'spell_backward'"),
        ({"options": {"min_word_length": 3}}, "min_word_length.*its options: min_word_len, max_word_len"),
        ({"options": {"min_word_len": 9, "max_word_len": 3}}, "max_word_len must be >= min_word_len"),
        ({"options": {"seed": 3}}, "multiple values for keyword argument 'seed'"),
        ({"prompt_template": "{wort}="}, r"'wort'.*known fields are .*\{prompt\}.*\{word\}"),
        ({"prompt_template": "{word"}, "does not fit"),
        ({"max_prompt_tokens": 2}, r"has \d+ tokens, more than data.max_prompt_tokens = 2: '"),
    ],
)
def test_mistakes_in_the_table_of_a_generator_are_refused(tokenizer, changes, message):
    with pytest.raises(UserError, match=message):
        build_prompts(recipe(**{"generator": "spell_backward", **changes}), tokenizer).train(0)


def test_generators_that_depend_on_the_hash_seed_need_a_fixed_one(tokenizer, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="set PYTHONHASHSEED=0"):
        build_prompts(recipe("ransom_note"), tokenizer)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert build_prompts(recipe("ransom_note", heldout=2), tokenizer).train(0).text
