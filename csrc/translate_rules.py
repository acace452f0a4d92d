"""Writes the rules of the objectives in C++: ``python csrc/translate_rules.py HEADER``. Needs Python alone.

The language is described in megarl/kernels/token_pass/language.py. A rule becomes a type, each function that rules
share a template, and MEGARL_RULES lists all rules.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

OBJECTIVES = Path(__file__).resolve().parents[1] / "megarl/objectives"
SHARED = OBJECTIVES / "parts/clipping.py"
FUNCTIONS = {"exp": "exponential", "log": "logf", "sqrt": "sqrtf", "absolute": "fabsf"}
OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|",
    ast.Lt: "<", ast.Gt: ">", ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "==",
    ast.USub: "-", ast.Invert: "!",
}  # fmt: skip
COMPUTED = ("mean_log_ratio", "sum_log_ratio", "first_trigger")  # those of parts/quantities.py that the passes compute


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def expression(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return f"k{camel(name)}" if name.isupper() else name
        case ast.Attribute(ast.Name(owner), name):
            return f"{owner}.{name}"
        case ast.Constant(float(value)):
            return f"{value!r}f"
        case ast.UnaryOp(operator, operand):
            return f"({OPERATORS[type(operator)]}{expression(operand)})"
        case ast.BinOp(left, operator, right) | ast.Compare(left, [operator], [right]):
            return f"({expression(left)} {OPERATORS[type(operator)]} {expression(right)})"
        case ast.Call(ast.Name("where"), [condition, yes, no]):
            return f"({expression(condition)} ? {expression(yes)} : {expression(no)})"
        case ast.Call(ast.Name("Outcome"), arguments):
            return f"Outcome{{{', '.join(map(expression, arguments))}}}"
        case ast.Call(ast.Name(name), arguments):
            return f"{FUNCTIONS.get(name, name)}({', '.join(map(expression, arguments))})"
    raise SyntaxError(f"a rule cannot have: {ast.unparse(node)}")


def body(function: ast.FunctionDef) -> list[str]:
    lines = []
    for statement in function.body:
        match statement:
            case ast.Expr(ast.Constant(str())):  # the docstring
                pass
            case ast.Assign([ast.Name(name)], value):
                is_flag = isinstance(value, ast.Compare) or (
                    isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Invert)
                )
                lines.append(f"    const {'int' if is_flag else 'auto'} {name} = {expression(value)};")
            case ast.Return(ast.expr() as value):
                lines.append(f"    return {expression(value)};")
            case _:
                raise SyntaxError(f"{function.name}: a rule cannot have: {ast.unparse(statement)}")
    return lines


def shared(function: ast.FunctionDef) -> list[str]:
    types = {"Token": "const Token&", "Outcome": "const Outcome&"}
    arguments = [(types.get(ast.unparse(a.annotation or a), f"T{i}"), a.arg) for i, a in enumerate(function.args.args)]
    free = ", ".join(f"class {kind}" for kind, _ in arguments if kind not in types.values())
    return [
        *([f"template <{free}>"] if free else []),
        f"MEGARL_INLINE auto {function.name}({', '.join(f'{kind} {name}' for kind, name in arguments)}) {{",
        *body(function),
        "}",
        "",
    ]


def rule(function: ast.FunctionDef, quantity: str) -> list[str]:
    token, sequence, *parameters = [a.arg for a in function.args.args]
    values = ", ".join(f"{name}(static_cast<float>(p[{i}]))" for i, name in enumerate(parameters))
    return [
        f"struct {camel(function.name)} {{",
        f"  static constexpr Quantity kQuantity = Quantity::k{camel(quantity if quantity in COMPUTED else 'none')};",
        f"  static constexpr int kLast = {len(parameters) - 1};  // the parameter that the quantity takes",
        *([f"  float {', '.join(parameters)};"] if parameters else []),
        f"  MEGARL_INLINE explicit {camel(function.name)}(const double*{' p) : ' + values if parameters else ')'} {{}}",
        f"  MEGARL_INLINE Outcome operator()(const Token& {token},",
        f"                                   [[maybe_unused]] const Sequence& {sequence}) const {{",
        *body(function),
        "  }",
        "};",
        "",
    ]


def quantity_of(function: ast.FunctionDef) -> str | None:
    """The quantity of a rule, "" for one that torch alone evaluates; None for another function."""
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(ast.Name("rule"), [], []):
                return "none"
            case ast.Call(ast.Name("rule"), [ast.Name(quantity)], []):
                return quantity
            case ast.Call(ast.Name("rule"), [ast.Name()], [ast.keyword("per_token")]):
                return ""
            case ast.Name("rule") | ast.Call(ast.Name("rule")):
                raise SyntaxError(f"{function.name}: a rule is decorated with @rule() or @rule(QUANTITY)")
    return None


def digest(path: Path) -> str:
    """What `megarl.kernels.token_pass.language.RuleFunction.digest` is for the rules of this file."""
    return hashlib.sha256(path.read_bytes() + SHARED.read_bytes()).hexdigest()[:16]


def header() -> str:
    """The C++ source. `SyntaxError` for a rule that leaves the language."""
    lines, names, digests = [], [], []
    for path in (SHARED, *sorted(OBJECTIVES.glob("*.py"))):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            quantity = quantity_of(function)
            if quantity:
                lines += rule(function, quantity)
                names.append(function.name)
                digests.append(digest(path))
            elif quantity is None and (path == SHARED or "t: Token" in ast.unparse(function.args)):
                lines += shared(function)
    rules = " \\\n".join(f'  rule("{name}", {camel(name)})' for name in names)
    sources = " \\\n".join(f'  rule("{name}", "{source}")' for name, source in zip(names, digests, strict=True))
    lists = [f"#define MEGARL_RULES(rule) \\\n{rules}", f"#define MEGARL_RULE_DIGESTS(rule) \\\n{sources}"]
    return "\n".join([*lines, *lists, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header())
