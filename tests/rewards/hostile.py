"""Responses that would cost a verifier hours or all memory, that would crash it, or that it cannot read."""

MATH = (
    # towers of powers, factorials and the like
    "9**9**9**9**9", "\\boxed{9^{9^{9^{9}}}}", "1e99999999", "$9^{99999999999}$", "$(99999!)!$",
    "$\\binom{10^{9}}{5 \\cdot 10^{8}}$", "$\\exp(\\exp(\\exp(9)))$", "$\\lfloor 10^{10^{10}} \\pi \\rfloor$",
    # expansions, sums and integrals
    "$(x+y+z+w)^{300}$", "$\\prod_{i=1}^{10^9} (x-i)$", "$\\sum_{i=1}^{10^{12}} i^i$",
    "$\\int_0^1 \\exp(\\sin(x^{x^x})) dx$", "$\\lim_{x \\to 0} x^{x^{x^{x}}}$",
    "$\\frac{d^{99}}{dx^{99}} \\tan(\\tan(x))$",
    # depth and length
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$", "$" + "\\frac{1}{" * 800 + "2" + "}" * 800 + "$",
    "9" * 100_000, "$" + "+".join(f"x_{{{i}}}" for i in range(2000)) + "$", "$1$ " * 20_000, "$" * 50_000,
    "$" + "*".join("(a+b)" for _ in range(400)) + "$", "$" + "\\cup".join(f"[{i},{i}.5)" for i in range(400)) + "$",
    # text that is not what it seems
    "\x00" * 1000, "\ud800" * 1000, "\u0661\u0662" * 5000, "nan", "__import__('os').system('x')",
)  # fmt: skip

FORMULAS = (  # most are formulas that SymPy reads
    "1e99999999", "1e999999999", "exp(exp(exp(9)))", "exp(exp(exp(exp(9))))", "(x+y+z+a+b+c+d)**64",
    "sin(exp(exp(9)))", "exp(1e9)*exp(1e9)", "log(exp(exp(exp(9))))", "9e99999999-9e99999999",
    "(exp(x)+exp(y)+exp(z)+exp(a)+exp(b))**64", "+".join(["(x+1)**64"] * 99), "*".join(["(x+y+z+1)**9"] * 70),
    "(" * 400 + "1" + ")" * 400,
)  # fmt: skip

# (generator, answer): each formula for a generator that evaluates formulas, and further hostile answers
EVALUATES = ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration")
GENERATORS = tuple((EVALUATES[number % 5], text) for number, text in enumerate(FORMULAS)) + (
    ("puzzle24", "1e99999999"), ("coin_flip", "1e999999999"), ("simple_integration", FORMULAS[4]),
    ("string_insertion", "[" * 5000), ("spiral_matrix", "9" * 50_000), ("binary_matrix", "[[" * 3000 + "]]" * 3000),
    ("n_queens", "[['Q']" * 2000), ("prime_factorization", "9" * 10_000), ("chain_sum", "1e99999999"),
    ("game_of_life", "[[1e99999]]" * 500), ("decimal_arithmetic", "1e999999999"),
    ("complex_arithmetic", "1e9999j" * 99), ("fraction_simplification", "1/1e99999999"),
)  # fmt: skip
