"""The engine thread: look-ahead, late inputs, compilations, cancelling, and what happens when a step fails."""

import gc
import random
import statistics
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rorqual.serve import LLM, SamplingParams
from rorqual.serve.engine import Engine, EngineDead
from rorqual.serve.request import Finished, Token

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def some_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def step_events(llm: LLM) -> dict[str, dict[int, float]]:
    """Time of every launch, read and commit in the log, by step."""
    found: dict[str, dict[int, float]] = {"launch": {}, "read": {}, "commit": {}}
    for event in llm.engine.log:
        found[event.kind][event.step] = event.time_s
    return found


class Hearing:
    """A sink that collects events and waits for the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self._end = threading.Event()

    def __call__(self, events) -> None:
        for event in events:
            if isinstance(event, Token):
                self.tokens.append(event.token)
            else:
                self.finished = event
                self._end.set()

    def wait(self, timeout_s: float = 60) -> Finished:
        assert self._end.wait(timeout_s), "the request did not end"
        assert self.finished is not None
        return self.finished


# One step ahead.


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(tiny_llm: LLM):
    tiny_llm.engine.log.clear()
    tiny_llm.generate([[5, 6, 7]], GREEDY)
    events = step_events(tiny_llm)
    steady = sorted(events["launch"])[1:]
    assert len(steady) >= 20
    ahead = [events["launch"][n] < events["read"][n - 1] for n in steady if n - 1 in events["read"]]
    assert all(ahead), f"{ahead.count(False)} of {len(ahead)} steps waited for tokens"


def test_time_spent_in_commit_hides_behind_a_longer_step(demo_llm: LLM, monkeypatch):
    """Decode steps of the demo model take tens of milliseconds; 5 more on the host must not show in them."""
    prompts = [[100 + i, 200, 300] for i in range(48)]

    def step_s() -> float:
        demo_llm.engine.log.clear()
        demo_llm.generate(prompts, replace(GREEDY, max_tokens=20))
        launches = [at for _, at in sorted(step_events(demo_llm)["launch"].items())][4:]
        return statistics.median(b - a for a, b in zip(launches, launches[1:], strict=False))

    commit, delay_s = demo_llm.engine._scheduler.commit, 0.005

    def slow_commit(*args):
        time.sleep(delay_s)
        return commit(*args)

    plain, slowed = [], []
    for _ in range(3):  # alternating, since the machine's speed drifts
        monkeypatch.setattr(demo_llm.engine._scheduler, "commit", commit)
        plain.append(step_s())
        monkeypatch.setattr(demo_llm.engine._scheduler, "commit", slow_commit)
        slowed.append(step_s())
    quick, slow = min(plain), min(slowed)
    print(f"step {quick * 1e3:.1f} ms, with 5 ms in commit {slow * 1e3:.1f} ms")
    assert quick > 2 * delay_s, "the step is too short to hide anything"
    assert slow - quick < 0.6 * delay_s


def test_a_late_step_waits_for_the_tokens_it_needs(tiny_llm: LLM):
    tiny_llm.engine.log.clear()
    tiny_llm.generate([[5, 6, 7]], replace(GREEDY, constraint=Allow(lambda generated: range(512))))
    events = step_events(tiny_llm)
    late = [n for n in sorted(events["launch"])[1:] if n - 1 in events["read"]]
    assert len(late) >= 20
    assert all(events["read"][n - 1] < events["launch"][n] for n in late[:-1])


# Late inputs: constraints.


class Allow:
    """A constraint made of a function from the generated tokens to the ids that may follow."""

    def __init__(self, ids) -> None:
        self.ids = ids

    def mask(self, generated):
        words = np.zeros(512 // 32, np.uint32)
        for token in self.ids(list(generated)):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


def test_a_constraint_is_obeyed_at_every_token_and_leaves_the_others_alone(tiled_llm: LLM):
    free = tiled_llm.generate([[9, 8, 7, 6]], GREEDY)[0]
    narrowing = Allow(lambda generated: range(100, 200 - 4 * len(generated)))
    copying = Allow(lambda generated: [300 + len(generated)])
    sampled = replace(GREEDY, temperature=1.0, seed=3, constraint=narrowing)
    answers = tiled_llm.generate(
        [[1, 2, 3], [9, 8, 7, 6], [4, 5]], [sampled, GREEDY, replace(GREEDY, constraint=copying)]
    )
    assert all(100 <= token < 200 - 4 * place for place, token in enumerate(answers[0].token_ids))
    assert len(set(answers[0].token_ids)) > 5
    assert answers[1] == free
    assert answers[2].token_ids == tuple(range(300, 324))


def test_a_constraint_that_raises_ends_its_own_request_only(tiled_llm: LLM):
    def broken(generated):
        if len(generated) == 3:
            raise KeyError("no such state")
        return range(512)

    free = tiled_llm.generate([[9, 8, 7, 6]], GREEDY)[0]
    fine = replace(GREEDY, constraint=Allow(lambda generated: [7]))
    answers = tiled_llm.generate(
        [[1, 2, 3], [9, 8, 7, 6], [4, 5]], [replace(GREEDY, constraint=Allow(broken)), GREEDY, fine]
    )
    assert answers[0].finish_reason == "error" and "no such state" in (answers[0].error or "")
    assert answers[0].usage.num_generated == 3
    assert answers[1] == free
    assert answers[2].token_ids == (7,) * 24


def test_a_constraint_that_allows_nothing_is_an_error_of_its_request(tiny_llm: LLM):
    nothing = Allow(lambda generated: [] if generated else [5])
    [answer] = tiny_llm.generate([[1, 2]], replace(GREEDY, constraint=nothing))
    assert answer.finish_reason == "error"
    assert answer.token_ids == (5,)


# Sampling through the engine.


def test_a_seed_gives_the_same_tokens_alone_in_company_and_later(tiled_llm: LLM):
    seeded = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=42, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    alone = tiled_llm.generate([prompt], seeded)[0].token_ids
    unseeded = replace(seeded, seed=None)
    with_one = tiled_llm.generate([prompt, [7, 7]], [seeded, unseeded])[0].token_ids
    company = [replace(seeded, seed=seed) for seed in (1, 2)]
    with_seeds = tiled_llm.generate([[7], prompt, [8, 8, 8]], [company[0], seeded, company[1]])[1].token_ids
    tiled_llm.generate(some_prompts(0, 20, 40), unseeded)
    later = tiled_llm.generate([prompt], seeded)[0].token_ids
    assert alone == with_one == with_seeds == later
    assert tiled_llm.generate([prompt], replace(seeded, seed=43))[0].token_ids != alone


def test_logit_bias_forces_and_forbids(tiny_llm: LLM):
    free = tiny_llm.generate([[5, 6]], GREEDY)[0].token_ids
    forbidden = tiny_llm.generate([[5, 6]], replace(GREEDY, logit_bias={free[0]: -100.0}))[0].token_ids
    assert free[0] not in forbidden
    assert tiny_llm.generate([[5, 6]], replace(GREEDY, logit_bias={77: 100.0}))[0].token_ids == (77,) * 24


def test_stop_tokens_end_a_request_but_not_before_min_tokens(tiny_llm: LLM):
    free = tiny_llm.generate([[5, 6]], GREEDY)[0].token_ids
    stop = free[4]
    first = free.index(stop)
    cut = tiny_llm.generate([[5, 6]], replace(GREEDY, stop_token_ids=(stop,)))[0]
    assert (cut.token_ids, cut.finish_reason, cut.usage.num_generated) == (free[:first], "stop", first + 1)
    held = tiny_llm.generate([[5, 6]], replace(GREEDY, stop_token_ids=(stop,), min_tokens=10))[0]
    assert len(held.token_ids) >= 10 and stop not in held.token_ids


def test_penalties_follow_their_formula_at_every_token(tiled_llm: LLM):
    """Each sampled token is the best of the model's logits after repetition, frequency and presence penalties and the
    bias, which would have two tokens come again and again."""
    prompt, bias = [5, 6, 7, 5, 6, 7], {7: 5.0, 9: 6.0}
    biased = replace(GREEDY, logit_bias=bias, max_tokens=16)
    params = replace(biased, repetition_penalty=1.7, frequency_penalty=1.1, presence_penalty=0.6)
    answer = tiled_llm.generate([prompt, [1, 2, 3]], [params, GREEDY])[0].token_ids
    scored = tiled_llm.score([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    for place, logits in enumerate(scored):
        counts = np.bincount(answer[:place], minlength=512)
        seen = (np.bincount(prompt, minlength=512) + counts) > 0
        repeated = np.where(logits > 0, logits / np.float32(1.7), logits * np.float32(1.7))
        wanted = np.where(seen, repeated, logits) - 1.1 * counts - 0.6 * (counts > 0)
        wanted[list(bias)] += list(bias.values())
        best = np.sort(wanted)[-2:]
        assert answer[place] == wanted.argmax() or best[1] - best[0] < 1e-4, place
    unpenalised = tiled_llm.generate([prompt], biased)[0].token_ids
    assert max(np.bincount(answer)) < max(np.bincount(unpenalised))


def test_penalty_rows_are_clean_for_the_next_request(tiled_llm: LLM):
    params = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0)
    first = tiled_llm.generate([[5, 6]], params)[0]
    tiled_llm.generate(some_prompts(1, 24, 20), params)
    assert tiled_llm.generate([[5, 6]], params)[0] == first


# No compilation after warm-up.


def test_nothing_is_compiled_after_the_start(tiny_llm: LLM):
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=4, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=1),
        SamplingParams(max_tokens=4, logprobs=5, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(max_tokens=4, logit_bias={3: 1.0}, min_tokens=2, stop_token_ids=(9,)),
        SamplingParams(max_tokens=4, constraint=Allow(lambda generated: range(512))),
    ]
    before = tiny_llm.engine.num_compiles
    for length in (1, 15, 16, 17, 63, 64, 65, 130):
        for batch in (1, 3, 8):
            prompts = [[2 + (i + j) % 500 for j in range(length)] for i in range(batch)]
            answers = tiny_llm.generate(prompts, [replace(kinds[i % 5], max_tokens=4) for i in range(batch)])
            assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    assert tiny_llm.engine.num_compiles == before == 0


# Cancelling.


def test_a_storm_of_cancelled_requests_leaves_no_page(tiny_llm: LLM):
    engine, rng = tiny_llm.engine, random.Random(5)
    free = engine.num_free_pages
    hearers = []
    for prompt in some_prompts(2, 120, 200):
        hearing = Hearing()
        request_id = engine.submit(prompt, replace(GREEDY, max_tokens=rng.randint(1, 60)), hearing)
        hearers.append(hearing)
        if rng.random() < 0.6:
            threading.Timer(rng.random() * 0.3, engine.finish, (request_id,)).start()
        if rng.random() < 0.3:
            time.sleep(0.01)
    reasons = {hearing.wait().reason for hearing in hearers}
    assert reasons == {"abort", "length"}
    deadline = time.monotonic() + 5
    while engine.num_free_pages != free and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.num_free_pages == free and engine.num_live == 0
    engine._scheduler.check()
    assert len(tiny_llm.generate([[1, 2, 3]] * 5, GREEDY)) == 5


# Failure and the end. These need engines of their own: one small step program, out of the compile cache.


@pytest.fixture
def own_llm(tiny_dir, request):
    cache = request.config.rootpath / ".cache" / "test-programs"
    options = {"context": 512, "max_rows": 8, "step_tokens": 64, "memory_gb": 1.0, "weights": "float32"}

    def build(**more) -> LLM:
        llm = LLM(tiny_dir, compile_cache=cache, progress=False, **(options | more))
        request.addfinalizer(llm.close)
        return llm

    return build


def test_a_failing_step_ends_every_request_with_an_error(own_llm):
    llm = own_llm()
    engine, program = llm.engine, llm.engine._programs.step

    def failing(bucket, score=False):
        if engine.num_steps > 6:
            raise RuntimeError("the device is gone")
        return program(bucket, score)

    engine._programs.step = failing
    hearers = [Hearing() for _ in range(12)]  # more than there are seats: some wait
    for hearing in hearers:
        engine.submit([5, 6, 7], GREEDY, hearing)
    for hearing in hearers:
        finished = hearing.wait()
        assert finished.reason == "error" and "the device is gone" in str(finished.detail)
    assert not engine.alive() and not engine.ready()
    with pytest.raises(EngineDead):
        engine.submit([5], GREEDY)
    with pytest.raises(EngineDead):
        llm.generate([[5]], GREEDY)


def test_a_loop_that_hangs_is_not_alive_and_closing_twice_is_fine(own_llm, monkeypatch):
    llm = own_llm(stall_timeout_s=0.8)
    engine, hold, held = llm.engine, threading.Event(), threading.Event()
    assert engine.alive() and engine.ready()

    def hang() -> bool:
        held.set()
        hold.wait(20)
        return False

    monkeypatch.setattr(engine, "_turn", hang)
    assert held.wait(5)
    deadline = time.monotonic() + 5
    while engine.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not engine.alive()
    hold.set()
    llm.close()
    llm.close()
    assert not engine.ready()


def test_an_llm_nobody_needs_ends_its_thread(own_llm, tiny_dir):
    llm = LLM(tiny_dir, progress=False, context=512, max_rows=8, step_tokens=64, memory_gb=1.0, weights="float32")
    thread = llm.engine._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_without_warm_up_the_first_requests_compile_and_are_right(own_llm, tiny_llm: LLM):
    llm = own_llm(warm_up=False)
    assert llm.generate([[5, 6, 7]], GREEDY) == tiny_llm.generate([[5, 6, 7]], GREEDY)


def test_strict_mode_turns_a_compilation_into_an_error(own_llm, monkeypatch):
    llm = own_llm(strict_compiles=True)
    monkeypatch.setattr(Engine, "num_compiles", 1)
    [answer] = llm.generate([[5]], GREEDY)
    assert answer.finish_reason == "error" and "compilations after warm-up: 1, allowed 0" in (answer.error or "")
