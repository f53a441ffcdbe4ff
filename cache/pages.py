"""Host bookkeeping of page ids, in one space at a time: global pages and window pages have a pool each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


class PageError(RuntimeError):
    """A page was asked for, or given back, against the rules: a fault of the caller, never of a request."""


@dataclass
class _Account:
    promised: int  # pages the owner can count on, those it holds included
    held: set[int] = field(default_factory=set)

    @property
    def outstanding(self) -> int:
        return max(0, self.promised - len(self.held))


class PagePool:
    """Who owns a page: each id in 0..num_pages-1 is free or held by exactly one owner with an open account.

    An owner opens its account with `reserve` and names in it how many pages it can count on; those it has not
    taken yet stay free but are kept back from everybody else. It may hold more than that while pages are free
    that nobody was promised. A released page counts towards the owner's promise again: who was promised two
    pages can always come to hold two.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages}, allowed at least 1")
        self.num_pages = num_pages
        # The page released last is taken first: few pages are ever touched when few are in use.
        self._free = list(range(num_pages - 1, -1, -1))
        self._accounts: dict[Hashable, _Account] = {}
        self._outstanding = 0  # free pages that are promised to someone

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_unpromised(self) -> int:
        """Free pages that are promised to nobody: what a new owner can reserve."""
        return len(self._free) - self._outstanding

    def available(self, owner: Hashable) -> int:
        """Pages `owner` can allocate now."""
        return self.num_unpromised + self._account(owner).outstanding

    def reserve(self, owner: Hashable, num_promised: int) -> None:
        """Opens the account of a new owner. PageError when the pages cannot be promised, or it has one."""
        if owner in self._accounts:
            raise PageError(f"owner {owner!r} has an account already")
        if not 0 <= num_promised <= self.num_unpromised:
            raise PageError(f"{num_promised} pages asked for, allowed 0..{self.num_unpromised}")
        self._accounts[owner] = _Account(num_promised)
        self._outstanding += num_promised

    def allocate(self, owner: Hashable, num_pages: int = 1) -> list[int]:
        """Takes pages out of the free ones; PageError when `available` is less."""
        if not 0 <= num_pages <= self.available(owner):
            raise PageError(f"owner {owner!r} asked for {num_pages} pages, allowed 0..{self.available(owner)}")
        account = self._account(owner)
        self._outstanding -= account.outstanding
        pages = [self._free.pop() for _ in range(num_pages)]
        account.held.update(pages)
        self._outstanding += account.outstanding
        return pages

    def release(self, owner: Hashable, pages: Iterable[int]) -> None:
        """Gives back pages that `owner` holds; PageError, and no change, when it does not hold one of them."""
        account = self._account(owner)
        given = list(pages)
        if len(set(given)) != len(given) or not account.held.issuperset(given):
            raise PageError(f"owner {owner!r} gives back pages {given}, allowed {sorted(account.held)}, each once")
        self._outstanding -= account.outstanding
        account.held.difference_update(given)
        self._free.extend(given)
        self._outstanding += account.outstanding

    def close(self, owner: Hashable) -> None:
        """Gives back everything `owner` holds or was promised, and ends its account."""
        account = self._account(owner)
        self._outstanding -= account.outstanding
        self._free.extend(sorted(account.held, reverse=True))
        del self._accounts[owner]

    def held(self, owner: Hashable) -> frozenset[int]:
        """Pages that `owner` holds; none when it has no account."""
        return frozenset(self._accounts[owner].held) if owner in self._accounts else frozenset()

    def owners(self) -> frozenset[Hashable]:
        """Everybody with an open account."""
        return frozenset(self._accounts)

    def check(self) -> None:
        """Every page is free or held by one owner, and every promise can be kept; AssertionError otherwise."""
        places = [page for account in self._accounts.values() for page in account.held] + self._free
        if sorted(places) != list(range(self.num_pages)):
            raise AssertionError(f"{len(places)} page places for {self.num_pages} pages, or a page twice")
        outstanding = sum(account.outstanding for account in self._accounts.values())
        if outstanding != self._outstanding:
            raise AssertionError(f"{self._outstanding} promised pages counted, {outstanding} found")
        if outstanding > len(self._free):
            raise AssertionError(f"{outstanding} pages promised, {len(self._free)} free")

    def _account(self, owner: Hashable) -> _Account:
        if owner not in self._accounts:
            raise PageError(f"owner {owner!r} has no account")
        return self._accounts[owner]
