"""The memory plan: what fits is a law of the budget, what does not is refused with the numbers."""

import re
from collections.abc import Callable

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.cache.layout import CacheLayout, SourceGroup
from rorqual.serve.memory import GB, MemoryPlan, budget_bytes, device_memory_bytes, plan_memory, window_pages
from rorqual.serve.options import EngineOptions, OptionError
from rorqual.serve.running import ROW_WINDOW_PAGES

LAYOUT = CacheLayout(16, 8, 64, 32, (SourceGroup(2, (2, 4), 8), SourceGroup(1, (5,), 16)))
WEIGHTS = {"experts": 3_000_000, "other": 1_000_000}


class Compiles:
    """Stands for the compiler: a fixed number of temporary bytes; remembers what it was asked for."""

    def __init__(self, temp_bytes: int) -> None:
        self.temp_bytes = temp_bytes
        self.asked: list[tuple[int, int]] = []

    def __call__(self, num_global_pages: int, num_window_pages: int) -> int:
        self.asked.append((num_global_pages, num_window_pages))
        return self.temp_bytes


def plan(budget: int, temps: Callable[[int, int], int], **changes: int) -> MemoryPlan:
    sizes = {"context": 512, "max_rows": 8, "largest_step": 64, "other_bytes": 50_000} | changes
    return plan_memory(budget=budget, weights_bytes=WEIGHTS, layout=LAYOUT, temp_bytes_of=temps, **sizes)


@pytest.mark.parametrize(
    ("rows", "step", "page", "pages"), [(1, 16, 16, 2 + 1 + 2), (8, 64, 16, 16 + 4 + 2), (64, 256, 128, 128 + 2 + 2)]
)
def test_window_pages_hold_every_window_and_one_step(rows: int, step: int, page: int, pages: int):
    assert window_pages(rows, step, page) == pages


@given(rows=st.integers(1, 300), step=st.integers(1, 5000), half_page=st.integers(1, 128))
def test_window_pages_never_starve_a_step(rows: int, step: int, half_page: int):
    """Rows that decode keep their windows while one chunk of all the step's tokens fills its pages."""
    page = 2 * half_page
    assert window_pages(rows, step, page) - (rows - 1) * ROW_WINDOW_PAGES >= -(-step // page) + 1


def test_the_wish_is_every_row_at_full_context():
    compiles = Compiles(2_000_000)
    found = plan(GB, compiles)
    assert (found.num_global_pages, found.num_window_pages) == (8 * 32, 8 * 2 + 4 + 2)
    assert compiles.asked == [(8 * 32, 22)]
    assert found.temp_bytes == 2_000_000
    assert found.pages_per_context == 32


def test_the_total_is_the_sum_of_its_parts():
    found = plan(GB, Compiles(2_000_000))
    pages = 256 * LAYOUT.global_page_bytes + 22 * LAYOUT.window_page_bytes
    assert found.total_bytes == 3_000_000 + 1_000_000 + 2_000_000 + 50_000 + pages


def test_a_short_budget_gives_fewer_pages_and_one_more_compilation():
    most = plan(GB, Compiles(0)).total_bytes
    compiles = Compiles(0)
    found = plan(most - 10 * LAYOUT.global_page_bytes, compiles)
    assert found.num_global_pages == 256 - 10
    assert compiles.asked == [(256, 22), (246, 22)]


@given(
    budget=st.integers(4_000_000, 12_000_000),
    temps=st.integers(0, 3_000_000),
    rows=st.integers(1, 16),
    context=st.integers(2, 2000),
    other=st.integers(0, 100_000),
)
def test_a_plan_keeps_the_budget_and_the_promise(budget: int, temps: int, rows: int, context: int, other: int):
    """What is granted fits; one more page would not, unless nobody could use it. What is refused did not fit."""
    compiles = Compiles(temps)
    largest = max(64, rows)
    sizes = {"context": context, "max_rows": rows, "largest_step": largest, "other_bytes": other}
    per_context = -(-context // 16)
    windows = window_pages(rows, largest, 16)
    fixed = sum(WEIGHTS.values()) + other + windows * LAYOUT.window_page_bytes
    try:
        found = plan(budget, compiles, **sizes)
    except OptionError:
        assert fixed + temps + per_context * LAYOUT.global_page_bytes > budget
        return
    assert found.total_bytes <= budget
    assert per_context <= found.num_global_pages <= rows * per_context
    if found.num_global_pages < rows * per_context:
        assert found.total_bytes + LAYOUT.global_page_bytes > budget
    assert compiles.asked[-1] == (found.num_global_pages, found.num_window_pages)
    assert len(compiles.asked) == 1 + (found.num_global_pages < rows * per_context)


def test_a_hopeless_budget_is_refused_before_anything_is_compiled():
    compiles = Compiles(0)
    with pytest.raises(OptionError) as error:
        plan(4_100_000, compiles)
    assert compiles.asked == []
    needed = 4_050_000 + 22 * LAYOUT.window_page_bytes + 32 * LAYOUT.global_page_bytes
    assert f"memory: 0.004 GB, needed at least {needed / GB:.3f} GB for one request of 512 tokens" in str(error.value)
    assert f"32 global pages of {LAYOUT.global_page_bytes} bytes" in str(error.value)


def test_temporaries_that_leave_no_room_for_one_request_are_refused_with_the_numbers():
    fits_without_temps = 4_050_000 + 22 * LAYOUT.window_page_bytes + 40 * LAYOUT.global_page_bytes
    with pytest.raises(OptionError) as error:
        plan(fits_without_temps, Compiles(500_000_000))
    [found, needed] = re.findall(r"([\d.]+) GB", str(error.value))
    assert float(found) == pytest.approx(fits_without_temps / GB, abs=0.001)
    assert float(needed) > 0.5


def test_the_table_names_every_part():
    found = plan(GB, Compiles(7_000_000))
    table = found.table()
    lines = {line[:36].strip(): line[36:].strip() for line in table.splitlines()[:-1]}
    assert lines == {
        "weights, experts": "0.003 GB",
        "weights, other": "0.001 GB",
        "temporaries of the largest step": "0.007 GB",
        "seats and token counts": "0.000 GB",
        "22 window pages": f"{found.window_bytes / GB:.3f} GB",
        "256 global pages": f"{found.global_bytes / GB:.3f} GB",
        "total": f"{found.total_bytes / GB:.3f} GB",
        "budget": "1.000 GB",
    }
    assert table.splitlines()[-1].strip() == "context 512 tokens: 8 requests of that length fit at a time"


def test_the_table_counts_whole_contexts():
    most = plan(GB, Compiles(0)).total_bytes
    found = plan(most - LAYOUT.global_page_bytes, Compiles(0))
    assert "7 requests of that length" in found.table()


def test_the_budget_is_what_was_asked_for_or_a_share_of_the_device():
    device = jax.devices("cpu")[0]
    assert budget_bytes(EngineOptions(memory_gb=1.5), device) == 1_500_000_000
    memory = device_memory_bytes(device)
    assert memory > 10**8
    assert budget_bytes(EngineOptions(memory_share=0.25), device) == memory // 4
