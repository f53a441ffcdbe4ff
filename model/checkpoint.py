"""Released-layout checkpoints: safetensors shards checked against the declarations, then read as views of a memory map.

All checks happen on headers and file lengths, before any data is touched: a load that starts has every tensor it needs.
No jax here.
"""

import json
import logging
import math
import mmap
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rorqual.model.declarations import ITEM_BYTES, PARTS, Weight

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Codes stay codes: what an e4m3, E8M0 or packed e2m1 byte means is the business of number_formats.
VIEW_DTYPES: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
_MAX_HEADER_BYTES = 1 << 28
_MAX_LISTED = 5


class CheckpointError(ValueError):
    """The files do not hold what the declarations promise. Names tensor or file, what was expected and what found."""


class _Entry(NamedTuple):
    """One tensor of a shard header; `start` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Checkpoint:
    """The wanted tensors of a checkpoint, as `open_checkpoint` found them. A view keeps its map alive by itself."""

    def __init__(self, weights: dict[str, Weight], maps: dict[str, mmap.mmap], entries: dict[str, tuple[str, int]]):
        self.weights = weights
        self._maps = maps
        self._entries = entries

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted tensors."""
        return sum(weight.nbytes for weight in self.weights.values())

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor in its stored shape.

        F8_E4M3, F8_E8M0 and I8 come as uint8 codes, BF16 as ml_dtypes.bfloat16, F32 as float32.
        Raises CheckpointError for a name that is not among the wanted declarations.
        """
        if name not in self.weights:
            raise CheckpointError(f"{name}: not among the {len(self.weights)} tensors opened")
        weight = self.weights[name]
        shard, start = self._entries[name]
        return np.ndarray(weight.shape, VIEW_DTYPES[weight.dtype], buffer=self._maps[shard], offset=start)


def open_checkpoint(
    model_dir: str | Path, declarations: Mapping[str, Weight], parts: Collection[str] = PARTS
) -> Checkpoint:
    """Checks every declared tensor of the wanted parts and maps the shards that hold them.

    Raises CheckpointError naming the tensors that are missing, misplaced or of another shape or type, and truncated
    files. Tensors no declaration knows are listed in one warning; parts not wanted are not even looked for.
    """
    folder = Path(model_dir)
    wanted = {name: weight for name, weight in declarations.items() if weight.part in parts}
    where = _tensor_files(folder)
    _require_all([f"{name}: missing, expected {_kind(wanted[name])}" for name in wanted if name not in where])
    shards = sorted({where[name] for name in wanted})
    headers = {shard: _read_header(folder / shard) for shard in shards}
    _check_tensors(wanted, where, headers)
    _warn_unknown({*where, *(name for header in headers.values() for name in header)} - set(declarations))
    skipped = sum(name in where for name, weight in declarations.items() if weight.part not in parts)
    if skipped:
        logger.info("%s: %d tensors of parts not in use are skipped", folder, skipped)
    maps = {shard: _map(folder / shard) for shard in shards}
    entries = {name: (where[name], headers[where[name]][name].start) for name in wanted}
    return Checkpoint(wanted, maps, entries)


def _tensor_files(folder: Path) -> dict[str, str]:
    """File name of every tensor, by the index or, without one, by the header of the single file."""
    index = folder / INDEX_NAME
    if not index.exists():
        if not (folder / SINGLE_NAME).exists():
            raise CheckpointError(f"{folder}: found neither {INDEX_NAME} nor {SINGLE_NAME}")
        return dict.fromkeys(_read_header(folder / SINGLE_NAME), SINGLE_NAME)
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map: {error!r}") from None
    if not isinstance(where, dict):
        raise CheckpointError(f"{index}: found weight_map {type(where).__name__}, expected an object")
    for name, file in where.items():
        # The shards lie beside the index; a path would let an index point anywhere on this machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name}: found {file!r}, expected the name of a file in {folder}")
    return where


def _read_header(path: Path) -> dict[str, _Entry]:
    """All tensors of a shard by name. Raises CheckpointError when header and file length disagree."""
    try:
        found_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            if not 2 <= length <= _MAX_HEADER_BYTES or found_bytes < 8 + length:
                raise CheckpointError(f"{path}: found {found_bytes} bytes, expected a header of {length} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    header.pop("__metadata__", None)
    try:
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: malformed header: {error!r}") from None
    expected_bytes = max((entry.start + entry.nbytes for entry in entries.values()), default=8 + length)
    if found_bytes != expected_bytes:
        raise CheckpointError(f"{path}: found {found_bytes} bytes, expected {expected_bytes}")
    return entries


def _entry(value: Mapping[str, Any], data_start: int) -> _Entry:
    start, end = value["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {start}, {end}")
    return _Entry(str(value["dtype"]), tuple(value["shape"]), data_start + start, end - start)


def _check_tensors(
    wanted: Mapping[str, Weight], where: Mapping[str, str], headers: Mapping[str, Mapping[str, _Entry]]
) -> None:
    wrong = []
    for name, weight in wanted.items():
        entry = headers[where[name]].get(name)
        if entry is None:
            found = [shard for shard, header in headers.items() if name in header]
            places = ", ".join(found) or "no shard read"
            wrong.append(f"{name}: expected in {where[name]} by the index, found in {places}")
        elif (entry.dtype, entry.shape) != (weight.dtype, weight.shape):
            wrong.append(f"{name}: expected {_kind(weight)}, found {entry.dtype} {list(entry.shape)}")
        elif entry.nbytes != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            wrong.append(f"{name}: expected {weight.nbytes} bytes, found {entry.nbytes}")
    _require_all(wrong)


def _require_all(wrong: list[str]) -> None:
    if wrong:
        more = len(wrong) - _MAX_LISTED
        raise CheckpointError("; ".join(wrong[:_MAX_LISTED]) + (f"; and {more} more tensors" if more > 0 else ""))


def _kind(weight: Weight) -> str:
    return f"{weight.dtype} {list(weight.shape)}"


def _warn_unknown(names: Iterable[str]) -> None:
    """One warning for all; names that differ in layer, stage or expert numbers alone are one entry with a count."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        families[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(name)
    if families:
        listed = [own[0] if len(own) == 1 else f"{family} ({len(own)})" for family, own in sorted(families.items())]
        logger.warning("ignoring tensors unknown to this model: %s", ", ".join(listed))


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
