"""reasoning-gym as a source of prompts: order, held-out prompts, mistakes."""

import warnings

import pytest

from megarl.data.prompts import build_prompts
from megarl.data.sources import BLOCK
from megarl.errors import UserError
from tests.data.prompt_sources import recipe

# single digits: the generator has only 200 prompts
FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
SPELL = {"options": {"min_word_len": 3, "max_word_len": 8}, "prompt_template": "{word}="}


def test_seeds_and_blocks_do_not_overlap(tokenizer):
    """In reasoning-gym dataset(seed=1)[1] is dataset(seed=2)[0]; runs with neighbouring seeds must share no prompts."""
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


def test_prompts_that_differ_in_case_are_one_prompt(tokenizer):
    """The tokenizer ignores case, so while "art" is held out, "Art" must not be trained on."""
    prompts = build_prompts(recipe("spell_backward", **SPELL, heldout=3000), tokenizer)
    heldout = {p.text.lower() for p in prompts.heldout()}
    assert len(heldout) == 3000
    assert not [p.text for p in map(prompts.train, range(3000)) if p.text.lower() in heldout]


def test_of_a_generator_with_few_prompts_half_are_held_out_with_a_warning(tokenizer):
    with pytest.warns(UserWarning, match=r"only the \d+ distinct prompts of chain_sum, but eval.prompts asks for 500"):
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
        ({"options": {"seed": 3}}, "'seed' is set by megarl, from run.seed"),
        ({"prompt_template": "{wort}="}, r"'wort'.*known fields are .*\{prompt\}.*\{word\}"),
        ({"prompt_template": "{word"}, "does not fit"),
        ({"max_prompt_tokens": 2}, r"has \d+ tokens, more than data.max_prompt_tokens = 2: '"),
    ],
)
def test_mistakes_in_the_data_table_are_refused(tokenizer, changes, message):
    with pytest.raises(UserError, match=message):
        build_prompts(recipe(**{"generator": "spell_backward", **changes}), tokenizer).train(0)


def test_generators_that_depend_on_the_hash_seed_need_a_fixed_one(tokenizer, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="set PYTHONHASHSEED=0"):
        build_prompts(recipe("ransom_note"), tokenizer)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert build_prompts(recipe("ransom_note", heldout=2), tokenizer).train(0).text


def test_characters_that_the_tokenizer_lacks_raise_a_warning(tokenizer):
    with pytest.warns(UserWarning, match="does not know some characters"):
        build_prompts(recipe("spell_backward", prompt_template="{word}§"), tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_prompts(recipe("spell_backward", **SPELL), tokenizer)
