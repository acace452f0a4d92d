"""The verifier for mathematics: math-verify decides whether the final answer equals the reference answer.

The answer of a response is its last ``\\boxed{...}``. In a response without one math-verify looks for an answer, unless
``reward.boxed`` requires a box. What `math_verify.verify` takes for equal although it is not is settled before it is
asked: decimals are compared exactly (it rounds them to six places, and takes all numbers below 1e-15 for 0), and a set
or a list equals neither a tuple nor its only element. An inequality, or a set given by one, is the interval it means.

A hostile formula can cost SymPy hours or all memory. math-verify's own timeout works only in the main thread and
between two bytecodes, so it is turned off, and `megarl.rewards.pool` ends a worker that takes too long.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from megarl.data.boxes import joined_boxes, last_box
from megarl.data.prompts import Prompt, PromptSource
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import TAGGED, NoAnswer, Verifier, check_rows, right_answers

Rules = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]
PLAIN = re.compile(r"-?\d+(\.\d+)?|\d([ \n]+\d)*")  # a number, or grids of digits
DOLLAR = re.compile(r"(?<!\\)\$")  # delimits a formula, whereas \$ is a dollar sign
# 1.5e-3 and 1e-3, but in 2e-1 Euler's number
SCIENTIFIC = re.compile(r"(?<![\w.])(?!(?:[2-9]|\d\d+)e[+-]1(?!\d))(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}(?![\w.]*\w)")
SPACING = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lmr]?)(?![a-zA-Z])|\\[,;!:]|(?<!\\)\\[()]|~"
    r"|\\(?:[hv]space|phantom)\*?\s*\{[^{}]*\}"
)
# "The answer is", also as \text{The answer is} 42 or \text{The answer is 42}
WORDS = re.compile(r"(\\(?:text|mathrm|textbf|mbox)\s*\{)?\s*[A-Za-z][A-Za-z ,']*\b(?:is|are)\b\s*:?\s*(.*)", re.DOTALL)
STYLE = re.compile(
    r"^\\(?:math(?:bf|rm|it|sf)|boldsymbol|bm|underline|[lL]arge|LARGE|[hH]uge|text(?=\{[^a-zA-Z]*\}|\{[^a-zA-Z{}]*+[a-zA-Z][^a-zA-Z{}]*+\}))\s*(?=\{)"
)
# a mixed number such as 3 1/2; a repeating decimal such as 0.1\overline{6}
MIXED = re.compile(r"(?<![\w.,/^{])(\d{1,20}) +(\d{1,20})/(\d{1,20})(?![\w/]|[.,]\d)")
REPEATING = re.compile(
    r"(?<![\w.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,20})\s*\}|(\d))(?!\s*\d)"
)
# what is no number, or another one, in a sentence: digits in groups, such as 12 345, 5!!, and three dots
FORMULA: Rules = (
    (re.compile(r"(?<![\w.,/^{])\d{1,3}(?: \d{3}){1,6}(?![\w/]| \d)"), lambda found: found[0].replace(" ", "")),
    (re.compile(r"(?<![\w.!])(\d{1,3})!!(?!!)"), lambda found: str(math.prod(range(int(found[1]), 0, -2)))),
    (re.compile(r"\.\.\.(?!\.)"), r"\\varpi "),
)
MARKED = re.compile(r"#### (-?\$?\d[\d,.]*) *$", re.MULTILINE)  # as in GSM8K, but no heading such as #### 2. Sums
# signs of Unicode that NFKC leaves, or takes for letters or plain digits
SIGNS = str.maketrans(
    {"\u00ba": "\u00b0", "\u02da": "\u00b0", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u221e": r"\infty "}
    | dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff")
)
FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
POWER = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-zA-Z]))")
DASH = re.compile("(?:(?<=[(\\[{=,$])|(?<=is )|\\A)\\s*[\u2013\u2014](?=\\s*[\\d.\\\\])")  # as a sign, not in 1-5
# what says nothing about the value: colours, bold and code of Markdown, quotes, currencies, spacing after commas; and
# other signs for those of LaTeX. An ellipsis becomes a symbol: math-verify would read 1, 2, \ldots, 9 as 1, 2, 9.
AMOUNT = r"-?(?:\\?\$)?\d[\d.,/]*(?:\\cdot 10\^\{\d+\})?"
# words after a number that are no part of a formula
UNIT = (
    r"(?:(?!(?:or|and|to|mod|if|when|for|than|more|less|over|plus|minus|root|pi|squared|cubed|factorial|choose|half"
    r"|halves|dozens?|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|psi|[a-d]{4}|[w-z]{4}"
    r"|(?:sqrt|sin|cos|tan|log|ln|exp)[a-z]?|(?:hundred|thousand|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)\w*"
    r"|\w+(?:teenths?|lfths?|tieths?))\b)[A-Za-z]{2,}+[ ~]*+){1,4}"
)
SQRT = re.compile(r"\\sqrt *\(([^()]*)\)")
HARMLESS: Rules = (
    (SQRT, r"\\sqrt{\1}"),
    (re.compile(r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}\s*(?=\{)|\\color\s*\{[^{}]*\}"), ""),
    (re.compile(r"(?<![\w)])(?:\*\*|__)|(?:\*\*|__)(?![\w(])"), ""),  # but not in 2**3
    (re.compile(r"(?<![\w)*])\*([^*\s]+)\*(?![\w(*])|(?<!`)`([^`\n]+)`(?!`)"), r"\1\2"),
    (re.compile(r"(?<![\w'])[\"\u201c]([^\"\u201c\u201d\n]{1,200})[\"\u201d]"), r"\1"),
    (re.compile(r"[\u20ac\u00a3\u00a5\u20b9\u2713\u2714\u2705]|\b(?:USD|EUR|GBP)\b|\\(?:euro|pounds|checkmark)\b"), ""),
    (re.compile(r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r",\s*\\[,;: ]"), ", "),
    (re.compile(r"(?<=\d)\^\s*\{?\\(?:text|mathrm|textrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\}?"), ""),
    (re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}"), r" \1"),
    (re.compile(r"\\([lr])brace(?![a-zA-Z])"), lambda found: r"\{" if found[1] == "l" else r"\}"),
    (re.compile(r"(?<=\d) +(?=i(?!\.?[a-zA-Z]))"), ""),
    (re.compile(r"(?<![\w^}])(?:\\text)?\{\s*([+-])\s*\}"), r"\1"),
    (re.compile(rf"\\(?:text|textbf|mathrm|mbox)\s*\{{\s*({AMOUNT})[ ~]+({UNIT})\.?\s*\}}"), r"\1\\text{ \2}"),
    (re.compile(r"(?<=\d)[ ~]*\\text\{\s*((?:m|b|tr)illion)\s+(?=[A-Za-z])"), r" \1\\text{ "),
    *(
        (re.compile(rf"(?<=\d)[ ~]*(?:\\text\{{\s*{word}\s*\}}|{word}\b)"), instead)
        for word, instead in (
            ("million", r"\\cdot 10^{6}"),
            ("billion", r"\\cdot 10^{9}"),
            ("trillion", r"\\cdot 10^{12}"),
            ("percent", r"\\%"),
        )
    ),
    (re.compile(r"(?<=\d)\^\s*\{?\\(?:text|mathrm)\s*\{\s*o\s*\}\}?|(?<=\d)\^\s*\{\s*o\s*\}"), "\u00b0"),
    (re.compile(r"(?:\^\s*)?(?:\u00b0(?:\s*[CF]\b)?|\\degree\b)"), r"^\\circ "),
    (re.compile(r"\\([lg])eqq(?![a-zA-Z])"), r"\\\1eq "),
    (re.compile(r"\\[lcd]?dots[bcimo]?(?![a-zA-Z])"), r"\\varpi "),
    (re.compile(r"\[\s*\[\s*(\d)\s*\]\s*\]"), r"\1"),  # a grid of one cell
    (MIXED, lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}"),
    (REPEATING, lambda found: repeating(*found.groups(""))),
)
# names without their backslash, in an answer that is a formula as a whole
NAMES = re.compile(r"(?<![a-zA-Z\\])(pi(?![a-zA-Z])|(?:sqrt|exp|sin|cos|tan|ln|log)(?=\())")
IN_WORDS = re.compile(rf"({AMOUNT})[ ~]+(?=[A-Za-z]{{4}}|day\b)({UNIT})\.?")  # 3 dollars, but not 2 ab
WORD = re.compile(
    r"(?:\\(?:text|mathrm|textbf)\s*\{)?\s*"
    r"([A-Za-z]{4,}(?: [A-Za-z]{2,})*|[A-Za-z]{2,}(?: [A-Za-z]{4,})+|yes|no|odd)\.?\s*\}?\s*\.?",
    re.IGNORECASE,
)
# the label of a choice, as (C) or C) 5 m, but not of several choices and no variable; what announces one in a sentence
LABEL = (
    r"(?:[\s$*_`\"'(\[{<]|\\[(\[]|\\(?:text|mathrm|mathbf|textbf|boxed)\b|(?i:option|choice)\b)*+([A-J]|[a-j](?=\W*\Z))"
    # AB, A_1, C(6, 2), A = 2, A < B, A/2, A - 1, A B, A \cap B
    r"(?![^\W_]|_(?:\w|\s*\d)|[-(\[]|'\w|[ \t]*(?:[=^+]|[<>][ \t]*\w|[-/][ \t]*\d|\\(?!text|quad|\W))|[ \t]+[A-Z]\b)"
    r"(?![\s)\]}*$]*(?:(?:[,;/&|]|and\b|or\b)[\s(]*)+\W*(?:[B-HJ]|[AI](?! [a-z]))\b(?! [a-z]))"  # A, C
    r"(?!(?<=[AI])[ \t]+(?!because|since|as\b|for\b|due\b|is\b)[a-z])"  # A car, I think
)
# not: answer (A) is wrong
CHOSEN = re.compile(rf"(?i:\banswer(?! [(*]*[a-j]\b)|\b(?:option|choice)\W+is\b)(?:[\s*_:=]|\bis\b)*+{LABEL}")
ALONE = re.compile(rf"\A{LABEL}\W*\Z")
DENIED = re.compile(r"(?i)\b(?:not|cannot|fails?|wrong|incorrect|excluded)\b|n't\b")
BOX_DRESSING = re.compile(r"\\(?:text(?:bf)?|math(?:rm|bf)|quad|[,;: ])|[{}()]")
# (A) the Sun, but not (A) and (C)
BRACKETED = re.compile(r"(?:\\(?:text(?:bf)?|math(?:rm|bf))\b|[\s${(\[])*([A-J])[).:]\s*(?!and\b|or\b)(?=\\text|\w)")
# grids in a response: rows of numbers, a matrix, or lists as JSON and numpy write them
ROWS = re.compile(r"(?:^\d+(?: \d+)*\n)+", re.MULTILINE)
LISTS = re.compile(r"\[\s*\[[\d\s,]*\](?:[\s,]*\[[\d\s,]*\])*[\s,]*\]")
LIST = re.compile(r"^[ \t]*\[([\d ,]*)\],?[ \t]*$", re.MULTILINE)  # a row
ROW_END = re.compile(r"\\\\\s*|\\(?:begin|end)\s*\{[^{}]*\}")
RULE = re.compile(r"^[ |:]*-[ |:-]*\n", re.MULTILINE)  # of a table in Markdown
# a number at the end with its base, such as 101_2 or 1A_{16}, whose base math-verify drops
BASED = re.compile(r"(?<![\w.,])(-?\d[\dA-F]*)_(?:\{\s*(\d+)\s*\}|(\d+))\W*\Z")
# at the end, what math-verify takes for units, among them variables: 15+55m, R^2 h
VARIABLE = re.compile(r"(?<![A-Za-z])(?:[cdghlmost]|ab|bc)\s*\Z")
UNITS = "ghlms"  # the symbols of units among these
OF_UNIT = re.compile(rf"((?:[a-zA-Z]\s*=\s*)?{AMOUNT})[ ~]+[{UNITS}]")  # 5 m, but not 5m
# what says of which kind a variable is, and the name of an extreme: x = k\pi, k \in \mathbb{Z}; S_{\max} = 12
KIND = re.compile(r"(?:[,;\s]|\\q?quad(?![a-zA-Z]))+\(?\s*[a-zA-Z]\s*\\in\s*\\mathbb\s*\{?\s*Z\s*\}?\s*\)?\.?\Z")
EXTREME = re.compile(r"\A[a-zA-Z]_\{?\s*\\?(?:text\{)?m(?:ax|in)\}?\s*\}?\s*=(?!=)")
NAME = re.compile(
    r"\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+|[A-Za-z]{4,}"
)  # letters that are no variables
LETTERED = re.compile(r"\\cdot(?![a-zA-Z])|[\s,*]")  # what may stand between the letters of E, D, A, C, B
SINGLETON = re.compile(r"(?:(?<=\$)|(?<=boxed\{))\[([^\[\],;$]+)\](?=[$}])")  # [42], which math-verify takes for 42
SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*[^:|]*?)?\s*(?:\\mid|\\vert|[:|])(.*)\\\}", re.DOTALL)


def check(recipe: Recipe) -> None:
    """Raise `UserError` if an answer in a prompt file cannot be parsed. Items of generators are checked when scored."""
    verifier = Math(recipe.reward)
    # plain numbers are most of the answers in most files; parsing them would take a millisecond each
    check_rows(recipe, lambda prompt: PLAIN.fullmatch(prompt.answer.strip()) or verifier.gold(prompt))


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Math(table)


class Math:
    """Scores 1 or 0."""

    def __init__(self, table: RewardTable) -> None:
        import math_verify  # takes a second, so only processes that score import it

        self._library, self._boxed = math_verify, table.boxed
        self._parse_answer = functools.lru_cache(1024)(self._parse_uncached)

    def score(self, prompt: Prompt, response: str) -> float:
        response = response.rpartition("</think>")[2] or response
        *_, text = [response, *TAGGED.findall(response)]
        answer = last_box(text)
        if answer is None and self._boxed:
            return 0.0
        if answer is None:
            answer = text if text is not response else (MARKED.findall(text) or [None])[-1]
        if (verdict := same_text(response, answer, right_answers(prompt))) is not None:
            return float(verdict)
        gold, capitals = self.gold(prompt), in_both_cases(right_answers(prompt))
        try:
            if answer is None:
                found = self._parse(told_apart(harmless(text), capitals))
            else:
                found = self._parse_uncached(answer, capitals)
            if any(self._equal(right, value) for right in gold for value in found):
                return 1.0
            found = self._parse_uncached(several, capitals) if (several := joined_boxes(text)) else []
            return float(any(self._equal(right, value) for right in gold for value in found))
        except MemoryError:
            raise
        except Exception:  # SymPy raises many kinds on text that it cannot parse or compare: the response is wrong
            return 0.0

    def gold(self, prompt: Prompt) -> list[Any]:
        """The parsed reference answer; `NoAnswer` if math-verify cannot parse it."""
        rights = right_answers(prompt)
        numbers = [unit[1] if (unit := OF_UNIT.fullmatch(text.strip())) else text for text in rights]
        gold = [value for text in numbers for value in self._parse_answer(text, in_both_cases(rights))]
        if not gold:
            raise NoAnswer(
                f"the answer {prompt.answer[:60]!r} of prompt {prompt.text[:60]!r} cannot be parsed as mathematics; "
                'use reward.kind = "exact"'
            )
        return gold

    def _parse_uncached(self, answer: str, capitals: str) -> list[Any]:
        """Parse an answer: bare (42, 1/2, \\frac{1}{2}, \\$18.90), or text with $...$ or \\boxed{...}.

        capitals: as `told_apart`.
        """
        answer = told_apart(bare(harmless(answer)), capitals)
        if DOLLAR.search(answer) or "\\boxed" in answer:
            return self._parse(answer)
        return self._parse(f"\\boxed{{{answer}}}", VARIABLE.search(answer) is not None, numbers=False)

    def _parse(self, text: str, variable: bool = False, numbers: bool = True) -> list[Any]:
        """What math-verify finds in a text.

        variable: its last letters are no unit. numbers: also the numbers in a formula that it cannot parse as a whole.
        """
        if (based := BASED.search(text)) and "10" not in based.groups()[1:]:
            return [f"{based[1]}_{based[2] or based[3]}"]
        text = SCIENTIFIC.sub(lambda number: format(Decimal(number[0]), "f"), SINGLETON.sub(r"\\{\1\\}", text))
        text = text.replace("varnothing", "emptyset")
        formula = self._library.LatexExtractionConfig()
        if variable:
            formula = replace(formula, normalization_config=replace(formula.normalization_config, units=False))
        kinds, mode = [formula, self._library.ExprExtractionConfig()], "any_match" if numbers else "first_match"
        found = self._library.parse(text, kinds, extraction_mode=mode, parsing_timeout=None)
        return [exact(value) for value in found]

    def _equal(self, right: Any, value: Any) -> bool:
        from sympy import Eq, FiniteSet, Mul  # as math-verify, which is imported with the verifier

        if isinstance(right, FiniteSet) != isinstance(value, FiniteSet):
            return False
        if isinstance(right, str) and isinstance(value, str) and BASED.fullmatch(right):
            return right == value
        pairs, plain = [(right, value)], tuple(map(without_percent, (right, value)))
        if (plain[0] is right) != (plain[1] is value):  # 12.5 % stands for .125 and for 12.5
            pairs.append(plain)
        amount = value.rhs if isinstance(value, Eq) else value
        if isinstance(amount, Mul) and not getattr(right, "free_symbols", True) and len(amount.args) == 2:
            number, unit = amount.args  # 5m, if the answer is 5
            if number.is_number and abs(number) != 1 and unit.is_Symbol and unit.name in UNITS:
                pairs.append((right, number))
        verify = functools.partial(self._library.verify, timeout_seconds=None)
        return any(verify(*pair) for pair in pairs) or equal_where_real(right, value)


def harmless(text: str) -> str:
    """The text without what says nothing about the value of an answer, with 7/2 for 3 1/2 and 15 for 5!!."""
    text = text if text.isascii() else in_ascii(text)
    for found, instead in HARMLESS:
        text = found.sub(instead, text)
    return text


def in_both_cases(rights: Sequence[str]) -> str:
    """The capitals that an answer has beside the same small letter, such as R beside r."""
    letters = set("".join(NAME.sub("", right) for right in rights))
    return "".join(sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters))


def told_apart(text: str, capitals: str) -> str:
    """A text in which these letters have an index, since math-verify reads R as r."""

    def marked(found: re.Match[str]) -> str:
        return f"{found[1]}_{{qq{found[2] or found[3] or ''}}}" if found[1] else found[0]

    return re.sub(rf"{NAME.pattern}|([{capitals}])(?:_(?:\{{(\w+)\}}|(\w)))?", marked, text) if capitals else text


def in_ascii(text: str) -> str:
    """The text with signs of ASCII and LaTeX for those of Unicode: digits, minus signs, spaces, fractions, powers."""
    text = FRACTION.sub(r" \g<0>", POWER.sub(r"^{\g<0>}", text.translate(SIGNS)))
    text = unicodedata.normalize("NFKC", text).translate({0x2044: "/", 0x2212: "-"})
    text = re.sub(r"[^\W\D0-9]", lambda digit: str(int(digit[0])), text)
    return ROOT.sub(r"\\sqrt{\1\2}", DASH.sub("-", text))


def repeating(whole: str, fixed: str, *repeats: str) -> str:
    """0.1\\overline{6} as a fraction in LaTeX."""
    repeated = "".join(repeats)
    value = int(whole + fixed + repeated) - int(f"0{whole}{fixed}")
    return f"\\frac{{{value}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


def same_text(response: str, answer: str | None, rights: tuple[str, ...]) -> bool | None:
    """Whether a response has a right answer that is no mathematics: grids of digits, a choice's label, or a word in
    any case; None if it is none of these. math-verify would read words as products of letters: listen were silent."""
    text, rights = response if answer is None else answer, tuple(right.strip() for right in rights)
    if tasks := [grids(right) for right in rights if PLAIN.fullmatch(right) and right.split()[1:]]:
        return any(grids(text)[-len(right) :] == right for right in tasks)
    if labels := [label[1] for right in rights if (label := ALONE.fullmatch(right)) and label[1].isupper()]:
        label = (BRACKETED.match(answer) or re.match(LABEL, BOX_DRESSING.sub(" ", answer))) if answer else None
        chose = chosen(response) if answer is None else label and label[1]
        return chose.upper() in labels if chose else None
    word = WORD.fullmatch(text.strip()) or WORD.fullmatch(LETTERED.sub("", text))
    words = [known[1].lower() for right in rights if (known := WORD.fullmatch(right))]
    return word[1].lower() in words if word and words else None


def chosen(response: str) -> str | None:
    """The label that is the last line of a response, or that it calls its answer, or the only (C) of its last line."""
    last = response.strip().rpartition("\n")[2]
    only = [] if DENIED.search(last) else re.findall(r"\(([A-J])\)", last)
    return (ALONE.findall(last) or CHOSEN.findall(response) or (only if len(only) == 1 else [None]))[-1]


def grids(text: str) -> list[str]:
    """The grids in a text, a line for each row."""
    text = LISTS.sub(lambda lists: "\n\n" + " ".join(lists[0].split()).replace("]", "\n") + "\n", text)
    text = ROW_END.sub("\n", LIST.sub(r"\1", RULE.sub("", text)))
    lines = (" ".join(line.split()) for line in re.sub(r"[\[,|&]", " ", text).splitlines())
    return [rows.strip() for rows in ROWS.findall("\n".join(lines) + "\n")]


def equal_where_real(right: Any, value: Any) -> bool:
    """Whether two formulas with roots are equal for positive variables, and for others where ``right`` is real: as
    \\sqrt{1/n} and 1/\\sqrt{n}, but not \\sqrt{x^2} and x."""
    from sympy import Dummy, Expr, Pow, Rational, simplify

    both = [each for each in (right, value) if isinstance(each, Expr)]
    symbols = sorted(right.free_symbols, key=str) if len(both) == 2 else []
    roots = [power for each in both for power in each.atoms(Pow) if power.exp.is_Rational and not power.exp.is_Integer]
    if not symbols or not roots or right.free_symbols != value.free_symbols:
        return False
    for signs in range(2 ** min(len(symbols), 4)):  # numbers first, which are quicker than `simplify`
        at = {symbol: Rational(7 + n, 5) * (-1) ** (signs >> n & 1) for n, symbol in enumerate(symbols)}
        expected, found = (complex(each.xreplace(at).evalf()) for each in both)
        if (not signs or abs(expected.imag) < 1e-9) and abs(expected - found) > 1e-9 * max(1.0, abs(expected)):
            return False
    positive = {symbol: Dummy(positive=True) for symbol in symbols}
    return bool(simplify(right.xreplace(positive) - value.xreplace(positive)) == 0)


def bare(answer: str) -> str:
    """The formula of an answer, without words before it, spacing, and a dot after it; of a set, its condition."""
    answer = EXTREME.sub("", KIND.sub("", answer.strip()))
    answer = SQRT.sub(r"\\sqrt{\1}", NAMES.sub(r"\\\1 ", SPACING.sub("", answer))).strip()
    for found, instead in FORMULA:
        answer = found.sub(instead, answer)
    answer = IN_WORDS.sub(r"\1\\text{ \2}", answer) if IN_WORDS.fullmatch(answer) else answer
    if words := WORDS.fullmatch(answer):
        answer = words[2].replace("}", "", 1) if words[1] else words[2]
    answer = STYLE.sub("", answer.strip().rstrip(".,;\\ ").strip())
    if answer.startswith("{") and (whole := last_box(f"\\boxed{answer}")) and len(whole) == len(answer) - 2:
        answer = whole.strip().rstrip(".")
    return inner[1] if (inner := SET_BUILDER.fullmatch(answer)) else answer


def without_percent(value: Any) -> Any:
    """The number before a percent sign; any other value as it is."""
    from sympy import Integer, Mul, Rational, UnevaluatedExpr

    percent = UnevaluatedExpr(Rational(1, 100))
    return value.xreplace({percent: Integer(1)}) if isinstance(value, Mul) and percent in value.args else value


def exact(value: Any) -> Any:
    """A parsed value (SymPy's, or a text) with fractions for its decimals, and with intervals for its inequalities."""
    from sympy import And, Eq, Expr, FiniteSet, Float, Rational, Tuple, UnevaluatedExpr, Union
    from sympy.core.relational import Relational

    if isinstance(value, str):
        return value
    if isinstance(value, Eq) and isinstance(value.rhs, FiniteSet):  # x = 1, 2
        return exact(value.rhs)
    if isinstance(value, FiniteSet | Tuple):
        parts = [exact(part) for part in value.args]
        ranges = isinstance(value.args[0], Relational | And) and not value.has(Eq)  # x < -1 or x > 1
        return Union(*parts) if ranges else value.func(*parts)
    value = value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})
    if isinstance(value, Relational | And) and not value.has(Eq) and len(value.free_symbols) == 1:
        return value.as_set()
    # 10 % stays a product, see `without_percent`
    number = isinstance(value, Expr) and not value.free_symbols and not value.has(UnevaluatedExpr)
    return value.doit() if number else value
