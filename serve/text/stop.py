"""Stop strings: found across token borders, holding back only text that may still become a match."""

from collections.abc import Sequence


class StopMatcher:
    """Searches a growing text for the stop string that is complete first (the longest of those ending together).

    Each stop string runs its own Knuth-Morris-Pratt automaton, so a character costs constant amortised work a string
    and the result does not depend on how the text is cut into pieces.

    Args:
        stops: stop strings, none of them empty.
    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: an empty string, allowed strings of 1 character and more")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain to stay in the answer. After a match (`matched` is set) nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for index, char in enumerate(text):
            found = self._advance(char)
            if found is not None:
                self.matched = found
                self._held += text[: index + 1]
                kept = self._held[: len(self._held) - len(found)]
                self._held = ""
                return kept
        self._held += text
        certain = len(self._held) - max(self._states)
        kept, self._held = self._held[:certain], self._held[certain:]
        return kept

    def flush(self) -> str:
        """Give out held text: the answer has ended, so no match can be completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; the longest stop string completed by it."""
        found: str | None = None
        for number, stop in enumerate(self._stops):
            state, borders = self._states[number], self._borders[number]
            while state and stop[state] != char:
                state = borders[state]
            state = state + 1 if stop[state] == char else 0
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = borders[state]
            self._states[number] = state
        return found


def _borders(pattern: str) -> list[int]:
    """For each prefix length, the length of its longest proper border (the automaton's fall-back)."""
    borders = [0] * (len(pattern) + 1)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index + 1] = length
    return borders
