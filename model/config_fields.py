"""Strict reading of config.json: every field is typed, bounded and named in its error; the rest can be listed."""

from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A field of config.json is missing, has the wrong type or contradicts another one. Names the field."""


def require(condition: bool, field: str, found: object, expected: str) -> None:
    """Raises ConfigError "<field>: found <found>, expected <expected>" unless the condition holds."""
    if not condition:
        raise ConfigError(f"{field}: found {found!r}, expected {expected}")


class Section:
    """One JSON object of the config. Remembers which fields were read, so that the rest can be listed.

    `path` is the dotted prefix used in errors ("text_config." or "").
    """

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path.rstrip('.') or 'config'}: found {type(values).__name__}, expected an object")
        self._values: Mapping[str, Any] = values
        self._path = path
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as it stands. Raises ConfigError when the field is absent."""
        self._read.add(name)
        if name not in self._values:
            raise ConfigError(f"{self._path}{name}: missing")
        return self._values[name]

    def has(self, name: str) -> bool:
        return name in self._values

    def section(self, name: str) -> "Section":
        return Section(self.raw(name), f"{self._path}{name}.")

    def integer(self, name: str, low: int = 1, high: int | None = None) -> int:
        """An integer in [low, high] (no upper bound when `high` is None)."""
        value = self.raw(name)
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        good = isinstance(value, int) and not isinstance(value, bool)
        good = good and value >= low and (high is None or value <= high)
        require(good, self._path + name, value, f"an integer {bound}")
        return int(value)

    def number(self, name: str, zero_allowed: bool = False) -> float:
        """A finite positive number, or zero where that is allowed."""
        value = self.raw(name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and 0 <= value < float("inf") and (zero_allowed or value > 0)
        require(good, self._path + name, value, "a number >= 0" if zero_allowed else "a number > 0")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        require(isinstance(value, bool), self._path + name, value, "true or false")
        return bool(value)

    def integers(self, name: str, low: int, high: int, rising: bool = False) -> tuple[int, ...]:
        """A list of integers in [low, high]; strictly rising when asked for."""
        value = self.raw(name)
        field = self._path + name
        require(isinstance(value, list), field, value, "a list of integers")
        for item in value:
            good = isinstance(item, int) and not isinstance(item, bool) and low <= item <= high
            require(good, field, item, f"integers in {low}..{high}")
        if rising:
            require(list(value) == sorted(set(value)), field, value, "strictly rising integers")
        return tuple(value)

    def constant(self, name: str, allowed: Any) -> Any:
        """A field this engine supports one value of."""
        value = self.raw(name)
        good = value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        require(good, self._path + name, value, repr(allowed))
        return value

    def unknown(self, ignored: Iterable[str]) -> list[str]:
        """Dotted names of the fields neither read nor listed in `ignored`."""
        return [self._path + name for name in self._values if name not in self._read and name not in set(ignored)]
