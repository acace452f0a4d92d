"""The report's samples: some responses of each stage, escaped, and with a limit on their size."""

import re

from megarl.storage.rollouts import Group
from megarl.views.report import write_report
from megarl.views.report.samples import BYTES, samples_section
from tests.views.stored_run import HOSTILE, WORDS, make_stored_run, random_groups, response, two_stages
from tests.views.synthetic_run import make_recipe


def sections(text):
    part = r'<details class="samples"><summary>(.*?)</summary><template>(.*?)</template></details>'
    return re.findall(part, text, re.DOTALL)


def test_each_stage_shows_the_best_and_the_worst_response_to_some_prompts(tmp_path):
    root, groups = two_stages(tmp_path / "run")
    found = sections(samples_section([("run", root)]))
    for stage, (summary, body) in enumerate(found):
        own = [group for number, group in groups if number == stage]
        rewards = [r.reward for group in own for r in group.responses]
        assert summary == f"stage {stage + 1}: 24 responses, mean reward {sum(rewards) / 24:.3f}"
        titles = re.findall(r"<h4>prompt (\d+) · sample (\d+) · reward ([\d.]+) · (\d+) tokens · (\w+)</h4>", body)
        assert {int(prompt) for prompt, *_ in titles} == {own[0].group_id, own[2].group_id, own[-1].group_id}
        shown = {}
        for prompt, sample, reward, length, finish in titles:
            group = next(group for group in own if group.group_id == int(prompt))
            one = group.responses[int(sample)]
            assert (float(reward), int(length), finish) == (one.reward, len(one.tokens), one.finish_reason)
            shown.setdefault(group.group_id, []).append(one.reward)
        for group in own:
            rewards = [r.reward for r in group.responses]
            assert shown.get(group.group_id, [min(rewards), max(rewards)]) == [min(rewards), max(rewards)]
    assert len(found) == 2


def hostile_run(root):
    bad = [WORDS.index(word) for word in HOSTILE]
    prompt = random_groups([0])[0].prompt_tokens
    groups = [Group(stage, prompt, (response([*bad, 4]), response([1], 1.0))) for stage in range(2)]
    return make_stored_run(root, [[[group]] for group in groups])


def test_responses_are_escaped(tmp_path):
    page = write_report([hostile_run(tmp_path / "run")], tmp_path / "page.html").read_text()
    (_, body), _ = sections(page)
    assert "&lt;/pre&gt;&lt;/template&gt;&lt;/details&gt;&lt;script&gt;alert(2)&lt;/script&gt;&lt;!--" in body
    assert set(re.findall(r"<(\w+)", body)) == {"h4", "pre"}
    assert r"\x1b[2J" in body and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)


def test_a_page_stays_small_however_much_was_written(tmp_path):
    """The report on two runs of 14 stages with long responses."""
    prompt = random_groups([0])[0].prompt_tokens
    image = WORDS.index(HOSTILE[5])  # becomes longer when it is escaped
    recipe = make_recipe({"stages": 14, "updates_per_stage": 2})
    long = [
        [[Group(3 * stage + k, prompt, (response([image] * 40), response([1] * 2000, 1.0))) for k in range(3)]]
        for stage in range(14)
    ]
    roots = [make_stored_run(tmp_path / name, long, recipe=recipe) for name in "ab"]
    section = samples_section([(root.name, root) for root in roots])
    assert len(section.encode()) < 1.1 * BYTES
    assert section.count("on use: megarl samples") == 2, "both runs must say that stages are left out"
    assert write_report(roots, tmp_path / "page.html").stat().st_size < 3 << 20


def test_an_unreadable_store_is_named_and_the_other_stages_are_shown(tmp_path):
    root, _ = two_stages(tmp_path / "run")
    next((root / "stages/001/rollouts").glob("*.arrow")).unlink()
    section = samples_section([("run", root)])
    assert len(sections(section)) == 1 and "samples could not be read" in section
    assert samples_section([("none", make_stored_run(tmp_path / "none", []))]) == ""
