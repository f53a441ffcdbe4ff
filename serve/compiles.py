"""Counting compilations: after warm-up there should be none."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

log = logging.getLogger("rorqual.compiles")
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """A number of compiled programs: those of the threads that are inside `counting(counter)`."""

    def __init__(self) -> None:
        self.num_compiles = 0


class _OfThread(threading.local):
    counter: CompileCounter | None = None


_of_thread = _OfThread()


@contextmanager
def counting(counter: CompileCounter | None) -> Iterator[None]:
    """Count what this thread compiles in here; None: compilations that are planned, which nobody counts.

    By thread, because a process may hold several engines, and around them a notebook that compiles what it likes.
    """
    _listen()
    before, _of_thread.counter = _of_thread.counter, counter
    try:
        yield
    finally:
        _of_thread.counter = before


@cache
def _listen() -> None:
    """One listener for the whole process: it cannot be taken back."""

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and _of_thread.counter is not None:
            _of_thread.counter.num_compiles += 1

    jax.monitoring.register_event_duration_secs_listener(heard)


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
