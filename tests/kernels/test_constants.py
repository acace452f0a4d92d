"""The headers in `csrc` have the constants, metric names and rules of Python and Triton, and no others.

A library that is missing or outdated is refused.
"""

from __future__ import annotations

import ast
import math
import re
import runpy
import sys
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest

from megarl.errors import UserError
from megarl.kernels import constants, library
from megarl.kernels.token_pass import SUMS, has_rule, language
from megarl.kernels.token_pass.language import RULES
from megarl.objectives.parts import second_moment
from tests.helpers import ROOT

HEADERS = [(ROOT / "csrc/include" / name).read_text() for name in ("megarl_kernels.h", "token_rules.h")]
ABI, SHARED = HEADERS

# those with another name or form than in Python
OTHERS = {
    "MEGARL_OK": 0,
    "kLogBadPrefix": math.log(constants.BAD_PREFIX),
    "kOutside": constants.OUTSIDE % 2**32,
    "kLimbScale": 2.0**constants.LIMB_BITS,
}


def header_constants() -> dict[str, Any]:
    """Every constant that the headers define."""
    found: dict[str, Any] = {}
    definitions = re.findall(r"^#define (MEGARL_\w+) ([^/\n]+)", "\n".join(HEADERS), re.M)
    definitions += re.findall(r"^constexpr \w+ (k\w+) = ([^;]+);", "\n".join(HEADERS), re.M)
    for name, value in definitions:
        if re.fullmatch(r"[-\w.+* ()]+", value) and "__" not in value and "inline" not in value:
            plain = value if value.strip().startswith("0x") else re.sub(r"(?<=[\d.])f\b", "", value)
            found[name] = eval(plain.strip().removesuffix("u"), {}, found)
    return found


def test_headers_have_the_constants_of_python() -> None:
    values = vars(library) | vars(constants)
    ours = {name: value for name, value in values.items() if name.isupper() and name[0] != "_"}
    missed = ours.keys() - {"LAST_PLACE"}  # which the kernels compute from `POSITION_BITS`
    for name, value in header_constants().items():
        key = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("MEGARL_").removeprefix("k")).upper()
        assert value == pytest.approx(OTHERS[name] if name in OTHERS else ours[key], rel=1e-15), name
        missed -= {key, {"LIMB_SCALE": "LIMB_BITS"}.get(key)}
    assert missed == set()
    most = int(re.search(r"kMaxBits = (\d+)", (ROOT / "csrc/cuda/second_moment.cu").read_text())[1])
    assert max(bits for _, bits in (*second_moment._VALUE_DIGITS, *second_moment._ORDER_DIGITS)) <= most


def test_sums_have_the_names_and_the_order_of_the_header() -> None:
    """An enumerator out of place would report one metric under the name of another."""
    body = ABI.split("enum megarl_sum {")[1].split("}")[0]
    sums = [
        word for line in body.splitlines() for word in line.split("/*")[0].replace(",", " ").split() if "MEGARL" in word
    ]
    assert [s.removeprefix("MEGARL_").lower() for s in sums] == [*SUMS, "num_sums"]


def shipped() -> dict[str, language.RuleFunction]:
    """The rules of megarl that are compiled, without those of files of other tests, which are named by their module."""
    return {name: rule for name, rule in RULES.items() if "." not in name and not rule.per_token}


def test_the_library_has_every_rule() -> None:
    """Else its objective would be evaluated in torch: build megarl again."""
    assert {name: library.rule_digest("cpu", name) for name in shipped()} == {
        name: function.digest for name, function in shipped().items()
    }
    assert library.rule_digest("cpu", "clip") is None


def test_a_rule_that_was_changed_after_the_build_is_refused(tmp_path) -> None:
    """Compiled kernels would compute the formula of before."""
    rule = RULES["veto_sequence"]
    for name in ("mu_grpo.py", "parts/clipping.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((rule.file.parent / name).read_bytes())
    code = rule.function.__code__.replace(co_filename=str(tmp_path / "mu_grpo.py"))
    copy = replace(rule, function=FunctionType(code, rule.function.__globals__, rule.name))
    assert has_rule(copy, "cpp")
    language._digest.cache_clear()
    with open(tmp_path / "mu_grpo.py", "a") as file:
        file.write("# changed\n")
    with pytest.raises(UserError, match="mu_grpo.py was changed after the cpp kernels had been built from it"):
        has_rule(copy, "cpp")


def test_the_translation_has_every_rule_and_refuses_what_is_not_in_the_language() -> None:
    translation = runpy.run_path(str(ROOT / "csrc/translate_rules.py"))
    header, camel = translation["header"](), translation["camel"]
    found = re.findall(r"struct (\w+) \{\n  static constexpr Quantity kQuantity = Quantity::k(\w+);", header)
    assert dict(found) == {camel(name): camel(rule.computed or "none") for name, rule in shipped().items()}
    per_token = "@rule(running, per_token=True)\ndef f(t, s):\n return t.a"
    assert translation["quantity_of"](ast.parse(per_token).body[0]) == ""
    assert set(re.findall(r'rule\("(\w+)", \w+\)', header)) == set(shipped())
    for source in ("def f(t):\n for x in t: pass", "def f(t):\n return t[0]", "def f(t):\n return t.a if t.b else t.c"):
        (function,) = ast.parse(source).body
        with pytest.raises(SyntaxError, match="a rule cannot have"):
            translation["body"](function)
    for decorator in ("@rule", "@rule(quantity=last_tie)", "@rule('mean')"):
        (function,) = ast.parse(f"{decorator}\ndef f(t, s):\n return t.a").body
        with pytest.raises(SyntaxError, match="a rule is decorated with"):
            translation["quantity_of"](function)
    assert translation["expression"](ast.parse("-(-t.a)", mode="eval").body) == "(-(-t.a))"


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert library.find_library("cpu") is None
    with pytest.raises(UserError, match=r"compiled cpu kernels are not installed; .*: pip install \."):
        library.load_library.__wrapped__("cpu")


def test_an_outdated_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", current + 1)
    with pytest.raises(UserError, match=f"has ABI version {current}, but megarl needs {current + 1}"):
        library.load_library.__wrapped__("cpu")
