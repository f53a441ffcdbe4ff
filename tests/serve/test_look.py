"""Reading the device state of a running engine."""

import numpy as np
import pytest

from rorqual.serve import SamplingParams
from rorqual.serve.engine import Engine, EngineDead


def test_a_look_between_two_steps_disturbs_nothing(tiny_llm) -> None:
    engine, prompt = tiny_llm.engine, list(range(5, 25))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [alone] = tiny_llm.generate([prompt], params)
    seen, tokens = [], []
    for delta in tiny_llm.stream([prompt], params):
        tokens += [token.token_id for token in delta.tokens]
        if delta.finish is None:
            seen.append(engine.look(lambda state: np.array(state.seats.computed)))
    assert tuple(tokens) == alone.token_ids
    moving = np.flatnonzero(seen[0] != seen[-1])  # other seats hold what earlier requests left
    assert len(moving) == 1
    computed = np.array(seen)[:, moving[0]]
    assert (np.diff(computed) >= 0).all() and len(prompt) <= computed[0] < computed[-1] < len(prompt) + 30


def test_a_reader_that_fails_hurts_only_itself(tiny_llm) -> None:
    with pytest.raises(ZeroDivisionError):
        tiny_llm.engine.look(lambda state: 1 / 0)
    assert tiny_llm.engine.alive()
    assert tiny_llm.engine.look(lambda state: state.seats.computed.shape) == (8,)


def test_nobody_looks_into_a_stopped_engine(tiny_llm) -> None:
    engine = Engine(tiny_llm.engine.built)
    engine.close()
    with pytest.raises(EngineDead):
        engine.look(lambda state: None)
