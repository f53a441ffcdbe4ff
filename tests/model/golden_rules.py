"""How a result is judged against a golden value: the rules of golden/README.md, "How to compare".

Every check prints what it measured, so that a failing test shows by how much and a passing one can be read with -s.
"""

import json

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def bf16_ulp(want: np.ndarray) -> np.ndarray:
    """One bf16 ulp at the larger of the element and the rms of its row (last axis)."""
    rms = np.sqrt(np.mean(np.square(want), -1, keepdims=True))
    size = np.maximum(np.maximum(np.abs(want), rms), 2.0**-126)
    return 2.0 ** (np.floor(np.log2(size)) - 7)


def check_equal_share(name: str, got, want, share: float = 0.97, all_within_ulp: float | None = None) -> None:
    """At least `share` of the elements are the same bf16 number; all within so many ulp where that is given."""
    assert np.asarray(got).dtype == np.asarray(want).dtype == BF16, (name, np.asarray(got).dtype)
    assert np.shape(got) == np.shape(want), (name, np.shape(got), np.shape(want))
    a, b = _wide(got), _wide(want)
    found, most = float(np.mean(a == b)), float(np.max(np.abs(a - b) / bf16_ulp(b)))
    print(f"{name}: {found:.4%} equal, largest difference {most:.2f} ulp")
    assert found >= share, (name, found, share)
    assert all_within_ulp is None or most <= all_within_ulp, (name, most, all_within_ulp)


def check_close_share(name: str, got, want, share: float = 0.98, ulp: float = 1, all_within_ulp: float = 4) -> None:
    """The attention rule: `share` of the elements within `ulp`, all within `all_within_ulp`."""
    assert np.shape(got) == np.shape(want), (name, np.shape(got), np.shape(want))
    a, b = _wide(got), _wide(want)
    difference = np.abs(a - b) / bf16_ulp(b)
    found, most = float(np.mean(difference <= ulp)), float(np.max(difference))
    print(f"{name}: {found:.4%} within {ulp} ulp, largest difference {most:.2f} ulp")
    assert found >= share and most <= all_within_ulp, (name, found, most)


def check_relative(name: str, got, want, bound: float) -> None:
    """Every element within `bound`, relative to the element."""
    a, b = _wide(got), _wide(want)
    found = float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-30)))
    print(f"{name}: largest relative difference {found:.2e}")
    assert found <= bound, (name, found, bound)


def check_within(name: str, got, want, bound: float) -> None:
    """Every element within `bound`, absolute."""
    found = float(np.max(np.abs(_wide(got) - _wide(want))))
    print(f"{name}: largest difference {found:.2e}")
    assert found <= bound, (name, found, bound)


def check_same(name: str, got, want) -> None:
    """Integers and codes: all equal."""
    a, b = np.asarray(got), np.asarray(want)
    assert a.shape == b.shape, (name, a.shape, b.shape)
    unequal = np.argwhere(a != b)
    print(f"{name}: {len(unequal)} of {a.size} differ")
    assert not len(unequal), (name, len(unequal), unequal[:5].tolist())


class ReleaseRules:
    """Tolerances that the release goldens carry themselves."""

    def __init__(self, metadata: dict[str, str], goldens: dict[str, np.ndarray]):
        self.tolerances = json.loads(metadata["tolerances"])
        self.cases = json.loads(metadata["cases"])
        self.goldens = goldens

    def check(self, name: str, got, variant: str | None = None) -> None:
        """Judge `got` against the golden tensor; `variant`: "stage" or "end_to_end", other bounds."""
        rule, want = self.tolerances[name], self.goldens[name]
        if variant is not None:
            rule = rule[variant]
        if rule.get("kind") == "exact":
            check_same(name, got, want)
        elif rule.get("kind") == "abs":
            check_within(name, got, want, rule["tol"])
        else:
            self._check_rows(name, got, want, rule)

    @staticmethod
    def _check_rows(name: str, got, want, rule: dict) -> None:
        assert np.shape(got) == np.shape(want), (name, np.shape(got), np.shape(want))
        a, b = _wide(got), _wide(want)
        size = np.maximum(np.linalg.norm(b, axis=-1), 1e-300)
        error = float(np.max(np.linalg.norm(a - b, axis=-1) / size))
        unequal = int(np.sum(a != b))
        print(f"{name}: row error {error:.2e} of {rule['tol']:.0e}, {unequal} of {a.size} unequal")
        assert error <= rule["tol"], (name, error, rule["tol"])
        assert unequal <= rule.get("unequal_elements", a.size), (name, unequal, rule)
