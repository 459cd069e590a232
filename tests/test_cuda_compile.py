"""CUDA sources are compiled for Hopper without a GPU, and their code stays in registers."""

import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyvllm.kernels.cuda import compile as cuda_compile
from pyvllm.kernels.cuda.compile import (
    MAX_SHARED_BYTES,
    CompileError,
    Variant,
    compile_ahead,
    compile_cubin,
    load,
    missing,
)
from pyvllm.kernels.cuda.decode import plan_launch as plan_launch_decode
from pyvllm.kernels.cuda.gated_linear import pays, prepare, tilings
from pyvllm.kernels.cuda.linear import plan_launch, supports
from pyvllm.kernels.cuda.prefill import plan_launch as plan_launch_prefill
from pyvllm.kernels.cuda.prefill import supports as supports_prefill
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.plain import Heads, Norm, RopeTables
from pyvllm.kernels.triton.attention_config import DecodeConfig, decode_constants
from tests.attention_cases import features, spec

_MISSING = missing()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=f"kernels cannot be compiled here: {_MISSING}")

# N, K of some matrices of Llama-3-8B and Qwen3-0.6B.
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (6144, 1024)]
# M, N, K, dtype, macro NORM, gated: each size of tiles, numbers of rows and flag.
LAYERS = [
    *((m, 6144, 4096, torch.bfloat16, norm, gated) for m in (1, 16) for norm in (0, 1) for gated in (False, True)),
    (1, 4096, 14336, torch.bfloat16, 0, False),
    (16, 1024, 2048, torch.float16, 2, False),
]


def _gemv_variants() -> list[Variant]:
    return [
        plan_launch(m, n, k, dtype, norm=norm, gated=gated, multiprocessors=132).variant
        for m, n, k, dtype, norm, gated in LAYERS
    ]


def _decode_variants() -> list[Variant]:
    variants = []
    for head_dim in (64, 128, 256):
        for group, block_size, flags in ((8, 64, False), (4, 32, True)):
            attention = Attention(
                num_heads=group,
                num_kv_heads=1,
                head_dim=head_dim,
                scale=1.0,
                softcap=30.0 if flags else None,
                alibi_slopes=(1.0,) * group if flags else None,
            )
            dtype = torch.float16 if flags else torch.bfloat16
            kv_layer = torch.empty(1, 2, 1, block_size, head_dim, dtype=dtype)
            constants = decode_constants(attention, kv_layer, DecodeConfig())
            norm = Norm(weight=torch.empty(head_dim, dtype=dtype), eps=1e-6)
            rope = RopeTables(cos=torch.empty(1, head_dim), sin=torch.empty(1, head_dim), interleaved=False)
            heads = Heads(num_heads=group, num_kv_heads=1, head_dim=head_dim, query_norm=norm, key_norm=norm, rope=rope)
            for fused in (None, heads):
                launch = plan_launch_decode(attention, constants, 1, kv_layer, fused)
                assert launch.shared_bytes <= MAX_SHARED_BYTES
                variants.append(launch.variant)
    return variants


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("PYVLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "cubins"


def _fill_cache(variants: Iterable[Variant]) -> None:
    """Compile them side by side."""
    with compile_ahead():
        for variant in variants:
            load(variant, 0).launch((), grid=(1, 1, 1), threads=1)


def _dump(cubin: bytes, folder: Path, option: str) -> str:
    """What `cuobjdump`, which comes with Triton, says of the kernel."""
    triton = pytest.importorskip("triton")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, str(path)], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack of the kernel."""
    (line,) = (line for line in _dump(cubin, folder, "-res-usage").splitlines() if "REG:" in line)
    return {name: int(value) for name, value in (field.split(":") for field in line.split())}


def _without_spills(variants: Sequence[Variant], folder: Path) -> Iterator[tuple[Variant, bytes, int]]:
    """Each with its cubin and registers, having none of them in memory."""
    _fill_cache(variants)
    for variant in variants:
        cubin = compile_cubin(variant)
        resources = _resources(cubin, folder)
        assert resources["STACK"] == 0, variant
        assert resources["LOCAL"] == 0, variant
        yield variant, cubin, resources["REG"]


def test_every_gemv_variant_of_known_models_compiles_without_spills(cache: Path, tmp_path: Path) -> None:
    for variant, _, registers in _without_spills(_gemv_variants(), tmp_path):
        # Blocks of two kernels that follow each other share a multiprocessor's 65,536 registers.
        assert registers * 256 <= 32768, variant


def test_every_decode_variant_compiles_without_spills(cache: Path, tmp_path: Path) -> None:
    variants = _decode_variants()
    assert len(list(_without_spills(variants, tmp_path))) == len(variants)


def test_gemv_shared_memory_fits_and_leaves_room_for_the_next_kernel_of_a_small_model_at_batch_one() -> None:
    for n, k in SHAPES:
        one = plan_launch(1, n, k, torch.bfloat16, norm=0, gated=False, multiprocessors=132)
        assert (2 * (one.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024) == (k < 4096), (n, k)
        most = max(m for m in range(1, 17) if supports(m, n, k, torch.bfloat16))
        for norm in (0, 1):
            plan = plan_launch(most, n, k, torch.bfloat16, norm=norm, gated=False, multiprocessors=132)
            assert plan.shared_bytes <= MAX_SHARED_BYTES


def test_a_cubin_is_read_from_the_cache_and_made_anew_when_the_file_is_damaged(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = _gemv_variants()[0]
    cubin = compile_cubin(variant)
    (path,) = cache.iterdir()
    compiled: list[str] = []
    real = cuda_compile._compile

    def watched(name: str, texts: Mapping[str, str], options: Sequence[str]) -> bytes:
        compiled.append(name)
        return real(name, texts, options)

    monkeypatch.setattr(cuda_compile, "_compile", watched)
    assert compile_cubin(variant) == cubin
    assert not compiled
    for damaged in (b"", b"short", path.read_bytes()[:-1], path.read_bytes()[:40] + b"x" + path.read_bytes()[41:]):
        path.write_bytes(damaged)
        compiled.clear()
        assert compile_cubin(variant) == cubin
        assert compiled
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PYVLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert compile_cubin(_gemv_variants()[0]).startswith(b"\x7fELF")


def test_threads_that_compile_the_same_variant_leave_one_whole_file(cache: Path) -> None:
    variant = _gemv_variants()[0]
    cubins: list[bytes] = []
    threads = [threading.Thread(target=lambda: cubins.append(compile_cubin(variant))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = cache.iterdir()
    assert cubins == [path.read_bytes()[32:]] * 4


def test_a_refused_source_raises_with_the_compilers_log(cache: Path) -> None:
    broken = Variant(source="gemv.cu", defines=(("FLOAT16", 0),))
    with pytest.raises(CompileError, match=r"gemv\.cu.*WARPS"):
        compile_cubin(broken)
    assert not cache.exists()


def _prefill_variants() -> list[Variant]:
    variants = []
    for dtype in (torch.bfloat16, torch.float16):
        for group, head_dim, block_size in ((4, 128, 64), (1, 128, 16), (8, 64, 256)):
            launch = plan_launch_prefill(spec(group, 1, head_dim), block_size, dtype)
            assert launch.shared_bytes <= MAX_SHARED_BYTES
            variants.append(launch.variant)
    return variants


def test_every_gated_linear_variant_of_known_models_compiles_without_spills(cache: Path, tmp_path: Path) -> None:
    variants = [
        tiling.variant(dtype)
        for n, dtype in ((14336, torch.bfloat16), (3072, torch.float16))
        for tiling in tilings(n, multiprocessors=132)
    ]
    assert len(variants) == 6
    for variant, cubin, registers in _without_spills(variants, tmp_path):
        # What the warp groups take and give back afterwards is counted from this.
        wanted = {1: range(256), 2: range(168, 169), 3: range(128, 129)}
        assert registers in wanted[dict(variant.defines)["GROUPS"]], variant
        # The compiler waits after every product if it finds their registers used in between.
        assert _dump(cubin, tmp_path, "-sass").count("WARPGROUP.DEPBAR") == 2, variant


def test_kernels_of_a_weight_that_were_only_compiled_are_asked_for_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        monkeypatch.setenv("PYVLLM_CACHE_ROOT", str(cache / name))
        with compile_ahead():
            prepare(14336, torch.bfloat16, multiprocessors=132, device_index=0)
        count = len(list((cache / name / "cubins").iterdir()))
        assert count == len(tilings(14336, multiprocessors=132)), name


def test_every_prefill_variant_compiles_without_spills(cache: Path, tmp_path: Path) -> None:
    for variant, cubin, registers in _without_spills(_prefill_variants(), tmp_path):
        # What the warp groups take and give back afterwards is counted from this.
        assert registers == 168, variant
        # The compiler waits after every product if it finds their registers used in between, and may move the softmax
        # of a tile behind the wait for the product beside which it should run: that of the loop's two waits.
        code = _dump(cubin, tmp_path, "-sass")
        _, _, between_waits, _, _ = code.split("WARPGROUP.DEPBAR")
        assert between_waits.count("MUFU.EX2") >= 64, variant


# Of LLaMA 3 8B, Qwen 2.5 7B and Qwen 3 0.6B: N, K, and rows of x with which one or the other was faster on an H200.
@pytest.mark.parametrize(
    ("n", "k", "ours", "cublas"),
    [
        (14336, 4096, (24, 96, 128, 160, 192, 232, 256, 352, 448, 520, 640, 1000, 8192), (200, 208, 216, 264, 392)),
        (18944, 3584, (64, 256, 1000, 4096), (200,)),
        (3072, 1024, (17, 64, 128, 200, 256, 512, 1000, 2048, 8192), ()),
    ],
)  # fmt: skip
def test_gated_linear_is_chosen_where_it_was_faster(n: int, k: int, ours: Sequence[int], cublas: Sequence[int]) -> None:
    assert [m for m in (*ours, *cublas) if pays(m, n, k, multiprocessors=132)] == list(ours)


def test_what_prefill_attention_leaves_to_triton() -> None:
    kv_layer = torch.empty(4, 2, 1, 64, 128, dtype=torch.bfloat16)
    assert supports_prefill(spec(4, 1, 128), kv_layer)
    for name, changes in features(4, 3.0).items():
        assert supports_prefill(replace(spec(4, 1, 128), **changes), kv_layer) == (name == "scale"), name
    assert not supports_prefill(spec(3, 1, 128), kv_layer)
    assert not supports_prefill(spec(4, 1, 128), kv_layer.float())
    assert not supports_prefill(spec(4, 1, 128), kv_layer[:, :, :, :60].contiguous())
    assert not supports_prefill(spec(4, 1, 256), torch.empty(4, 2, 1, 64, 256, dtype=torch.bfloat16))
