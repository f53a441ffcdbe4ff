"""Options of an engine: one small frozen value, checked once."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rorqual.serve.buckets import ROUNDING
from rorqual.serve.limits import Limits

StorageChoice = Literal["auto", "packed", "bfloat16", "float32"]
STORAGES = ("auto", "packed", "bfloat16", "float32")


class OptionError(ValueError):
    """An option outside its range, or options that contradict each other. Names both numbers."""


@dataclass(frozen=True)
class EngineOptions:
    """What a user chooses about an engine. None means: derived from the checkpoint and the machine."""

    context: int | None = None  # tokens of one request, prompt and answer; None: the config's, up to DEFAULT_CONTEXT
    max_rows: int = 32  # requests that run at the same time
    step_tokens: int = 256  # tokens of one step; bounds the time between two tokens while others prefill
    memory_gb: float | None = None  # budget for weights, pages and temporaries (10^9 bytes); None: memory_share
    memory_share: float = 0.6  # of the device's memory, where memory_gb is not given
    weights: StorageChoice = "auto"  # how weights are kept: as released, or dequantised (exact)
    row_tile: int = 0  # rows of a token tile; 0: as many as the step has. 16: results do not depend on the batch
    compile_cache: str | Path | None = None  # folder that keeps compiled programs between starts
    warm_up: bool = True  # compile every step program before the engine is ready
    strict_compiles: bool = False  # a compilation after warm-up is an error
    stall_timeout_s: float = 120.0  # a step loop silent for longer counts as dead
    progress: bool = True  # progress bars

    def __post_init__(self) -> None:
        _at_least("context", self.context, 2)
        _at_least("max_rows", self.max_rows, 1)
        _at_least("step_tokens", self.step_tokens, self.max_rows, "max_rows")
        if self.row_tile not in (0, ROUNDING):  # a tile divides every step size
            raise OptionError(f"row_tile: {self.row_tile}, allowed 0 or {ROUNDING}")
        if self.weights not in STORAGES:
            raise OptionError(f"weights: {self.weights!r}, allowed {', '.join(STORAGES)}")
        _above_zero("memory_share", self.memory_share, most=1)
        _above_zero("memory_gb", self.memory_gb)
        _above_zero("stall_timeout_s", self.stall_timeout_s)
        for name in ("warm_up", "strict_compiles", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}: {getattr(self, name)!r}, allowed true or false")
        if not isinstance(self.compile_cache, str | Path | None):
            raise OptionError(f"compile_cache: {self.compile_cache!r}, allowed the path of a folder")


def _at_least(name: str, value: Any, least: int, why: str = "") -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        bound = f"{why} = {least}" if why else str(least)
        raise OptionError(f"{name}: {value!r}, allowed an integer of at least {bound}")


def _above_zero(name: str, value: Any, most: float = math.inf) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most and value < math.inf
    if value is not None and not fits:
        bound = "" if most == math.inf else f" up to {most}"
        raise OptionError(f"{name}: {value!r}, allowed a number above 0{bound}")


DEFAULT_CONTEXT = 32768


def resolve_context(options: EngineOptions, most: int) -> int:
    """Tokens of the promised context; OptionError beyond what the checkpoint's config allows."""
    if options.context is None:
        return min(most, DEFAULT_CONTEXT)
    if options.context > most:
        raise OptionError(f"context: {options.context}, allowed 2..{most} (max_position_embeddings of the checkpoint)")
    return options.context


def engine_limits(
    options: EngineOptions, *, vocab_size: int, context: int, page_size: int, image_token_id: int
) -> Limits:
    """What the engine will accept."""
    return Limits(
        vocab_size=vocab_size,
        max_context=context,
        max_rows=options.max_rows,
        max_step_tokens=options.step_tokens,
        page_size=page_size,
        image_token_id=image_token_id,
    )
