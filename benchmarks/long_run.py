"""The cost of starting a finished run with very many stages again, compared with a run of two stages.

    python benchmarks/long_run.py [--stages 10000]

Two stages are trained, and the directory of the second is copied, as hard links, to make the others; `megarl train`
then finds every stage complete and ends. Processor time is the measure, since it depends least on other load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.recipes import dump

SETTINGS = (
    "schedule.updates_per_stage=1",
    "schedule.prompts_per_update=2",
    "rollout.groups_per_chunk=2",
    "eval.every=0",
)


def train(recipe: Path, root: Path, model: Path, stages: int) -> dict[str, Any]:
    """Run ``megarl train`` to its end and measure its processor and wall-clock seconds."""
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(root)]
    for setting in (*SETTINGS, f'model.path="{model}"', f"schedule.stages={stages}"):
        command += ["--set", setting]
    seconds, processor = common.time_command(command)
    return {"stages": stages, "processor seconds": processor, "seconds": seconds}


def lengthen(root: Path, stages: int) -> None:
    """Turn a finished run of two stages into one of ``stages`` stages, by copies of the second."""
    two = RunDir.open(root)
    schedule = two.recipe.schedule.model_copy(update={"stages": stages})
    (root / "recipe.toml").write_text(dump(two.recipe.model_copy(update={"schedule": schedule})))
    run = RunDir.open(root)
    for number in range(2, stages):
        shutil.copytree(run.stage(1).directory, run.stage(number).directory, copy_function=os.link, symlinks=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=10_000)
    options = parser.parse_args()
    sys.path.insert(0, str(common.ROOT / "examples/quickstart"))
    from make_base import write_initial_model

    recipe = common.ROOT / "examples/quickstart/recipe.toml"
    with tempfile.TemporaryDirectory(prefix="megarl-long-run-") as scratch:
        model, root = Path(scratch) / "model", Path(scratch) / "run"
        write_initial_model(model)
        train(recipe, root, model, 2)
        rows = [train(recipe, root, model, 2)]
        lengthen(root, options.stages)
        rows.append(train(recipe, root, model, options.stages))
        rows.append({"stages": "beyond"} | {key: rows[1][key] - rows[0][key] for key in list(rows[0])[1:]})
        common.write_table("long_run", rows)


if __name__ == "__main__":
    main()
