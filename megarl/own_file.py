"""Loads what a recipe names in a Python file of the user's own, in the form ``FILE.py:NAME``. Imports nothing heavy."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.foreign import quoted

PREFIX = "own_"  # of the names of the modules


def is_own(text: str) -> bool:
    """Whether ``text`` has the form FILE.py:NAME."""
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def file_of(path: str) -> str:
    """FILE.py of FILE.py:NAME."""
    return path.rpartition(":")[0]


def absolute(path: str) -> str:
    """FILE.py:NAME with the absolute path of the file."""
    file, _, name = path.rpartition(":")
    return f"{Path(file).absolute()}:{name}"


@functools.cache
def load(path: str, setting: str) -> Any:
    """What the file of ``path``, FILE.py:NAME, calls NAME; the file is run once in a process.

    setting: the recipe's key with this path, for the `UserError` if there is no such file or name, or it cannot be run.
    """
    file, _, name = path.rpartition(":")
    here = f"{setting} = {path!r}"
    if not Path(file).is_file():
        raise UserError(f"{here}: there is no file {file}")
    # the name of the module is the same in every process, and files of one name in two folders are two modules
    module_name = f"{PREFIX}{zlib.crc32(str(Path(file).resolve()).encode()):08x}_{Path(file).stem}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None  # they are for every file *.py
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up there
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            beside = isinstance(error, ModuleNotFoundError) and (Path(file).parent / f"{error.name}.py").exists()
            hint = f"; it lies beside the file: set PYTHONPATH={quoted(Path(file).absolute().parent)}" if beside else ""
            raise UserError(f"{here} cannot be loaded: {describe(error, file)}{hint}") from error
    module = sys.modules[module_name]
    if not hasattr(module, name):
        raise UserError(f"{here}: {file} has no {name!r}")
    return getattr(module, name)


def describe(error: BaseException, file: str) -> str:
    """An exception of the user's code in one line, with the last line of ``file`` that it passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}{where}".split())


def raised_in(error: BaseException) -> str | None:
    """`describe` of an error that passed through a file that was loaded here, and that a new start would meet again;
    None for any other error."""
    if not isinstance(error, Exception) or isinstance(error, OSError | MemoryError):
        return None
    own = {str(m.__file__) for name, m in list(sys.modules.items()) if name.startswith(PREFIX)}
    file = next((f.filename for f in traceback.extract_tb(error.__traceback__) if f.filename in own), None)
    return None if file is None else f"{file}: {describe(error, file)}"
