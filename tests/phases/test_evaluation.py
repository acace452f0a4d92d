"""Evaluations in whole runs: several suites per start of the engines, policies between stages, kills, comparisons."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.estimates import summarise
from megarl.storage.checked_json import write_checked
from megarl.storage.policies import read_info, read_reference
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.storage.run_dir.retention import best_version
from tests.data.prompt_sources import write
from tests.helpers import events, megarl, read_lines
from tests.phases.commands import settings, succeed, train
from tests.phases.test_kill import assert_same_weights, kill_command

SUITES = Path(__file__).with_name("suites.toml").read_text()
NAMES = ("heldout", "short", "greedy")
SMALL = ("schedule.updates_per_stage=4", "schedule.prompts_per_update=2", "rollout.groups_per_chunk=8")
TIMES = ("time", "seconds", "generate_seconds", "crc")


@pytest.fixture(scope="module")
def suites(recipe, tmp_path_factory):
    """The tiny recipe with three suites."""
    folder = tmp_path_factory.mktemp("suites")
    exam = write(folder / "exam.jsonl", [{"prompt": word, "answer": word[0]} for word in ("ab", "bc", "ca", "a")])
    path = folder / "recipe.toml"
    path.write_text(recipe.read_text().replace("[run]", SUITES.format(suite=exam) + "[run]"))
    return path


@pytest.fixture(scope="module")
def whole(suites, tmp_path_factory):
    """A finished run whose policies were evaluated on three suites."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(suites, run, *settings(*SMALL))
    return RunDir.open(run)


def figures(run):
    """The evaluation events in their order, without what depends on time."""
    return [{k: v for k, v in e.items() if k not in TIMES} for e in events(run, "evaluation")]


def table(run, suite, update):
    """The stored responses of the policy after ``update`` updates to a suite, read with nothing but pyarrow."""
    shards = sorted((run.root / f"evaluations/{suite}/update_{update:06d}").glob("*.arrow"))
    return [row for shard in shards for row in pa.ipc.open_file(shard).read_all().to_pylist()]


def test_every_due_policy_answers_every_suite_once(whole):
    found = [(e["update"], e["suite"]) for e in events(whole, "evaluation")]
    assert found == [(update, name) for update in (0, 2, 4, 6, 8) for name in NAMES]
    starts = [(e["phase"], e["stage"]) for e in events(whole, "phase_start")]
    assert starts == [("rollout", 0), ("optimize", 0), ("rollout", 1), ("optimize", 1), ("evaluate", 2)]
    # policies between two stages are loaded by the engines of the next phase, one after another
    assert [e["stage"] for e in events(whole, "weight_drift")] == [0, 1, 1, 2, 2]
    ledger = read_lines(whole.stage(1).rollouts / "ledger.jsonl")
    assert {line["weights_hash"] for line in ledger} == {read_info(whole.stage(1).policy).weights_hash}
    assert not whole.versions(), "exported policies were not removed after their evaluation"
    assert read_reference(whole.stage(1).policy).experts


def test_events_agree_with_the_stored_responses(whole):
    settings = {"heldout": (16, 4, 6), "short": (4, 3, 2), "greedy": (16, 1, 6)}
    for progress, event in itertools.pairwise(read_lines(whole.events)):
        if event["event"] != "evaluation":
            continue
        name, (prompts, samples, longest) = event["suite"], settings[event["suite"]]
        rows = table(whole, name, event["update"])
        assert [(r["group_id"], r["sample"]) for r in rows] == [(i, k) for i in range(prompts) for k in range(samples)]
        assert max(len(r["response_tokens"]) for r in rows) <= longest
        correct = np.array([r["reward"] for r in rows]).reshape(prompts, samples)
        answers = np.array([r.get("answer") for r in rows], object).reshape(prompts, samples)
        assert event.items() >= summarise(correct, answers).items()
        assert (progress["groups"], progress["prompts"], progress["ended"]) == (prompts, prompts, prompts * samples)
        assert progress["reward_sum"] == correct.sum()
        (by_source,) = (value for key, value in event.items() if re.fullmatch(r"by/source/[^/]+/accuracy", key))
        assert by_source == correct.mean()
        lines = read_lines(whole.root / f"evaluations/{name}/prompts.jsonl")
        for row, line in zip(rows[::samples], lines, strict=True):
            assert row["group_id"] == line["prompt"]
            text = line["text"].removesuffix("=")
            assert text == line["question"] * (2 if name == "short" else 1) and line["answer"] == text[0]
            assert len(row["prompt_tokens"]) == len(line["text"])


@pytest.mark.crash
def test_a_killed_run_repeats_no_stored_response_and_gives_the_same_figures(whole, suites, tmp_path):
    run, arguments = tmp_path / "run", ("train", suites, "--run-dir", tmp_path / "run", *settings(*SMALL))
    stored = {}
    for pattern, count in [
        (r"replace .*/evaluations/heldout/update_000000/.*_00000008\.arrow", 1),  # the first of two chunks is stored
        (r"open .*/\.best\..*\.tmp/.", 1),
        (r"open .*/stages/000/policies/\.000002\..*\.tmp/.", 1),  # an export within a stage
        (r"open .*/checkpoints/\.update_000004\..*\.tmp/.", 1),  # after it; resumes from an earlier checkpoint
        (r"replace .*/evaluations/short/update_000004/SEALED", 1),
    ]:
        kill_command(pattern, count, run, *arguments)
        now = {path: path.stat().st_ino for path in run.glob("evaluations/*/*/*.arrow")}
        assert stored.items() <= now.items(), "a stored response was generated again"
        stored = now
    assert len(stored) > 10
    succeed(*arguments)
    assert {path: path.stat().st_ino for path in stored} == stored
    assert [e["skipped"] for e in events(RunDir.open(run), "resume") if e["phase"] == "evaluate"] == [8]
    assert figures(RunDir.open(run)) == figures(whole)
    for path in [*whole.root.glob("evaluations/*/*"), *whole.root.glob("evaluations/*/*/*")]:
        if path.is_file():
            assert path.read_bytes() == (run / path.relative_to(whole.root)).read_bytes(), path
    assert read_info(run / "best") == read_info(whole.best)
    assert_same_weights(run / "final", whole.final)
    assert not RunDir.open(run).versions() and not [p for p in run.rglob(".*.tmp") if "logs" not in p.parts]


def test_an_evaluation_with_other_settings_starts_anew(whole, tmp_path):
    stored = json.loads((whole.root / "evaluations/short/settings_000000.json").read_text())
    assert stored.items() >= {"samples": 3, "top_p": 0.7, "max_response_tokens": 2, "temperature": 1.0}.items()
    assert stored["reward"]["kind"] == "exact"
    place = SuiteResponses.of(tmp_path, "short")
    place.directory.mkdir(parents=True)
    own = {key: value for key, value in stored.items() if key != "crc"}
    (place.begin(0, own) / "shard").touch()
    assert (place.begin(0, own) / "shard").exists()
    assert not (place.begin(0, own | {"samples": 2}) / "shard").exists()


@pytest.mark.crash
def test_eval_of_a_model_on_several_suites_resumes_after_a_kill(whole, suites, tmp_path):
    exam = write(tmp_path / "another.jsonl", [{"prompt": word, "answer": word[0]} for word in ("abc", "bca")])
    arguments = ["eval", whole.best, "--recipe", suites, "--suite", "heldout", "--suite", exam]
    arguments += settings("eval.samples=2", *SMALL)
    output, kept = tmp_path / "evals", [*arguments, "--output", tmp_path / "evals"]
    kill_command(r"replace .*/evaluations/heldout/update_000000/.*_00000008\.arrow", 1, output, *kept)
    (first,) = output.glob("evaluations/heldout/update_000000/*.arrow")
    inode = first.stat().st_ino
    told, again = (succeed(*kept).stdout.splitlines()[-9:] for _ in range(2))
    names = [line.split()[0] for line in told]
    assert names == ["heldout", "avg@4", "pass@2", "pass@4", "maj@4", "another", "avg@2", "pass@2", "maj@2"]
    assert told == again and first.stat().st_ino == inode
    starts = events(RunDir.open(output), "phase_start")
    assert len(starts) == 2, "engines were started for an evaluation that is complete"
    version = best_version(whole)
    compared = succeed("compare", output, f"{whole.root}:{version}", "--suite", "heldout")
    assert f"B = {whole.root}:{version} (update {version})" in compared.stdout
    assert "+0.0000 [+0.0000, +0.0000]  0 prompts better, 0 worse, sign test p = 1" in compared.stdout


def test_compare_gives_means_and_differences(whole):
    told = succeed("compare", f"{whole.root}:0", whole.root).stdout
    listed = json.loads(succeed("compare", f"{whole.root}:0", whole.root, "--json").stdout)
    for name, samples in (("heldout", 4), ("short", 3), ("greedy", 1)):
        means = [np.mean([row["reward"] for row in table(whole, name, update)]) for update in (0, 8)]
        assert f"{name}: " in told and f"avg@{samples}    {means[0]:.4f} -> {means[1]:.4f}" in told
        (first, *_) = next(one["estimates"] for one in listed if one["suite"] == name)
        assert [first[key] for key in ("a", "b", "mean")] == pytest.approx([*means, means[1] - means[0]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[:3], "/heldout has the answer '{answer}' to '{question}', "),
        (
            lambda lines: [*lines[:3], lines[3] | {"answer": "z"}, *lines[4:]],
            "has the answer 'z' to '{question}': only the same",
        ),
        (None, "it has those of updates 0, 2, 4, 6, 8"),
    ],
)
def test_compare_refuses_other_prompts_and_missing_updates(whole, tmp_path, change, words):
    other = shutil.copytree(whole.root, tmp_path / "other", symlinks=True)
    path = other / "evaluations/heldout/prompts.jsonl"
    lines = [{key: line[key] for key in line if key != "crc"} for line in read_lines(path)]
    if change:
        write(path, change(lines))
    result = megarl("compare", whole.root, f"{other}:{8 if change else 3}")
    assert result.returncode == 2 and words.format(**lines[3]) in result.stderr, result.stderr


def test_runs_of_different_lengths_are_compared_after_equal_updates(whole, tmp_path):
    """One run is a copy of the other, cut as if it had stopped after 4 of 8 updates."""
    short = shutil.copytree(whole.root, tmp_path / "short", symlinks=True)
    for update in (6, 8):
        for place in short.glob(f"evaluations/*/update_{update:06d}"):
            shutil.rmtree(place)
    lines = [line for line in read_lines(short / "events.jsonl") if line.get("update", 0) <= 4]
    write(short / "events.jsonl", lines)
    place = SuiteResponses.of(short, "greedy")
    write_checked(place.directory / "settings_000004.json", place.settings(4) | {"temperature": 0.5, "samples": 9})
    head, accuracy, *rest = succeed("compare", whole.root, short).stdout.splitlines()
    assert f"A = {whole.root} (update 4), B = {short} (update 4)" in head
    assert "+0.0000 [+0.0000, +0.0000]" in accuracy
    assert rest[0] == "  evaluated otherwise: temperature = 0.0 in A, 0.5 in B"
