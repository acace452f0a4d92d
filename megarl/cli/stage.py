"""The command line's ``stage``: sealed stages that travel, and stages made of what other systems generated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.cli.arguments import Commands, command, settings


def add_stage(commands: Commands) -> None:
    """The commands of this module."""
    among = commands.add_parser("stage", help="pack, share, unpack and ingest sealed stages").add_subparsers(
        required=True, metavar="COMMAND"
    )
    sub = command(among, "pack", _pack, "a sealed stage with all that its updates depend on, as one directory or tar")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("stage", type=int)
    sub.add_argument("output", type=Path, help="a directory to make, or a file that ends in .tar")
    sub.add_argument("--license", required=True, help="of the rollouts, as apache-2.0, cc-by-4.0 or other")
    sub.add_argument("--weights", action="store_true", help="the policy's weights too; of later stages always")
    sub.add_argument("--no-prompts", action="store_true", help="leave out prompt files: their checksums stay")
    sub.add_argument("--json", action="store_true", help="one JSON object")

    sub = command(among, "unpack", _unpack, "a run directory from a packed stage, every file verified")
    sub.add_argument("packed", type=Path)
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--model", type=Path, help="the base model, for a stage that was packed without weights")
    sub.add_argument("--prompts", type=Path, action="append", default=[], help="a prompt file that was not packed")
    sub.add_argument("--json", action="store_true", help="one JSON object")
    settings(sub)

    sub = command(among, "push", _push, "a packed directory to a data set repository of the Hugging Face Hub")
    sub.add_argument("packed", type=Path)
    sub.add_argument("repository", metavar="OWNER/NAME")
    sub.add_argument("--private", action="store_true", help="if the repository is new")

    sub = command(among, "pull", _pull, "a packed directory from the Hugging Face Hub, every file verified")
    sub.add_argument("repository", metavar="OWNER/NAME")
    sub.add_argument("output", type=Path)
    sub.add_argument("--revision", help="branch, tag or commit")

    sub = command(
        among, "ingest", _ingest, "a run with a sealed first stage from JSON lines or Parquet of other systems"
    )
    sub.add_argument("recipe", type=Path)
    sub.add_argument("files", type=Path, nargs="+", help="rows of responses: docs/stages.md has their columns")
    sub.add_argument("--run-dir", type=Path, required=True)
    sub.add_argument("--ignore", action="append", default=[], metavar="COLUMN", help="may be repeated")
    settings(sub)


def _pack(options: argparse.Namespace) -> None:
    from megarl.stages.pack import pack
    from megarl.stages.packed import describe

    manifest = pack(
        options.run_dir, options.stage, options.output, options.license, options.weights, not options.no_prompts
    )
    size = f"{len(manifest.files)} files, {manifest.bytes / 2**20:.1f} MiB"
    print(json.dumps(describe(manifest)) if options.json else f"wrote {options.output}: {size}")


def _unpack(options: argparse.Namespace) -> None:
    from megarl.stages.packed import describe
    from megarl.stages.unpack import describe_unpacked, unpack

    manifest = unpack(options.packed, options.run_dir, options.model, options.prompts, options.set)
    print(json.dumps(describe(manifest)) if options.json else describe_unpacked(manifest, options.run_dir))


def _push(options: argparse.Namespace) -> None:
    from megarl.stages.hub import push

    print(push(options.packed, options.repository, options.private))


def _pull(options: argparse.Namespace) -> None:
    from megarl.stages.hub import pull

    print(pull(options.repository, options.output, options.revision))


def _ingest(options: argparse.Namespace) -> None:
    from megarl.stages.ingest import ingest

    print(ingest(options.recipe, options.set, options.files, options.run_dir, options.ignore))
