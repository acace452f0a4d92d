"""Compiles the rehearsal device and the CUDA kernels for it, once for each version of torch, Python and the sources.

``python -m tests.rehearsal.build`` prints the folder, which lies beside the other cached builds in ``$MEGARL_CACHE``
(default ``~/.cache/megarl``).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "csrc"
DEVICE, CUDA_KERNELS = "megarl_rehearsal_device.so", "libmegarl_cuda.so"
COMPILER = os.environ.get("CXX", "g++")


def build() -> Path:
    """The folder of both libraries, which this compiles unless an earlier call has."""
    cache = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache/megarl")
    folder = cache / f"rehearsal-{_key()}"
    if (folder / ".complete").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            print(f"compiling the rehearsal device into {folder} (once, under a minute)", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _run(sys.executable, KERNELS / "translate_rules.py", folder / "megarl_rules.h")
            with ThreadPoolExecutor() as threads:
                objects = list(threads.map(lambda source: _compile(source, folder), _sources()))
            _link_device([o for o in objects if o.suffix == ".device"], folder / DEVICE)
            _run(COMPILER, "-shared", "-o", folder / CUDA_KERNELS, *[o for o in objects if o.suffix == ".kernel"])
            (folder / ".complete").touch()
    return folder


def _sources() -> list[Path]:
    cuda = [*KERNELS.glob("cuda/*.cu"), KERNELS / "library.cpp", HERE / "cuda/fibres.cpp"]
    return [*sorted(HERE.glob("csrc/*.cpp")), *sorted(cuda)]


def _key() -> str:
    import importlib.metadata

    files = [*HERE.rglob("*.cpp"), *HERE.rglob("*.h"), *HERE.rglob("*.cuh"), Path(__file__), *KERNELS.rglob("*.*")]
    files += (ROOT / "megarl/objectives").rglob("*.py")
    digest = hashlib.sha256(repr([sys.version, importlib.metadata.version("torch"), COMPILER]).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(source: Path, folder: Path) -> Path:
    if source.parent == HERE / "csrc":
        target = folder / f"{source.stem}.device"
        torch = _torch()
        includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
        options = ["-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS"]
        _run(COMPILER, *options, *(f"-I{i}" for i in includes), "-c", source, "-o", target)
        return target
    target = folder / f"{source.stem}.kernel"
    translated = folder / f"{source.stem}.cpp"
    translated.write_text(host_source(source.read_text()))
    includes = [HERE / "cuda", KERNELS / "include", source.parent, folder]
    options = ["-O2", "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-math-errno"]
    if source.suffix == ".cu":
        options += ["-include", str(HERE / "cuda/cuda_runtime.h")]
    _run(COMPILER, *options, *(f"-I{i}" for i in includes), "-c", translated, "-o", target)
    return target


def host_source(cuda: str) -> str:
    """A .cu file as C++: launches become calls, and a block's dynamic shared memory becomes a pointer."""
    launch = re.compile(r"\b(\w+(?:<\w+>)?)<<<(.*?)>>>\(", re.DOTALL)
    dynamic = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
    cuda = launch.sub(r"rehearsal::launch(\1, \2)(", cuda)
    return dynamic.sub(r"\1* \2 = static_cast<\1*>(rehearsal::dynamic_shared());", cuda)


def _torch() -> Path:
    import importlib.util

    return Path(importlib.util.find_spec("torch").origin).parent


def _link_device(objects: list[Path], target: Path) -> None:
    libraries = _torch() / "lib"
    named = ["-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    _run(COMPILER, "-shared", "-o", target, *objects, f"-L{libraries}", f"-Wl,-rpath,{libraries}", *named)


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


if __name__ == "__main__":
    print(build())
