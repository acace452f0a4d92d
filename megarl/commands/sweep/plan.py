"""The runs of a sweep: their directories and recipes, which are done, and whether their settings are valid.

A point is a combination of settings; its replicates are runs with different seeds, or on the rollouts of different
runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.commands.one_phase import changed_recipe
from megarl.errors import UserError
from megarl.foreign import quoted
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
    replicate: str  # name of the seed, or of the run whose rollouts it uses; the same names occur at every point
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
    bases = [] if table.runs or table.stage is None else _bases(table, output)
    jobs: list[Job] = []
    wrong: dict[str, str] = {}
    for replicate, source in _sources(table, bases).items():
        for point in table.points():
            try:
                if source is None:
                    seed = ("run.seed", int(replicate.removeprefix("seed_")))
                    recipe = load_recipe(_recipe(table), [*point.settings, seed])
                else:
                    recipe = changed_recipe(source, point.settings)
            except UserError as error:
                wrong.setdefault(point.name, str(error))
                continue
            jobs.append(Job(output / point.name / replicate, recipe, replicate, point, source))
            jobs[-1].check_directory()
    for base in bases:
        base.check_directory()
    if wrong:
        lines = "\n".join(f"  {name}: {text}" for name, text in wrong.items())
        raise UserError(f"the sweep cannot start, since these points have mistakes:\n{lines}")
    return SweepPlan(table, output, bases, jobs)


def _bases(table: SweepTable, output: Path) -> list[Job]:
    """One run per seed that generates the rollouts which all points share."""
    path = _recipe(table)
    assert table.stage is not None
    jobs = []
    for seed in seeds_of(table, load_recipe(path)):
        common = [(f"{section}.{key}", value) for section, keys in table.set.items() for key, value in keys.items()]
        recipe = load_recipe(path, [*common, ("run.seed", seed)])
        if table.stage >= recipe.schedule.stages:
            raise UserError(f"stage = {table.stage}: the recipe has stages 0 to {recipe.schedule.stages - 1}")
        point = Point({}, BASE, ())
        jobs.append(Job(output / BASE / f"seed_{seed}", recipe, f"seed_{seed}", point, until=table.stage))
    return jobs


def _recipe(table: SweepTable) -> Path:
    assert table.recipe is not None
    return table.recipe


def _sources(table: SweepTable, bases: list[Job]) -> dict[str, Stage | None]:
    """{replicate: the stage that all points optimise; None: they are whole runs}."""
    if table.stage is None:
        return {f"seed_{seed}": None for seed in seeds_of(table, load_recipe(_recipe(table)))}
    if bases:
        return {base.replicate: base.run.stage(table.stage) for base in bases}
    sources: dict[str, Stage | None] = {}
    for path in (path.resolve() for path in table.runs):
        stage = RunDir.open(path).stage(table.stage)
        if not stage.is_sealed():
            raise UserError(
                f"{stage.rollouts} is not sealed: run `megarl rollout {quoted(path)} --stage {table.stage}`"
            )
        if path.name in sources:
            raise UserError(f"runs: two directories are called {path.name}, but the sweep needs different names")
        sources[path.name] = stage
    return sources
