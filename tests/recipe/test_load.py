"""Settings that cannot work are refused, of all tables, and an infinite value survives writing and reading."""

import pytest

from megarl.commands.evaluate import _with_suites
from megarl.data.files import read_rows
from megarl.errors import UserError
from megarl.recipe.load import dump_recipe, load_recipe
from megarl.rewards.service import Judge

SINGLE = ["rollout.responses_per_prompt=1", "objective.advantage=batch_normalised"]
GYM = ["data.source=reasoning_gym", "data.train=chain_sum"]
CHAT = ["data.template=chat"]
PYTHON = ["reward.kind=python", "reward.path=a.py:f"]
SERVICE = "reward.service={url='http://a'"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([*SINGLE, "objective.zero_variance=drop"], 'zero_variance = "drop" would drop everything'),
        ([*SINGLE, "schedule.prompts_per_update=1"], "prompts_per_update must be at least 2"),
        (["megatron.virtual_pipeline_model_parallel_size=1"], "leave it out for one"),
        # what was found is said where it is one value
        (["metrics.by=level"], r"metrics.by: expected a list, in brackets \(got 'level'\)"),
        (["rollout.temperature=1e-320"], "temperature: Input should be greater than or equal to 0.0001"),
        (["eval.temperature=1e-320"], "temperature: Input should be greater than or equal to 0.0001"),
        (["optimizer.lr=-1.0"], r"optimizer.lr: .* \(got -1.0\)$"),
        (SINGLE[:1], r"  recipe: objective.advantage = .* compares .* must be at least 2$"),
        # prompts
        (["data.sources=[{source='file', train='p.jsonl'}]"], r"with \[\[data.sources\]\], set source in each of them"),
        (["data.format=gsm8k", "data.columns={prompt='q'}"], "leave out data.columns"),
        ([*GYM, "data.format=gsm8k"], "describe a file"),
        (["data.template=Chat"], 'expected "raw", "chat" or a file that ends in .jinja'),
        (["data.system=You sum."], 'set template = "chat"'),
        (["data.template_arguments={enable_thinking=false}"], 'set template = "chat"'),
        ([*CHAT, "data.template_arguments={tools=[]}"], "cannot have tools"),
        (["data.overlong=cut"], "'error' or 'drop'"),
        # rewards
        (["reward.kind=python"], 'kind = "python" needs path'),
        (["reward.kind=python", "reward.path=my.py"], "expected FILE.py:FUNCTION"),
        (["reward.path=my.py:score"], "path is a setting of kind = 'python'"),
        (["reward.parts=[{kind='overlong', weight=1.0}]"], "needs buffer"),
        (["reward.parts=[{kind='box', weight=1.0, path='a.py:f'}]"], "has no path"),
        (["reward.parts=[{kind='bx', weight=1.0}]"], "'box', 'overlong', 'length' or 'python'"),
        (["reward.parts=[{kind='overlong', weight=1.0, buffer=2000}]"], "is more than rollout.max"),
        (["reward.kind=exat"], "unknown; did you mean 'exact'"),
        ([*PYTHON, "reward.scores=[3, -1]"], "the least and the largest"),
        ([*PYTHON, "reward.correct_above=2"], "more than the largest score"),
        (["reward.kind=judge"], "need .reward.service."),
        ([SERVICE + "}"], "other kinds do not have it"),
        (["reward.kind=judge", SERVICE + "}"], "needs service.model"),
        (["reward.kind=http", SERVICE + ", prompt='q'}"], "service.prompt is a setting of"),
        # learning rates
        (["optimizer.schedule=wsd"], "needs decay_updates"),
        (["optimizer.min_lr=1e-7"], "end of a decay"),
        (["optimizer.warmup_step=16"], "set warmup_updates too"),
        (["optimizer.schedule=linear", "optimizer.lr=1e-6", "optimizer.min_lr=1e-5"], "above lr"),
        # tables of Megatron-Core: fields and types of values
        (["megatron.moe_router_topk_scaling_facto=1.0"], "did you mean 'moe_router_topk_scaling_factor'"),
        (["megatron_ddp.overlap_grad_reduce=1"], "overlap_grad_reduce = 1: Megatron-Core expects a value of type bool"),
        (["megatron_ddp.bucket_size=true"], r"_size = True: Megatron-Core expects a value of type Optional\[int\]"),
        # objectives of one's own
        (["objective.path=mine.py"], "expected FILE.py:CLASS"),
    ],
)
def test_settings_that_cannot_work_are_refused(recipe, settings, said):
    assert load_recipe(recipe, SINGLE).rollout.responses_per_prompt == 1
    with pytest.raises(UserError, match=said):
        load_recipe(recipe, settings)


def test_a_chosen_suite_is_read_as_without_the_choice(recipe):
    suites = 'eval.suites=[{name="a", suite="exam.jsonl", source="file"}, {name="b"}]'
    loaded = load_recipe(recipe, [suites, 'eval.data.prompt_template="{prompt}?"'])
    (chosen,) = _with_suites(loaded, ["a"]).suites
    assert chosen == loaded.suites[0] and chosen.data.prompt_template == "{prompt}?"


def test_an_infinite_bound_of_the_ratio_survives_writing_and_reading(recipe, tmp_path):
    first = load_recipe(recipe, ["objective.ratio_max=inf"])
    (tmp_path / "again.toml").write_text(dump_recipe(first))
    assert load_recipe(tmp_path / "again.toml") == first
    assert first.objective.fields["ratio_max"] == float("inf")


SHORT = '[model]\npath = "m"\n[data]\nSOURCE[reward]\nkind = "exact"\n[eval]\nevery = 0\n'
ONE = 'source = "file"\ntrain = "p.jsonl"\n'
JUDGE = ["reward.kind=judge", "reward.service.url=http://h/v1", "reward.service.model=m"]
FILES = [
    ("p.jsonl", "data.train=hub/p.jsonl", []),
    ("p.parquet", "data.sources=[{source = 'file', train = 'hub/p.parquet'}]", []),
    ("p.csv", "eval.suite=hub/p.csv", ["eval.every=1"]),
    ("p.json", "eval.suites=[{name = 'a', suite = 'hub/p.json'}]", ["eval.every=1"]),
    ("t.jinja", "data.template=hub/t.jinja", []),
    ("t.jinja", "eval.data.template=hub/t.jinja", ["eval.every=1", "eval.suite=p.jsonl"]),
    ("f.py", "reward.path=hub/f.py:score", ["reward.kind=python"]),
    ("f.py", "reward.parts=[{kind = 'python', weight = 1.0, path = 'hub/f.py:score'}]", []),
    ("f.py", "objective.advantage=hub/f.py:mine", []),
    ("q.txt", "reward.service.prompt=hub/q.txt", JUDGE),
]


@pytest.mark.parametrize(("name", "setting", "more"), FILES, ids=[f"{s.partition('=')[0]}-{n}" for n, s, _ in FILES])
def test_a_file_behind_a_link_is_found_from_any_directory(tmp_path, monkeypatch, name, setting, more):
    """In a cache of Hugging Face every file is a link to blobs/HASH, whose name has no suffix."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "hub").mkdir()
    (tmp_path / "blobs" / "0ab1").write_text("score = mine = lambda *given: given")
    (tmp_path / "hub" / name).symlink_to("../blobs/0ab1")
    single = "" if setting.startswith("data.sources") else ONE
    (tmp_path / "r.toml").write_text(SHORT.replace("SOURCE", single))
    monkeypatch.chdir(tmp_path)
    text = dump_recipe(load_recipe(tmp_path / "r.toml", [setting, *more]))
    assert f'"{tmp_path / "hub" / name}' in text and "blobs" not in text
    monkeypatch.chdir("/")
    (tmp_path / "again.toml").write_text(text)
    assert dump_recipe(load_recipe(tmp_path / "again.toml")) == text


def test_files_are_read_without_a_mark_of_the_byte_order(tmp_path):
    """As Notepad and PowerShell write them (OpenViking issue 499)."""
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbf" + SHORT.replace("SOURCE", ONE).replace("\n", "\r\n").encode())
    assert load_recipe(tmp_path / "r.toml").reward.kind == "exact"
    (tmp_path / "q.txt").write_bytes(b"\xef\xbb\xbf{response}?")
    table = load_recipe(tmp_path / "r.toml", [*JUDGE, f"reward.service.prompt={tmp_path / 'q.txt'}"]).reward.service
    assert Judge(table)._question == "{response}?"


@pytest.mark.parametrize(
    "path", ["loop.jsonl", "gone.jsonl", "~/p.jsonl", "file:///p.jsonl", "folder.jsonl", "a\nb.jsonl"]
)
def test_a_prompt_file_that_cannot_be_found_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "r.toml").write_text(SHORT.replace("SOURCE", ONE))
    with pytest.raises(UserError, match="there is no prompt file "):
        read_rows(load_recipe(tmp_path / "r.toml", [("data.train", path)]).data.mixture[0])
