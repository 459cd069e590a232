"""pyvllm: serve large language models, with a Rust core.

Names are imported when they are first used, so that `import pyvllm` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyvllm._core import __version__
    from pyvllm.async_llm import (
        AsyncEngineArgs,
        AsyncLLM,
        AsyncLLMEngine,
        EngineDeadError,
        EngineGenerateError,
        QueueFullError,
    )
    from pyvllm.config import EngineArgs
    from pyvllm.inputs import TextPrompt, TokensPrompt
    from pyvllm.llm import LLM
    from pyvllm.llm_engine import LLMEngine
    from pyvllm.models import ModelRegistry
    from pyvllm.outputs import CompletionOutput, RequestOutput
    from pyvllm.sampling_params import (
        BeamSearchParams,
        GuidedDecodingParams,
        ParameterError,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineGenerateError",
    "GuidedDecodingParams",
    "LLMEngine",
    "ModelRegistry",
    "ParameterError",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "__version__": "_core",
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "EngineDeadError": "async_llm",
    "EngineGenerateError": "async_llm",
    "QueueFullError": "async_llm",
    "EngineArgs": "config",
    "AsyncEngineArgs": "async_llm",
    "ModelRegistry": "models",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "GuidedDecodingParams": "sampling_params",
    "BeamSearchParams": "sampling_params",
    "ParameterError": "sampling_params",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pyvllm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
