"""The verifier for mathematics agrees with verdicts made by hand (judged_pairs.jsonl)."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megarl.data.boxes import joined_boxes, last_box
from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.answers import answer_of
from megarl.rewards.math import Math

PAIRS = [json.loads(line) for line in Path(__file__).with_name("judged_pairs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def verdicts():
    verifier = Math(RewardTable(kind="math"))
    return [bool(verifier.score(Prompt(0, "?", (1,), pair["gold"], {}), pair["response"])) for pair in PAIRS]


def test_the_verdicts_are_those_of_a_person(verdicts):
    wrong = [pair for pair, verdict in zip(PAIRS, verdicts, strict=True) if verdict != pair["right"]]
    assert len(PAIRS) >= 150 and wrong == []


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("1/3", ".3333333"),
        ("(1,2)", "\\boxed{1,2}"),
        ("3", "\\boxed{\\{3\\}}"),
        ("42", "\\boxed{[42]}"),
        ("42", "$[42]$"),
        ("1.6\\times10^{-19}", "\\boxed{1.7\\times10^{-19}}"),
    ],
)
def test_math_verify_alone_would_take_these_for_equal(gold, response):
    import math_verify

    parse = math_verify.parse
    assert math_verify.verify(parse(f"${gold}$"), parse(response))
    assert Math(RewardTable(kind="math")).score(Prompt(0, "?", (1,), gold, {}), response) == 0.0


@pytest.mark.parametrize(
    "writing", ["\\boxed{%s}", "\\boxed{%s.}", "\\boxed{\\text{The answer is } %s}", "$\\boxed %s$"]
)
@pytest.mark.parametrize("gold", ["42", "9.5", "\\frac{1}{2}", "3\\sqrt{2}", "(1,2)", "[0,1)", "x^2+1", "4.5e33"])
def test_a_dot_or_words_in_the_box_do_not_count(gold, writing):
    boxed = Math(RewardTable(kind="math", boxed=True))
    response = writing.replace("%s", gold)
    assert boxed.score(Prompt(0, "?", (1,), gold, {}), response) == 1.0
    assert answer_of("math", response) == answer_of("math", f"\\boxed{{{gold}}}")


HARMLESS = (
    "\\boxed{%s}",
    " \\boxed{ %s } ",
    "\\boxed{%s.}",
    "\\boxed{\\textcolor{red}{%s}}",
    "\\boxed{\\color{blue}%s}",
)
HARMLESS += ("<think>\\boxed{no}</think>$\\boxed{%s}$", "<answer>%s</answer>", "<answer>$%s$</answer>", "**$%s$**")
HARMLESS += ("The answer is **\\boxed{%s}**.", "<think>so</think>\n\n<answer>\\boxed{%s}</answer>\n")
ANSWERS = (
    "5",
    "-3",
    "42",
    "1/2",
    "\\frac{7}{2}",
    "0.25",
    "x^2+1",
    "3\\sqrt{2}",
    "(1,2)",
    "[0,1)",
    "\\{1,2\\}",
    "2\\pi",
)


@pytest.mark.parametrize("writing", HARMLESS)
@pytest.mark.parametrize("gold", ANSWERS)
def test_harmless_text_around_an_answer_changes_no_verdict(gold, writing):
    assert score(gold, writing.replace("%s", gold)) == 1.0
    others = [other for other in ANSWERS if other != gold]
    assert [other for other in others if score(gold, writing.replace("%s", other))] == []


def score(gold, response):
    return VERIFIER.score(Prompt(0, "?", (1,), gold, {}), response)


VERIFIER = Math(RewardTable(kind="math"))


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("90", "\\boxed{90°}", True),
        ("90^\\circ", "\\boxed{90°}", True),
        ("90", "\\boxed{91°}", False),
        ("7/2", "\\boxed{3 1/2}", True),
        ("3 1/2", "\\boxed{3.5}", True),
        ("3/2", "\\boxed{3 1/2}", False),
        ("31/2", "\\boxed{3 1/2}", False),
        ("-3", "The answer is \u22123", True),
        ("3", "The answer is \u22123", False),
        ("yes", "\\boxed{YES}", True),
        ("Yes", "\\boxed{\\text{yes}}", True),
        ("yes", "\\boxed{no}", False),
        ("23", "\\boxed{2**3}", False),
        ("\\sqrt{1/n}", "\\boxed{\\frac{1}{\\sqrt{n}}}", True),
        ("\\sqrt{\\frac{a}{b}}", "\\boxed{\\frac{\\sqrt{a}}{\\sqrt{b}}}", True),
        ("|x|", "\\boxed{x}", False),
        ("\\sqrt{x^2}", "\\boxed{x}", False),
        ("\\sqrt{x^2}", "\\boxed{|x|}", True),
        ("\\sqrt{x}", "\\boxed{\\sqrt{x+1}}", False),
        ("11111111100", "\\boxed{11,\\! 111,\\! 111,\\! 100}", True),
        ("1, 2, 3", "\\boxed{1},\\boxed{2},\\boxed{3}", True),
        ("\\{1,2\\}", "$\\boxed{1}$ and $\\boxed{2}$", True),
        ("(1,2),(2,1)", "\\[\\boxed{(1, 2)} \\quad \\text{and} \\quad \\boxed{(2, 1)}\\]", True),
        ("1, 2, 3", "\\boxed{1},\\boxed{2},\\boxed{4}", False),
        ("1, 2, 3", "\\boxed{1},\\boxed{2}", False),
        ("1, 2", "First \\boxed{1}, then we see \\boxed{2}", False),
        ("12", "\\boxed{1},\\boxed{2}", False),
        ("3", "\\boxed{1} and \\boxed{2}", False),
        ("25", "so $x=2$, $\\boxed 25$", True),
        ("5", "so \\boxed5", True),
        ("-5", "so \\boxed-5", True),
        ("5", "so \\boxed{6} and not \\boxedtimes 5", False),
        ("1/3", "\\boxed{0.33333333333333333333333333333333}", False),
        ("10^{20}", "\\boxed{100000000000000000001}", False),
        ("\\frac{1}{2004!}", "\\boxed{\\frac{1}{2006!}}", False),
        ("\\frac{1}{2^{99}}", "\\boxed{\\frac{1}{2^{98}}}", False),
        ("101_2", "\\boxed{101_2}", True),
        ("101_2", "\\boxed{101_{2}}", True),
        ("101_{2}", "The answer is $101_2$.", True),
        ("101_2", "\\boxed{101_3}", False),
        ("101_2", "\\boxed{101}", False),
        ("101", "\\boxed{101_2}", False),
        ("1A_{16}", "\\boxed{1B_{16}}", False),
        ("5", "As $101_2 = 5$, the answer is $5$", True),
        ("listen", "\\boxed{silent}", False),
        ("3 million", "\\boxed{3 \\times 10^6}", True),
        ("3,500,000", "\\boxed{\\$3.5\\text{ million}}", True),
        ("3 million", "\\boxed{3 billion}", False),
        ("1,-2", "\\boxed{x = 1, -2}", True),
        ("1,-2", "\\boxed{x = 1, -3}", False),
        ("6-5i", "\\boxed{6 - 5 i}", True),
        ("-\\frac{1}{4}x^2", "\\boxed{\\mathbf{-\\frac{1}{4}x^2}}", True),
        ("6:23", "\\boxed{\\text{6:23}}", True),
        ("18", "so it is\n#### 18\n\nQuestion: what is 3 + 4? It is 7", True),
        ("7", "#### 3. Sums\nThe answer is 7", True),
        ("5", "<answer>6</answer> 5", False),
        ("5", "<think>\\boxed{5}</think> I do not know, perhaps \\boxed{6}", False),
    ],
)
def test_forms_of_an_answer_and_what_is_none(gold, response, right):
    assert score(gold, response) == float(right)


# reported to other projects, or made from the formats that are named
REPORTED = [
    # Math-Verify 81 and 34: mixed numbers in a sentence, of which it reads a part
    ("71/6", "The answer is 11 5/6.", True),
    ("5/4", "The answer is 1 1/4", True),
    ("10", "The answer is 4 10/3", False),
    ("2", "The answer is 2 2/3", False),
    ("11/2", "\\boxed{1 1/2}", False),
    # Math-Verify 14: sequences, and e in roman letters
    ("1, 2, \\ldots, n", "\\boxed{1, 3, 5, \\ldots, 2n-1}", False),
    ("1, 2, \\ldots, n", "The answer is $1, 2, \\dots, n$.", True),
    ("1, 2, 3", "\\boxed{1, 2, 3, \\ldots}", False),
    ("1, 2, 3", "\\boxed{1, 2, 3, ...}", False),
    ("1 - \\frac{1}{\\mathrm{e}}", "\\boxed{1 - \\frac{1}{e}}", True),
    ("19, 46, \\text{ and } 82", "\\boxed{21, 36, and 82}", False),
    ("12:00", "\\boxed{1:00}", False),
    # Math-Verify 76 and 44: bold, code, quotes, and boxes that it joins
    ("73", "Left: 437 + 2*234 = 905\n\nFinal Answer: **73**", True),
    ("42", "The answer is `42`.", True),
    ("42", "The answer is *42*.", True),
    ("42", 'The answer is "42".', True),
    ("5", "Answer: __5__", True),
    ("24", "\\boxed{2*3*4}", True),
    ("840", "so \\boxed{840}.\n\n**Final Answer**\n\\boxed{840}", True),
    # latex2sympy2_extended 4: double factorials, which are no exclamations
    ("15", "\\boxed{5!!}", True),
    ("720", "\\boxed{3!!}", False),
    ("42", "The answer is 42!!", True),
    # digits that are written out: MATH's repeating decimals, dots after a number
    ("0.\\overline{12}", "\\boxed{\\frac{4}{33}}", True),
    ("\\frac{1}{6}", "\\boxed{0.1\\bar{6}}", True),
    ("0.3", "\\boxed{0.\\overline{3}}", False),
    ("3.14159", "\\boxed{3.14159\\ldots}", False),
    ("42", "So the answer is 42...", True),
    # followthemoney 331 and ISO 31-0: digits in groups
    ("1234567", "\\boxed{1 234 567}", True),
    ("1234", "\\boxed{1\u202f234}", True),
    ("(1,234)", "\\boxed{1 234}", False),
    # Unicode: wide and other digits, signs, fractions, powers, what is invisible
    ("-12", "\\boxed{\uff0d\uff11\uff12}", True),
    ("12", "\\boxed{\u0661\u0662}", True),
    ("-3", "The answer is \u20133.", True),
    ("-4", "\\boxed{1\u20135}", False),
    ("7/2", "\\boxed{3\u00bd}", True),
    ("x^2", "\\boxed{x\u00b2}", True),
    ("22", "\\boxed{2\u00b2}", False),
    ("6", "\\boxed{2\u00b73}", True),
    ("[\\sqrt{2}, \\infty)", "\\boxed{[\u221a2, \u221e)}", True),
    ("42", "\\boxed{\u200b42}", True),
    # LaTeX of answers to competitions: sizes, braces, units, ordinals, currencies
    ("(1,2)", "\\boxed{\\bigl(1,2\\bigr)}", True),
    ("\\{1,2\\}", "\\boxed{\\lbrace 1,2\\rbrace}", True),
    ("5", "\\boxed{\\underline{5}}", True),
    ("5", "\\boxed{5\\hspace{1cm}}", True),
    ("-3", "\\boxed{{-}3}", True),
    ("D", "\\boxed{\\text{D. }}", True),
    ("90", "\\boxed{90\\degree}", True),
    ("30", "\\boxed{30^{\\text{o}}}", True),
    ("25", "\\boxed{25 \u00b0C}", True),
    ("0.25", "\\boxed{25\\text{ percent}}", True),
    ("4", "\\boxed{4^{\\text{th}}}", True),
    ("5", "\\boxed{\u20ac5}", True),
    ("5", "\\boxed{5\\text{ USD}}", True),
    ("5", "<ANSWER>5</ANSWER>", True),
]


@pytest.mark.parametrize(("gold", "response", "right"), REPORTED)
def test_reported_forms_of_an_answer(gold, response, right):
    assert score(gold, response) == float(right)


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("70", "so\n\\(\\boxed{70}\\).</answer>", True),  # skylight-org/skylight-research 34
        ("16", "\\boxed{016}", True),  # NVIDIA-NeMo/Skills 1074
        ("033", "\\boxed{33}", True),  # verl 2446
        ("033", "\\boxed{330}", False),  # the same
        ("29", "Two are $7.50 each, so the total cost is $29.00.", True),  # EleutherAI/lm-evaluation-harness 3214
        ("72", "The answer is 72, in total, so the farmer earns that much.", True),  # stanford-crfm/helm 4337
        ("5", "I get \\boxed{5}, in \\boxed as you asked.", True),  # EleutherAI/lm-evaluation-harness 3477
        ("5", "I get \\boxed{5}, in `\\boxed{}` and not in \\boxed {}.", True),  # the same
        ("4", "The roots are $\\sqrt{64} = 8$ and 4.\n\n**Answer:** 4.", True),  # the same, 3643
        ("28\\%", "$\\boxed{28 percent}$", True),  # huggingface/Math-Verify 61
        ("28\\%", "$\\boxed{82 percent}$", False),  # the same
        ("4", "$4\\sqrt(2)$", False),  # 41
        ("4\\sqrt{2}", "\\boxed{4\\sqrt(2)}", True),  # 41
        ("3x-y+13=0", "\\boxed{3x+4y+14=0}", False),  # 60
        ("\\dfrac{\\pi}{2}", "\\boxed{pi/2}", True),  # 69
        ("e^{16} - 1", "\\boxed{-1 + exp(16)}", True),  # 69
        ("1331 and 1728", "\\boxed{1728}", False),  # 47
        ("-7/2", "\\boxed{-3 1/2}", True),  # 81
        ("1, 2, \\ldots, n", "\\boxed{1, 3, 5, \\ldots, 2n-1}", False),  # 14
        ("1, 2, \\ldots, n", "\\boxed{1,2,\\dots,n}", True),  # 14
        ("2", "\\boxed{1, 2, \\ldots, n}", False),  # 14
        ("\\( 13824 \\notin A \\)", "\\boxed{13824 \\notin A}", True),  # NVIDIA-NeMo/Skills 1092
        ("\\( 13824 \\notin A \\)", "\\boxed{13824 \\in A}", False),  # the same
        ("\\frac{1}{2}", "so $\\fbox{\\frac{1}{2}}$", True),  # THUDM/slime 2150
        ("\\frac{63}{400}", "\\boxed{\\frac{64}{400}}", False),  # huggingface/open-r1 566
        ("336^\\circ", "\\boxed{336}", True),  # math-ai/aime25
        ("\\text{(C)}", "\\boxed{C}", True),  # hendrycks/math
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn.}}", True),  # hendrycks/math
        ("1 \\pm \\sqrt{19}", "\\boxed{1 - \\sqrt{19}}", False),  # hendrycks/math
    ],
)
def test_answers_that_other_graders_judged_wrong(gold, response, right):
    assert score(gold, response) == float(right)


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("C", "Since (A) and (B) fail, the answer is (C).", True),
        ("C", "**Answer:** C) a car", True),
        ("(C)", "The answer is not A. The correct option is **C**.", True),
        ("C", "<think>Answer: D</think>\\boxed{\\text{(C) } 5\\text{ m}}", True),
        ("C", "Choose (C), which is a car.\nSo (D) fails.", False),
        ("A", "Answer: A car is faster.", False),
        ("I", "Answer: I think that (C) is right.", False),
        ("A", "\\boxed{A, C}", False),
        ("A", "The answer is (A) or (C).", False),
        ("A", "\\boxed{A \\cap B}", False),
        ("A", "\\boxed{A = 2}", False),
        ("A", "\\boxed{AB}", False),
        ("B", "Answer: B\n\nI hope this helps.", True),
        ("C", "The answer is C\nA is wrong since it is odd.", True),
        ("A", "Answer: A\n\nthe car is faster.", True),
        ("B", "The answer is (B), since answer (A) ignores friction.", True),
        ("A", "The answer is A, C would be too large.", True),
        ("D", "So the answer cannot be (D).", False),
        *(
            ("A", f"\\boxed{{{two}}}", False)
            for two in (
                "A \\text{ and } C",
                "\\text{A}, \\text{C}",
                "\\textbf{(A)} \\text{ and } \\textbf{(C)}",
                "A; C",
                "A, and C",
                "A (or C)",
                "A \\quad C",
                "A|C",
                "A>B",
                "A/2",
                "A - 1",
                "A(x)",
                "A_{16}",
            )
        ),
        ("1 2\n3 4", "[[1, 2],\n [3, 4]]", True),
        ("1 2\n3 4", "It is not\n1 2\n\nbut\n```\n1 2\n3 4\n```", True),
        ("1 2\n3 4\n\n5 6", "[[1, 2], [3, 4]]\n\n[[5, 6]]", True),
        ("1 2\n3 4\n\n5 6", "5 6\n\n1 2\n3 4", False),
        ("1 2\n3 4", "1 2\n3 4\n5 6", False),
        ("1 2\n3 4", "1 2\n3 4\n\n[[1, 2], [3, 14]]", False),
        ("1 2", "\\boxed{12}", False),
        ("7", "\\boxed{[[7]]}", True),
        *(
            ("1 2\n3 4", grid, True)
            for grid in (
                "\\boxed{\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}}",
                "\\boxed{\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}}",
                "[[1 2]\n [3 4]]",
                "[1, 2]\n[3, 4]",
                "[[1, 2], [3, 4],]",
                "| 1 | 2 |\n|---|---|\n| 3 | 4 |",
            )
        ),
        ("3 4", "\\boxed{\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}}", False),
    ],
)
def test_labels_of_choices_and_grids(gold, response, right):
    assert score(gold, response) == float(right)


def test_responses_with_a_label_are_counted_for_majorities():
    assert answer_of("math", "It has 4 wheels, so the answer is (C).") == answer_of("math", "\\boxed{C}") == "C"
    assert answer_of("math", "<think>Maybe the answer is (B)</think> The answer is C(10,3) = 120") == "120"


def test_boxes_in_boxes_take_neither_time_nor_memory():
    tracemalloc.start()
    assert last_box("\\boxed{" * 50_000) is None  # hours, if each were read to the end
    assert last_box("\\boxed{" * 50_000 + "1" + "}" * 50_000) == "1"  # 10 GB, if each were a text of its own
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert joined_boxes("\\boxed{1}, $\\boxed 2$ and \\boxed{\\frac{1}{\\boxed{3}}}") == "1, 2, \\frac{1}{\\boxed{3}}"
