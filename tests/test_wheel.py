"""The wheel alone: what it holds, what it asks for, and that it generates text where nothing else is installed.

`make test` builds the wheel and a virtual environment that holds what the wheel declares to need and nothing more.
It names both in PYVLLM_TEST_WHEEL and PYVLLM_TEST_CLEAN_ENV.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 5 * 10**6
MAX_DEPENDENCIES = 15


def _run(command: list[str], cwd: Path, **variables: str) -> str:
    """Standard output of `command`, run in `cwd` without this process's Python settings, torch on one thread of a CPU:
    the tests before may hold a GPU's memory.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, f"{command} failed\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The built wheel."""
    if "PYVLLM_TEST_WHEEL" not in os.environ:
        pytest.skip("PYVLLM_TEST_WHEEL names no wheel; `make test` builds one")
    return ROOT / os.environ["PYVLLM_TEST_WHEEL"]


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of the clean environment, with this wheel put in."""
    folder = ROOT / os.environ["PYVLLM_TEST_CLEAN_ENV"] / "bin"
    pip = [str(folder / "python"), "-m", "pip", "--disable-pip-version-check"]
    outside = tmp_path_factory.mktemp("outside")
    _run([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], outside)
    _run([*pip, "check"], outside)  # what the wheel declares is there
    return folder


def _metadata(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode().splitlines()


def test_wheel_is_small_and_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    assert wheel.stat().st_size < MAX_BYTES
    assert "Requires-Python: >=3.11" in _metadata(wheel)


def test_wheel_holds_the_package_and_no_rust_source(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.pyi", "py.typed", "*.cu", "*.cuh", "server/web/*")
        for path in (ROOT / "pyvllm").rglob(pattern)
    }
    assert {"pyvllm/kernels/__init__.py", "pyvllm/server/web/index.html"} <= sources
    assert held == sources | {"pyvllm/_core.abi3.so"}


def test_dependencies_are_few_and_are_ranges(wheel: Path) -> None:
    prefix = "Requires-Dist: "
    required = [line.removeprefix(prefix) for line in _metadata(wheel) if line.startswith(prefix)]
    direct = [requirement for requirement in required if "extra ==" not in requirement]
    assert 0 < len(direct) <= MAX_DEPENDENCIES
    for requirement in required:
        specifier = requirement.split(";")[0]
        assert re.search(r">=[\d.]+", specifier), f"{requirement} has no lower bound"
        assert "==" not in specifier, f"{requirement} is a pin"


GENERATE = """
import json, sys
import pyvllm
before = "transformers" in sys.modules
llm = pyvllm.LLM(sys.argv[1])
(output,) = llm.generate(["The capital of France is"], pyvllm.SamplingParams(temperature=0.0, max_tokens=8))
print(json.dumps({
    "file": pyvllm.__file__,
    "text": output.outputs[0].text,
    "tokens": len(output.outputs[0].token_ids),
    "transformers": before or "transformers" in sys.modules,
}))
"""


def test_wheel_alone_generates_text(clean_bin: Path, smollm2: Path, tmp_path: Path) -> None:
    installed = json.loads(_run([str(clean_bin / "python"), "-m", "pip", "list", "--format", "json"], tmp_path))
    assert "transformers" not in {package["name"] for package in installed}

    said = json.loads(_run([str(clean_bin / "python"), "-c", GENERATE, str(smollm2)], tmp_path).splitlines()[-1])
    assert Path(said["file"]).is_relative_to(clean_bin.parent)
    assert "Paris" in said["text"]
    assert said["tokens"] == 8
    assert not said["transformers"]


def test_wheel_alone_has_a_command_line(clean_bin: Path, smollm2: Path, tmp_path: Path) -> None:
    arguments = ["generate", str(smollm2), "-p", "The capital of France is", "--temperature", "0", "--max-tokens", "8"]
    assert "Paris" in _run([str(clean_bin / "pyvllm"), *arguments], tmp_path)
    by_script = _run([str(clean_bin / "pyvllm"), "--version"], tmp_path)
    assert by_script.startswith("pyvllm ")
    assert by_script == _run([str(clean_bin / "python"), "-m", "pyvllm", "--version"], tmp_path)


def test_source_distribution_is_complete(wheel: Path, tmp_path: Path) -> None:
    maturin = shutil.which("maturin", path=str(Path(sys.executable).parent))
    assert maturin is not None
    _run([maturin, "sdist", "--out", str(tmp_path)], ROOT)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    # The archive's old time stamps would make cargo take objects built before for current ones.
    for path in unpacked.rglob("*"):
        path.touch()
    _run([maturin, "build", "--out", str(tmp_path)], unpacked, CARGO_TARGET_DIR=str(ROOT / ".cache" / "sdist-target"))
    (rebuilt,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(rebuilt) as ours, zipfile.ZipFile(wheel) as theirs:
        assert set(ours.namelist()) == set(theirs.namelist())
