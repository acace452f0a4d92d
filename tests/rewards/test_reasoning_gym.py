"""No response decides on its own score or on another's, whatever the scorers of reasoning-gym do with its text."""

import inspect
import random
import types

import pytest

from megarl.data.prompts import build_prompts
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits
from megarl.rewards.reasoning_gym import EVALUATING
from tests.data.prompt_sources import char_tokenizer, recipe
from tests.rewards.pooling import generated, scored

SHELL = "__import__('os').system('touch {trace}')"
HOSTILE = (
    # code, and what is needed to reach it
    SHELL, "[[" + SHELL + "]]", "{{" + SHELL + "}}", "exec(\"open('{trace}', 'w')\")", "compile('1', '', 'eval')",
    "(lambda: open('{trace}', 'w'))()", "[open('{trace}', 'w') for _ in [1]]", "f\"{{open('{trace}', 'w')}}\"",
    "[*map(open, ['{trace}'], ['w'])]", "[].__class__.__base__.__subclasses__()", "sympify(\"open('{trace}', 'w')\")",
    "sqrt.__globals__", "exp(x).func.__init__.__globals__", "sin(x)(x)",
    # changes of the scorer's state
    "[0 for __builtins__['float'] in [bool]]", "[0 for self.config in [0]]", "[0 for entry['answer'] in ['']]",
    "(entry := 1)", "entry.update(answer='x')", "globals().clear()",
    # the answer itself
    "entry['answer']", "[*entry['answer']]", "oracle_answer", "'{{0.answer}}'.format(entry)", "solution if 1 else 0",
    "await x", "not 1", "x[0]", "'24'", "True", "1j", "24 or 24", "24 | 24",
)  # fmt: skip


def test_scores_do_not_depend_on_the_order_of_responses(tmp_path):
    """Hostile responses to scorers that evaluate get 0, and honest ones among them what they deserve."""
    trace = tmp_path / "trace"
    prompts, verifier = generated(sorted({*EVALUATING, "number_format", "basic_arithmetic"}))
    questions = {(name, text.format(trace=trace)): 0.0 for name in EVALUATING for text in HOSTILE}
    questions["number_format", SHELL.format(trace=trace)] = 0.0
    for name, (prompt,) in prompts.items():
        questions[name, prompt.answer] = 1.0
    for name, split in {"string_insertion": list, "spiral_matrix": str.split}.items():
        questions[name, str(split(prompts[name][0].answer))] = 0.1
    order = sorted(questions)
    for most in (len(order), 60, 60):
        random.Random(most).shuffle(order)
        asked = [question for place, question in enumerate(order) if place < most or questions[question]]
        verdicts = scored(lambda: verifier, Limits(workers=1), [(prompts[name][0], text) for name, text in asked])
        found = {question: verdict.value for question, verdict in zip(asked, verdicts, strict=True)}
        assert {question: score for question, score in found.items() if score != questions[question]} == {}
    assert not trace.exists()


def test_a_composite_generator_has_the_scorers_of_those_inside_it(tmp_path):
    options = {"datasets": [{"name": name, "weight": 1, "config": {}} for name in ("countdown", "chain_sum")]}
    settings = recipe("composite", heldout=1, max_prompt_tokens=10000, options=options)
    prompts = build_prompts(settings, char_tokenizer(tmp_path))
    verifier = build_verifier(settings, prompts)
    asked = [prompts.train(index) for index in range(10)]
    assert {prompt.entry["metadata"]["source_dataset"] for prompt in asked} == {"countdown", "chain_sum"}
    assert [verifier.score(each, each.answer) for each in asked] == [1.0] * 10
    assert [verifier.score(each, "print(1)") for each in asked] == [0.0] * 10


# names whose use in a scorer means that it may evaluate text
EVALUATES = {"eval", "exec", "compile", "__import__", "import_module", "parse_expr", "sympify", "sympy", "sp", "pickle"}
# they evaluate the entry's own problem or answer, but never the response
OWN_TEXT = {"number_sorting", "bitwise_arithmetic"}


def used_by(function, owner, seen):
    """All names used by a function and by the functions of reasoning-gym that it can reach."""
    if function in seen or not function.__module__.startswith("reasoning_gym"):
        return set()
    seen.add(function)
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names |= {*code.co_names}
    for name in list(names):
        for found in (function.__globals__.get(name), getattr(owner, name, None)):
            for each in vars(found).values() if inspect.isclass(found) else [found]:
                if inspect.isfunction(each):
                    names |= used_by(each, found if inspect.isclass(found) else owner, seen)
    return names


def test_every_scorer_that_evaluates_text_is_known():
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 90
    found = {name for name, (kind, _) in DATASETS.items() if used_by(kind.score_answer, kind, set()) & EVALUATES}
    assert found == EVALUATING | OWN_TEXT


FORMS = (
    "{}\n",
    "<think>no: <answer>7</answer></think>\n<answer>{}</answer>",
    "so it is\n<answer>`{}`.</answer>",
    "{}.",
)
# open-thought/reasoning-gym 129, and what models write around answers: fences, formulas, boxes, quotes, other tags
FORMS += ("<answer>\n```\n{}\n```\n</answer>", "```text\n{}\n```", "$${}$$", "\\({}\\)", "$\\boxed{{{}}}$", '"{}"')
FORMS += ("\u201c{}\u201d", "__{}__", "**`{}`**", "<ANSWER>\r\n{}\r\n</ANSWER>", "<answer>\u00a0{}</answer>")
FORMED = (  # generators whose answers are numbers, words, sentences, grids with spaces at their ends, lists
    *("arc_1d", "calendar_arithmetic", "complex_arithmetic", "decimal_arithmetic", "futoshiki", "list_functions"),
    *("number_sorting", "prime_factorization", "sentence_reordering", "spell_backward", "syllogism", "word_ladder"),
)


@pytest.mark.parametrize("name", [*FORMED, *sorted(EVALUATING)])
def test_harmless_text_around_an_answer_changes_no_score(name):
    prompts, verifier = generated([name], 3)
    for prompt in prompts[name]:
        assert [verifier.score(prompt, form.format(prompt.answer)) for form in FORMS] == [1.0] * len(FORMS)
        assert verifier.score(prompt, f"<answer>{prompt.answer}</answer> or <answer>no answer</answer>") < 1.0


def test_answers_that_solve_nothing_are_wrong():
    names = ("game_of_life_halting", "complex_arithmetic", "number_sorting", "countdown", "puzzle24")
    prompts, verifier = generated((*names, "propositional_logic"), 3)
    for name, prompt in [(name, prompt) for name, own in prompts.items() for prompt in own]:
        about = prompt.entry["metadata"]
        numbers = about["numbers"] if name == "countdown" else about.get("original_numbers", ())
        nothing = {"game_of_life_halting": "x", "complex_arithmetic": "nan", "puzzle24": "5*5-1/2"}
        nothing["number_sorting"] = str([str(float(n) + 0.5) for n in about.get("sorted_numbers", ())])
        nothing["countdown"] = f"({'+'.join(map(str, numbers))})*0x0+{about.get('target', 0):#x}"
        if name == "puzzle24":
            about["numbers"] = [5, 5, 1, 2]
            assert verifier.score(prompt, "5*(5-1/2)") < 1.0 and verifier.score(prompt, "6*4*1*1") < 1.0
        if name == "propositional_logic":
            nothing[name] = f"({about['premises'][0]})"
        assert verifier.score(prompt, nothing[name]) < 1.0, name
        assert name in ("puzzle24", "propositional_logic") or verifier.score(prompt, prompt.answer) == 1.0, name
