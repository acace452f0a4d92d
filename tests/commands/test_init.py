"""`megarl init` in a clone; tests/wheel has it from a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.init import init
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from tests.helpers import ROOT, megarl
from tests.phases.commands import succeed, train


def test_it_writes_a_recipe_that_loads_and_lists_all_shipped_ones(tmp_path: Path) -> None:
    said = megarl("init", cwd=tmp_path).stdout
    for path in (ROOT / "examples").rglob("*.toml"):
        assert str(path.relative_to(ROOT / "examples").with_suffix("")) in said
    assert load_recipe(tmp_path / "starter.toml").objective.name == "minpro"
    assert f"beside  {ROOT}/examples/qwen3_8b " in init("qwen3_8b/m2po", tmp_path)
    planned = succeed("plan", "qwen3_8b-m2po.toml", cwd=tmp_path, code=2)
    assert "put its config.json beside the recipe" in planned.stderr
    shipped = (ROOT / "examples/qwen3_8b/m2po.toml").read_text()
    assert (tmp_path / "qwen3_8b-m2po.toml").read_text() == shipped
    init("own_objective", tmp_path)
    with pytest.raises(UserError, match="exists already"):
        init("own_objective", tmp_path)
    with pytest.raises(UserError, match="did you mean 'qwen3_8b/m2po'"):
        init("qwen3_8b/m2p", tmp_path)
    assert "MODEL is not a local directory" in train(tmp_path / "starter.toml", tmp_path / "run", code=2).stderr


def test_a_recipe_names_the_script_that_makes_its_model(tmp_path: Path) -> None:
    said = init("quickstart/recipe", tmp_path)
    assert f"next    python {ROOT}/examples/quickstart/make_base.py\n" in said
    assert "megarl plan" not in said and "megarl plan" in init("starter", tmp_path)
    assert f"python {ROOT}/examples/smollm2/tasks.py\n" in init("smollm2/instructions", tmp_path)
    recipe = load_recipe(tmp_path / "smollm2-instructions.toml")
    assert recipe.reward.path == f"{ROOT}/examples/smollm2/tasks.py:follows"
