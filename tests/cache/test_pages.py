"""Laws of the page pool: one owner a page, promises kept, nothing lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.cache.pages import PageError, PagePool


def test_a_promise_is_kept_back_from_others():
    pool = PagePool(5)
    pool.reserve("a", 3)
    pool.reserve("b", 1)
    assert (pool.num_free, pool.num_unpromised) == (5, 1)
    assert (pool.available("a"), pool.available("b")) == (4, 2)
    assert len(pool.allocate("b", 2)) == 2
    assert pool.available("b") == 0
    with pytest.raises(PageError, match="asked for 1 pages, allowed 0..0"):
        pool.allocate("b")
    assert len(pool.allocate("a", 3)) == 3
    pool.check()


def test_a_released_page_counts_towards_the_promise_again():
    pool = PagePool(3)
    pool.reserve("a", 2)
    pool.reserve("b", 0)
    pages = pool.allocate("a", 2)
    pool.release("a", pages[:1])
    assert pool.available("b") == 1  # one of the two free pages is still a's
    pool.allocate("b")
    assert pool.available("a") == 1
    pool.check()


def test_closing_gives_back_pages_and_promise():
    pool = PagePool(4)
    pool.reserve("a", 3)
    pool.allocate("a", 1)
    pool.close("a")
    assert pool.num_unpromised == pool.num_free == 4
    assert pool.owners() == frozenset() and pool.held("a") == frozenset()
    pool.check()


@pytest.mark.parametrize("pages", [[9], [0, 0], [1]])
def test_giving_back_what_one_does_not_hold_is_refused_and_changes_nothing(pages):
    pool = PagePool(4)
    pool.reserve("a", 2)
    pool.reserve("b", 2)
    assert pool.allocate("a") == [0] and pool.allocate("b") == [1]
    with pytest.raises(PageError):
        pool.release("a", pages)
    assert pool.held("a") == {0}
    pool.check()


def test_an_account_is_opened_once_and_needed():
    pool = PagePool(4)
    pool.reserve("a", 4)
    with pytest.raises(PageError, match="already"):
        pool.reserve("a", 0)
    with pytest.raises(PageError, match="1 pages asked for, allowed 0..0"):
        pool.reserve("b", 1)
    for call in (pool.allocate, pool.close, pool.available):
        with pytest.raises(PageError, match="no account"):
            call("b")
    with pytest.raises(ValueError, match="num_pages: 0"):
        PagePool(0)


@settings(max_examples=60, deadline=None)
@given(num_pages=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_any_history_keeps_the_books(num_pages, seed):
    draw = random.Random(seed)
    pool, held, promised = PagePool(num_pages), {}, {}
    for step in range(60):
        action = draw.choice(["reserve", "allocate", "release", "close"])
        owner = draw.choice(list(held)) if held else None
        if action == "reserve" or owner is None:
            promised[step], held[step] = draw.randint(0, pool.num_unpromised), set()
            pool.reserve(step, promised[step])
        elif action == "allocate":
            pages = pool.allocate(owner, draw.randint(0, pool.available(owner)))
            assert all(not set(pages) & other for other in held.values())
            held[owner] |= set(pages)
        elif action == "release":
            pages = draw.sample(sorted(held[owner]), draw.randint(0, len(held[owner])))
            pool.release(owner, pages)
            held[owner] -= set(pages)
        else:
            pool.close(owner)
            del held[owner], promised[owner]
        pool.check()
        assert pool.num_free == num_pages - sum(map(len, held.values()))
        for name, pages in held.items():  # whoever comes first, the promise holds
            assert pool.held(name) == pages
            assert pool.available(name) >= promised[name] - len(pages)
    for owner in list(held):
        pool.close(owner)
    assert pool.num_unpromised == num_pages
