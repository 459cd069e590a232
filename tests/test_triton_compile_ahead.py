"""Kernels are compiled side by side before they are needed, and do not run meanwhile: in a process without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# A driver that compiles for Hopper, and notes what is loaded and launched.
PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

loaded, launched = [], []

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    map_python_to_cpp_type = staticmethod(lambda kind: "")
    launcher_cls = staticmethod(lambda source, metadata: lambda *args: launched.append(metadata.name))

    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})

        @staticmethod
        def load_binary(name, *args):
            loaded.append(name)
            return 1, 1, 32, 0, 1024

driver.set_active(Driver)
from pyvllm.kernels.plain import Norm
from pyvllm.kernels.triton.kernels import TritonKernels

kernels, x = TritonKernels(), torch.ones(4, 256, dtype=torch.bfloat16)
of = Norm(weight=torch.ones(256, dtype=torch.bfloat16), eps=1e-5)
with kernels.compile_ahead():
    kernels.norm(x, of)
    kernels.add_norm(x, x, of)
    kernels.norm(x, of)
print(len(loaded), len(launched))
kernels.norm(x, of)
print(len(loaded), len(launched))
"""


def test_launches_inside_compile_and_those_after_it_run(tmp_path: Path) -> None:
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["2 0", "2 1"], done.stderr
