from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rorqual.serve.llm import LLM
    from rorqual.serve.request import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # On demand, so that host code below this package is imported without jax.
    if name == "LLM":
        from rorqual.serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from rorqual.serve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
