"""StepPlan -> the integers a step takes, and a step's integers -> tokens. numpy only."""

from collections.abc import Sequence

import numpy as np

from rorqual.serve.request import Request
from rorqual.serve.schedule import Admission, RowPlan, StepPlan, TokenLogprobs
from rorqual.serve.step_input import (
    COUNT,
    FLAGS,
    FROM_SEAT,
    MASKED,
    ROW_FIELDS,
    SAMPLES,
    SEAT,
    START,
    UPDATE_FIELDS,
    FillShape,
    StepShape,
)

NUM_ALTERNATIVES = 20


def pack_step(plan: StepPlan, shape: StepShape, num_seats: int) -> np.ndarray:
    """int32 `[length]` of one rank. Unused rows and updates name seat `num_seats`, which writes nothing.

    Raises ValueError when the plan does not fit the shape.
    """
    if len(plan.rows) > shape.num_rows or len(plan.updates) > shape.num_updates:
        raise ValueError(
            f"plan: {len(plan.rows)} rows and {len(plan.updates)} page updates, "
            f"allowed {shape.num_rows} and {shape.num_updates}"
        )
    packed = np.zeros(shape.length, np.int32)
    rows = packed[: shape.tokens_at].reshape(shape.num_rows, ROW_FIELDS)
    rows[:, SEAT] = num_seats
    for place, row in enumerate(plan.rows):
        rows[place, SEAT], rows[place, COUNT] = row.seat, row.count
        rows[place, START] = FROM_SEAT if row.from_seat else row.start
        rows[place, FLAGS] = _flags(row)
    packed[shape.tokens_at : shape.tokens_at + len(plan.tokens)] = plan.tokens
    updates = packed[shape.updates_at :].reshape(shape.num_updates, UPDATE_FIELDS)
    updates[:, 0] = num_seats
    if plan.updates:
        updates[: len(plan.updates)] = plan.updates
    return packed


def _flags(row: RowPlan) -> int:
    return SAMPLES * row.sample | MASKED * constrained(row)


def constrained(row: RowPlan) -> bool:
    """True when the row's sampled token waits for a mask."""
    return row.sample and row.request.params.constraint is not None


def fill_row(admission: Admission, seed: int, shape: FillShape) -> np.ndarray:
    """int32 `[length]`: one seat's parameters (step_input.FillShape). `seed` below 2^63."""
    request, params = admission.request, admission.request.params
    row = np.full(shape.length, -1, np.int32)
    row[0] = admission.seat
    row[1 : shape.stop_at] = [
        params.top_k,
        int(np.uint32(seed & 0xFFFFFFFF).astype(np.int32)),
        int(np.uint32(seed >> 32).astype(np.int32)),
        params.min_tokens,
        len(request.prompt),
        int(params.logprobs is not None),
        admission.penalty_row,
    ]
    stops = sorted(request.stop_ids)
    row[shape.stop_at : shape.stop_at + len(stops)] = stops
    ids = [token for token, _ in params.logit_bias]
    row[shape.bias_at : shape.bias_at + len(ids)] = ids
    floats = [
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    ]
    row[shape.floats_at : shape.values_at] = np.array(floats, np.float32).view(np.int32)
    values = np.zeros(shape.num_bias, np.float32)
    values[: len(ids)] = [value for _, value in params.logit_bias]
    row[shape.values_at :] = values.view(np.int32)
    return row


def unpack_output(packed: np.ndarray, plan: StepPlan) -> tuple[list[int], list[TokenLogprobs | None]]:
    """int32 `[R, 2 + 2 * NUM_ALTERNATIVES]` -> token and log-probabilities of every row of the plan."""
    floats = packed.view(np.float32)
    tokens = packed[: len(plan.rows), 0].tolist()
    logprobs = [_logprobs(row.request, packed[i], floats[i]) for i, row in enumerate(plan.rows)]
    return tokens, logprobs


def _logprobs(request: Request, integers: np.ndarray, floats: np.ndarray) -> TokenLogprobs | None:
    wanted = request.params.logprobs
    if wanted is None:
        return None
    ids = integers[2 : 2 + wanted].tolist()
    values = floats[2 + NUM_ALTERNATIVES : 2 + NUM_ALTERNATIVES + wanted].tolist()
    alternatives = tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)
    return float(floats[1]), alternatives


def masks(plan: StepPlan, generated: Sequence[Sequence[int] | None], num_rows: int, vocab_size: int) -> np.ndarray:
    """uint32 `[num_rows, ceil(vocab / 32)]`: what each constrained row allows; everything for the others.

    `generated`: committed tokens of each row of the plan, None for a row that has ended.
    """
    words = -(-vocab_size // 32)
    result = np.full((num_rows, words), 0xFFFFFFFF, np.uint32)
    for place, (row, tokens) in enumerate(zip(plan.rows, generated, strict=True)):
        constraint = row.request.params.constraint
        if row.sample and constraint is not None and tokens is not None:
            result[place] = np.asarray(constraint.mask(tokens), np.uint32)
    return result
