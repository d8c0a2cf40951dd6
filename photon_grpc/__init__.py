"""photon_grpc: a gRPC-native LLM inference service.

Importing the package loads neither grpc nor torch. `LLM` is resolved on first use, because front ends and clients
import this package in processes that must never load torch.
"""

from __future__ import annotations

# Type checkers treat this name as true; importing `typing` would be most of the cost of importing this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from photon_grpc.compose.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from importlib import import_module

        try:
            return import_module("photon_grpc.compose.llm").LLM
        except ModuleNotFoundError as error:
            raise ImportError(
                f"LLM needs {error.name}: pip install '.[serve]' in the clone", name=error.name
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
