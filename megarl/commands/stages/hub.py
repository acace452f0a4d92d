"""``megarl stage push`` and ``pull``: packed stages as dataset repositories of the Hugging Face Hub.

The address of the Hub and the token are those that huggingface_hub uses: ``HF_ENDPOINT``, and ``HF_TOKEN`` or
`hf auth login`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.commands.stages.packed import CARD, MANIFEST, MAX_MANIFEST, Manifest, Source, check_space
from megarl.errors import PhaseFailed, UserError
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import atomic_directory, check_new, disk_errors


def push(packed: Path, repository: str, private: bool) -> str:
    """Upload a packed directory as dataset ``repository`` (OWNER/NAME); returns the text to print.

    Its files are verified first. `UserError` for a tar file, a damaged stage, or a repository without write access.
    """
    source = Source(packed)
    if source.is_tar:
        raise UserError(f"{packed} is a tar file: pack the stage as a directory, so that the Hub can show its files")
    source.verify()
    from huggingface_hub import HfApi

    with _errors(repository):
        api = HfApi()
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        files = [MANIFEST, CARD, *source.manifest.files]
        done = api.upload_folder(
            repo_id=repository,
            repo_type="dataset",
            folder_path=packed,
            allow_patterns=files,
            commit_message=f"stage {source.manifest.stage}, packed by megarl",
        )
    return f"pushed {len(files)} files to {done.repo_url}, commit {done.oid}"


def pull(repository: str, output: Path, revision: str | None) -> str:
    """Download dataset ``repository`` as the packed directory ``output`` and verify it; returns the text to print.

    Only the files in its manifest are downloaded, and none that is larger than the manifest says.
    """
    output = output.resolve()
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    check_new(output)
    with atomic_directory(output) as temporary:
        with _errors(repository), disk_errors(output):
            info = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
            commit, sizes = info.sha, {file.rfilename: file.size for file in info.siblings or ()}
            location: Any = {"repo_type": "dataset", "revision": commit, "local_dir": temporary}
            _check_sizes(repository, sizes, {})
            name = hf_hub_download(repository, MANIFEST, **location)
            manifest = Manifest.parse(Path(name).read_bytes(), Path(repository))
            _check_sizes(repository, sizes, manifest.files)
            check_space(repository, manifest, output)
            snapshot_download(repository, **location, allow_patterns=[MANIFEST, CARD, *manifest.files])
        shutil.rmtree(temporary / ".cache", ignore_errors=True)  # made by huggingface_hub
        Source(temporary).verify()
    return f"wrote {output}, commit {commit}, licence {manifest.licence!a}\nnext    megarl stage unpack {output} RUN"


def _check_sizes(repository: str, sizes: Mapping[str, int | None], files: Mapping[str, FileSum]) -> None:
    """`UserError`, before anything is downloaded, if the files on the Hub have other sizes than in the manifest."""
    for name in (MANIFEST, CARD):
        if (sizes.get(name) or 0) > MAX_MANIFEST:
            raise UserError(f"{repository}: {name} has {sizes[name]} bytes, too many for a packed stage")
    for name, expected in files.items():
        if sizes.get(name) != expected.bytes:
            found = f"{name} has {sizes[name]} bytes" if name in sizes else f"{name} is missing"
            raise UserError(f"{repository}: {found}, but its manifest says {expected.bytes} bytes")


@contextlib.contextmanager
def _errors(repository: str) -> Iterator[None]:
    """Turn errors of the Hub into messages of one line: `PhaseFailed` if a retry may help, else `UserError`."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # the base class of the HTTP client's errors; versions of huggingface_hub use different clients
    unreachable: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    try:
        yield
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        raise UserError(f"{repository}: {_first_line(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        kind = UserError if 400 <= status < 500 and status != 429 else PhaseFailed
        raise kind(f"{repository}: the Hub says {_first_line(error)}") from error
    except (unreachable, OSError) as error:
        raise PhaseFailed(f"{repository}: the Hub cannot be reached: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
