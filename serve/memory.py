"""How the memory budget is spent: weights, the largest program's temporaries, seats, and pages with the rest."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax

from rorqual.cache.layout import CacheLayout
from rorqual.serve.options import EngineOptions, OptionError
from rorqual.serve.running import ROW_WINDOW_PAGES

GB = 10**9


def device_memory_bytes(device: jax.Device) -> int:
    """Memory of a device; of the machine where the device is its CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def budget_bytes(options: EngineOptions, device: jax.Device) -> int:
    """Bytes that the engine may use on a device."""
    if options.memory_gb is not None:
        return int(options.memory_gb * GB)
    return int(options.memory_share * device_memory_bytes(device))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes and pages of one rank; `other_bytes`: seats and penalty counts."""

    budget_bytes: int
    weights_bytes: dict[str, int]
    temp_bytes: int
    other_bytes: int
    num_global_pages: int
    num_window_pages: int
    layout: CacheLayout
    context: int

    @property
    def pages_per_context(self) -> int:
        return -(-self.context // self.layout.page_size)

    @property
    def global_bytes(self) -> int:
        return self.num_global_pages * self.layout.global_page_bytes

    @property
    def window_bytes(self) -> int:
        return self.num_window_pages * self.layout.window_page_bytes

    @property
    def total_bytes(self) -> int:
        return (
            sum(self.weights_bytes.values())
            + self.temp_bytes
            + self.other_bytes
            + self.global_bytes
            + self.window_bytes
        )

    def table(self) -> str:
        """The plan as lines of text."""
        rows = [(f"weights, {kind}", size) for kind, size in self.weights_bytes.items()]
        rows += [
            ("temporaries of the largest step", self.temp_bytes),
            ("seats and token counts", self.other_bytes),
            (f"{self.num_window_pages} window pages", self.window_bytes),
            (f"{self.num_global_pages} global pages", self.global_bytes),
            ("total", self.total_bytes),
            ("budget", self.budget_bytes),
        ]
        lines = [f"  {name:<34}{size / GB:>9.3f} GB" for name, size in rows]
        fit = self.num_global_pages // self.pages_per_context
        lines.append(f"  context {self.context} tokens: {fit} requests of that length fit at a time")
        return "\n".join(lines)


def window_pages(max_rows: int, largest_step: int, page_size: int) -> int:
    """Window pages for every row's window and the pages that the chunks of one step fill."""
    return max_rows * ROW_WINDOW_PAGES + largest_step // page_size + 2


def plan_memory(
    *,
    budget: int,
    weights_bytes: dict[str, int],
    layout: CacheLayout,
    context: int,
    max_rows: int,
    largest_step: int,
    other_bytes: int,
    temp_bytes_of: Callable[[int, int], int],
) -> MemoryPlan:
    """Sizes of the pools. `temp_bytes_of(global pages, window pages)` compiles the largest program and reads its
    temporaries; it is asked again only when the wish does not fit.

    Raises OptionError with the numbers when one request of the promised context does not fit.
    """
    windows = window_pages(max_rows, largest_step, layout.page_size)
    per_context = -(-context // layout.page_size)
    wish = max_rows * per_context

    def plan(pages: int, temps: int) -> MemoryPlan:
        return MemoryPlan(budget, weights_bytes, temps, other_bytes, pages, windows, layout, context)

    fixed = plan(0, 0)
    if fixed.total_bytes + per_context * layout.global_page_bytes > budget:
        raise _too_small(fixed, per_context)
    temps = temp_bytes_of(wish, windows)
    if plan(wish, temps).total_bytes <= budget:
        return plan(wish, temps)
    pages = (budget - plan(0, temps).total_bytes) // layout.global_page_bytes
    if pages < per_context:
        raise _too_small(plan(0, temps), per_context)
    temp_bytes_of(pages, windows)
    return plan(pages, temps)


def _too_small(plan: MemoryPlan, pages: int) -> OptionError:
    needed = plan.total_bytes + pages * plan.layout.global_page_bytes
    return OptionError(
        f"memory: {plan.budget_bytes / GB:.3f} GB, needed at least {needed / GB:.3f} GB for one request of "
        f"{plan.context} tokens ({pages} global pages of {plan.layout.global_page_bytes} bytes beside weights, "
        f"temporaries and window pages); allow more memory or a shorter context"
    )
