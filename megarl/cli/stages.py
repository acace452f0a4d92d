"""The command ``stage``: packs, shares and unpacks sealed stages, and makes stages of other systems' responses."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.cli.arguments import Commands, add_run, command, settings


def add_stages(commands: Commands) -> None:
    among = commands.add_parser("stage", help="pack, unpack and ingest sealed stages").add_subparsers(
        required=True, metavar="COMMAND"
    )
    sub = command(among, "pack", _pack, "pack a sealed stage with its policy, prompts and recipe")
    add_run(sub)
    sub.add_argument("stage", type=int, help="number of the stage, from 0")
    sub.add_argument("output", type=Path, help="the directory to make")
    sub.add_argument("--license", required=True, help="licence of the rollouts, such as apache-2.0, cc-by-4.0 or other")
    sub.add_argument(
        "--weights", action="store_true", help="include the policy's weights; always done for stages after the first"
    )

    sub = command(among, "unpack", _unpack, "make a run directory from a packed stage, after verifying every file")
    sub.add_argument("packed", type=Path, help="the directory of a packed stage")
    sub.add_argument("run_dir", type=Path, help="the run directory to make")
    sub.add_argument("--model", type=Path, help="the base model, for a stage that was packed without weights")
    settings(sub)

    sub = command(
        among,
        "ingest",
        _ingest,
        "make a run with a sealed first stage of other systems' responses (JSON lines or Parquet)",
    )
    sub.add_argument("recipe", type=Path)
    sub.add_argument("files", type=Path, nargs="+", help="rows of responses; docs/stages.md has the columns")
    sub.add_argument("--run-dir", type=Path, required=True)
    sub.add_argument("--ignore", action="append", default=[], metavar="COLUMN", help="skip a column; may be repeated")
    settings(sub)


def _pack(options: argparse.Namespace) -> None:
    from megarl.commands.stages.pack import pack

    manifest = pack(options.run_dir, options.stage, options.output, options.license, options.weights)
    print(f"wrote {options.output}: {len(manifest.files)} files")


def _unpack(options: argparse.Namespace) -> None:
    from megarl.commands.stages.unpack import describe_unpacked, unpack

    manifest = unpack(options.packed, options.run_dir, options.model, options.set)
    print(describe_unpacked(manifest, options.run_dir))


def _ingest(options: argparse.Namespace) -> None:
    from megarl.commands.stages.ingest import ingest

    print(ingest(options.recipe, options.set, options.files, options.run_dir, options.ignore))
