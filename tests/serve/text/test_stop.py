import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.serve.text.stop import StopMatcher

SMALL = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Quadratic definition: the first end of a match, the longest stop there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_equal_to_the_definition_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    out = "".join(matcher.feed(text[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    out += matcher.flush()
    assert (out, matcher.matched) == oracle(text, stops)


@given(text=SMALL, stops=STOPS)
def test_only_what_may_still_match_is_held(text: str, stops: list[str]) -> None:
    matcher, given_out = StopMatcher(stops), ""
    for end, char in enumerate(text, 1):
        given_out += matcher.feed(char)
        if matcher.matched is not None:
            return
        held = text[len(given_out) : end]
        assert text[:end] == given_out + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_only_a_complete_match_cuts() -> None:
    text = "one\ntwo\n\nEND"
    matcher = StopMatcher(["END\nXX", "\n<eot>"])
    assert "".join(map(matcher.feed, text)) + matcher.flush() == text
    assert matcher.matched is None


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        StopMatcher(["a", ""])
