"""The runs of a sweep: their directories and recipes, which are done, and whether their settings are valid.

A point is a combination of settings; its replicates are runs with different seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.commands.one_phase import changed_recipe
from megarl.errors import UserError
from megarl.recipe.layout import is_layout_setting
from megarl.recipe.load import load_recipe, recipe_diff
from megarl.recipe.sweep import BASE, Point, SweepTable, seeds_of
from megarl.recipe.tables import Recipe
from megarl.storage.run_dir import RunDir, Stage


@dataclass(frozen=True)
class Job:
    """One run directory of a sweep."""

    directory: Path
    recipe: Recipe
    replicate: str  # name of the seed; the same names occur at every point
    point: Point  # of a base run, which only generates rollouts for the others: one called `BASE`, without settings
    source: Stage | None = None  # the stage that it optimises; None: it is a whole run
    until: int | None = None  # for a base run: the stage after whose rollouts it ends

    @property
    def name(self) -> str:
        return f"{self.point.name}/{self.replicate}"

    @property
    def run(self) -> RunDir:
        return RunDir(self.directory, self.recipe)

    def is_done(self) -> bool:
        """Whether the run is complete, with its evaluations."""
        if not (self.directory / "recipe.toml").exists():
            return False
        if self.until is not None:
            return self.run.stage(self.until).is_sealed()
        end = self.run.stage(self.source.number + 1) if self.source else self.run.end
        return end.policy.exists() and not self.run.unevaluated(end.first_update)

    def is_possible(self) -> bool:
        """Whether the rollouts that the run needs exist."""
        return self.source is None or self.source.is_sealed()

    def check_directory(self) -> None:
        """`UserError` if the directory has a run with other settings."""
        if not (self.directory / "recipe.toml").exists():
            return
        lines = recipe_diff(RunDir.open(self.directory).recipe, self.recipe)
        if difference := [line for line in lines if not is_layout_setting(line.partition(":")[0])]:
            raise UserError(
                f"{self.directory} has a run with other settings (old -> new): {'; '.join(difference)}. Use another "
                "--output or another name for the point, or remove that run"
            )


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep."""

    table: SweepTable
    output: Path
    bases: list[Job]  # the runs that generate shared rollouts
    jobs: list[Job]  # the runs of all points: first all of one replicate, then all of the next

    @property
    def all(self) -> list[Job]:
        return [*self.bases, *self.jobs]


def plan_sweep(table: SweepTable, output: Path) -> SweepPlan:
    """Plan all runs below ``output``; `UserError` with a line for each point whose settings are wrong."""
    output = output.resolve()
    seeds = seeds_of(table, load_recipe(table.recipe))
    bases = {} if table.stage is None else {seed: _base(table, output, seed, table.stage) for seed in seeds}
    jobs: list[Job] = []
    wrong: dict[str, str] = {}
    for seed in seeds:
        source = bases[seed].run.stage(bases[seed].until or 0) if bases else None
        for point in table.points():
            try:
                if source is None:
                    recipe = load_recipe(table.recipe, [*point.settings, ("run.seed", seed)])
                else:
                    recipe = changed_recipe(source, point.settings)
            except UserError as error:
                wrong.setdefault(point.name, str(error))
                continue
            jobs.append(Job(output / point.name / f"seed_{seed}", recipe, f"seed_{seed}", point, source))
    for job in (*jobs, *bases.values()):
        job.check_directory()
    if wrong:
        lines = "\n".join(f"  {name}: {text}" for name, text in wrong.items())
        raise UserError(f"the sweep cannot start, since these points have mistakes:\n{lines}")
    return SweepPlan(table, output, [*bases.values()], jobs)


def _base(table: SweepTable, output: Path, seed: int, stage: int) -> Job:
    """The run of a seed that generates the rollouts which all points share."""
    common = [(f"{section}.{key}", value) for section, keys in table.set.items() for key, value in keys.items()]
    recipe = load_recipe(table.recipe, [*common, ("run.seed", seed)])
    if stage >= recipe.schedule.stages:
        raise UserError(f"stage = {stage}: the recipe has stages 0 to {recipe.schedule.stages - 1}")
    return Job(output / BASE / f"seed_{seed}", recipe, f"seed_{seed}", Point({}, BASE, ()), until=stage)
