"""``megarl samples`` finds the responses that are asked for, and no response can control the terminal."""

import io
import json
import re
import unicodedata
from dataclasses import replace

import pytest
from rich.console import Console

from megarl.errors import UserError
from megarl.views.responses.select import Filter, decoder, select
from megarl.views.responses.show import show_samples
from tests.helpers import megarl, refused
from tests.views.synthetic_run import HOSTILE, WORDS, make_stored_run, random_groups, response, two_stages


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return two_stages(tmp_path_factory.mktemp("samples") / "run")


def text_of(tokens):
    return "".join(WORDS[token] for token in tokens.tolist())


def test_a_response_is_shown_with_the_row_of_its_prompt(tmp_path):
    rows = [{"level": 1, "kind": "a"}, {"level": 2.5, "right": True}, None]
    groups = [
        replace(group, row=row and json.dumps(row)) for group, row in zip(random_groups(range(3)), rows, strict=True)
    ]
    root = make_stored_run(tmp_path / "run", [[groups]])
    told = [json.loads(line) for line in megarl("samples", root, "--json", "--limit", 100).stdout.splitlines()]
    assert [one["row"] for one in told] == [row or {} for row in rows for _ in range(4)]


FILTERS = (
    (Filter(), lambda s, g, n, r: True),
    (Filter(stage=1), lambda s, g, n, r: s == 1),
    (Filter(prompt=7), lambda s, g, n, r: g == 7),
    (Filter(sample=2), lambda s, g, n, r: n == 2),
    (Filter(reward=(0.25, 0.5)), lambda s, g, n, r: r.reward == 0.25),
    (Filter(pattern=re.compile("a b.*answer")), lambda s, g, n, r: re.search("a b.*answer", text_of(r.tokens))),
    (Filter(stage=0, reward=(1, 1), sample=1), lambda s, g, n, r: s == 0 and r.reward == 1 and n == 1),
)


def test_a_filter_selects_the_responses_that_meet_its_condition(stored):
    root, groups = stored
    for wanted, condition in FILTERS:
        expected = [
            (stage, group.group_id, sample, r.tokens.tolist())
            for stage, group in groups
            for sample, r in enumerate(group.responses)
            if condition(stage, group.group_id, sample, r)
        ]
        found = [(f.stage, f.prompt, f.sample, f.response.tokens.tolist()) for f in select(root, wanted, decoder(root))]
        assert found == expected and found, wanted


def shown(root, width=100, terminal=False, **options):
    file = io.StringIO()
    colour = "256" if terminal else None
    console = Console(file=file, width=width, force_terminal=terminal, color_system=colour, highlight=False)
    wanted = options.pop("wanted", Filter())
    show_samples(root, wanted, options.pop("limit", 10), as_json=False, console=console, **options)
    return file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_response_cannot_control_the_terminal(tmp_path, terminal):
    groups, bad = random_groups([0, 1], samples=1), [WORDS.index(word) for word in HOSTILE]
    groups[1] = replace(groups[1], responses=(response([*bad, 1, 0]), response([*bad, 2])))
    root = make_stored_run(tmp_path / "run", [[groups]])
    output = shown(root, terminal=terminal, whole=True)
    assert ("\x1b[" in output) is terminal, "colours"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert {c for c in plain if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")} == {"\n"}
    together = re.sub(r"\s", "", plain)
    for escaped in (r"\x1b[2J\x1b]0;owned\x07", r"\x9b31m", r"\rhidden\x08\x7f\x00", r"\u202eesrever\u2028"):
        assert escaped in together
    assert "[boldred]:smile:[/boldred]" in together, "rich's markup must be printed as text"
    assert len(re.findall(r"(?m)^stage \d", plain)) == 3, "a response imitated the heading of another one"


def test_a_long_text_is_cut_in_its_middle(tmp_path):
    (group,) = random_groups([0])
    root = make_stored_run(tmp_path / "run", [[[replace(group, responses=(response([1] * 3000 + [4]),))]]])
    output = shown(root)
    assert "[... 1,807 characters ...]" in output and "answer" in output and output.count("a") < 1300
    assert shown(root, whole=True).count("a") > 3000


def test_options_and_json_of_the_command(stored):
    root, groups = stored
    result = megarl("samples", root, "--stage", "1", "--limit", "2", "--json")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    expected = [(1, 6, text_of(r.tokens), r.reward) for r in groups[6][1].responses[:2]]
    assert [tuple(one[key] for key in ("stage", "prompt", "text", "reward")) for one in records] == expected
    result = megarl("samples", root, "--reward", ":0.25", "--limit", "1000")
    some = [r for _, g in groups for r in g.responses if r.reward <= 0.25]
    assert len(re.findall(r"(?m)^stage", result.stdout)) == len(some)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--stage", 2), r"stage 2 of \S+ has no rollouts; those that have: stages 0, 1"),
        (("--prompt", 12), r"no stage of \S+ has prompt 12"),
        (("--reward", "much"), "'much' is neither a number nor a range"),
        (("--grep", "("), "is not a regular expression"),
    ],
)
def test_conditions_that_no_response_can_meet_are_refused(stored, options, said):
    assert re.search(said, refused("samples", stored[0], *options))
    with pytest.raises(UserError, match="give --tokens with them"):
        show_samples(stored[0], Filter(), 1, as_json=True, policy="final")


def test_a_shard_that_does_not_agree_with_its_ledger_is_refused(tmp_path):
    groups = [replace(group, responses=(response([1, 2, 3]),)) for group in random_groups([0, 1])]
    root = make_stored_run(tmp_path / "run", [[[group] for group in groups]])
    one, other = sorted((root / "stages/000/rollouts").glob("*.arrow"))
    one.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="has other groups than its line"):
        list(select(root, Filter(), decoder(root)))
