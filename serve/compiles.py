"""Counting compilations: after warm-up there should be none."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

log = logging.getLogger("rorqual.compiles")
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every program this process compiles, whoever asks for it."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self._expected = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_s: float, **_: object) -> None:
        if event == COMPILE_EVENT and not self._expected:
            self.num_compiles += 1

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations in here are planned (warm-up, a variant used for the first time) and not counted."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1


@cache
def compile_counter() -> CompileCounter:
    """The counter of this process: the listener behind it cannot be taken back."""
    return CompileCounter()


def use_compile_cache(folder: Path) -> None:
    """Keep compiled programs in a folder from now on. A folder that cannot be written is a warning, not an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
    except OSError as error:
        log.warning("compile cache %s cannot be used: %s", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
