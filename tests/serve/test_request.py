"""The gate: what is wrong with a request is an error of the right field, with the number found and the one allowed."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.serve.limits import Limits, sampling_ranges
from rorqual.serve.request import Request, RequestError, SamplingParams, check_request

IMAGE = 7
LIMITS = Limits(
    vocab_size=1000,
    max_context=512,
    max_rows=8,
    max_step_tokens=64,
    page_size=16,
    max_logit_bias=3,
    image_token_id=IMAGE,
)


class Anything:
    def mask(self, generated):
        return np.full(32, 2**32 - 1, np.uint32)


def refused(prompt, params, limits=LIMITS, score=False) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_request(prompt, params, limits, score)
    return caught.value


@pytest.mark.parametrize("prompt", [[1, 2, 999], (1, 2, 999), np.array([1, 2, 999]), np.array([1, 2, 999], np.uint16)])
def test_a_good_prompt_comes_back_as_int32(prompt):
    checked = check_request(prompt, SamplingParams(), LIMITS)
    assert checked.dtype == np.int32 and checked.tolist() == [1, 2, 999]


def test_the_prompt_is_copied():
    prompt = np.array([1, 2], np.int32)
    checked = check_request(prompt, SamplingParams(), LIMITS)
    prompt[0] = 5
    assert checked.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "0 tokens, allowed 1..511"),
        ([1] * 512, "512 tokens, allowed 1..511 tokens, so that one of 512 positions"),
        ([-1], "token id -1, allowed 0..999"),
        ([3, 1000, 3], "token id 1000, allowed 0..999"),
        ([2**40], "token id 1099511627776"),
        ([2**70], "token id 1180591620717411303424"),
        ([10**5000], "token id an integer of 16610 bits"),
        (np.array([2**63], np.uint64), "token id 9223372036854775808"),
        ([1, True], "element of type bool"),
        (np.array([True]), "element of type bool"),
        ([1.0], "element of type float"),
        (np.array([1.0]), "element of type float64"),
        (["1"], "element of type str"),
        ([None], "element of type NoneType"),
        ([[1]], "element of type list"),
        (np.zeros((1, 2), np.int32), r"array of shape \(1, 2\)"),
        ("some text", "'some text', allowed a list of token ids"),
        (b"ab", "allowed a list"),
        (None, "None, allowed a list"),
        (5, "5, allowed a list"),
        (range(3), "allowed a list"),
        ([1, 2, IMAGE], "token id 7 at position 2, allowed any id but the image placeholder"),
    ],
)
def test_a_bad_prompt_is_refused(prompt, message):
    error = refused(prompt, SamplingParams())
    assert error.field == "prompt"
    with pytest.raises(ValueError, match=message):
        raise error


def test_a_score_prompt_may_fill_the_context():
    assert len(check_request([1] * 512, SamplingParams(), LIMITS, score=True)) == 512
    assert "513 tokens, allowed 1..512" in str(refused([1] * 513, SamplingParams(), score=True))


def test_an_oversized_prompt_costs_nothing():
    class Untouchable(list):
        def __iter__(self):
            raise AssertionError("looked into")

    refused(Untouchable([1] * 5_000_000), SamplingParams())


def test_a_long_prompt_is_checked_fast():
    limits = Limits(1000, 2**20, 8, 64, 16)
    prompt = [5] * (2**20 - 1)
    start = time.perf_counter()
    check_request(prompt, SamplingParams(), limits)
    assert time.perf_counter() - start < 2


RANGES = sampling_ranges(LIMITS)
NUMBERS = [name for name in RANGES if " " not in name]


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_every_range_are_allowed_and_nothing_beyond(name):
    allowed = RANGES[name]
    step = 1 if allowed.kind is int else 1e-9
    low = allowed.low + step if allowed.low_open else allowed.low
    for value in (low, allowed.high):
        check_request([1], SamplingParams(**{name: allowed.kind(value)}), LIMITS)
    for value in (low - step, allowed.high + step, -(10**400), 10**400):
        error = refused([1], SamplingParams(**{name: value}))
        assert error.field == name and str(error).startswith(f"{name}: ") and "allowed" in str(error)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", math.nan, math.inf, -math.inf, [1], {}, 1j, np.float32(math.nan)])
def test_wrong_kinds_and_no_numbers_are_refused(name, value):
    assert refused([1], SamplingParams(**{name: value})).field == name


@pytest.mark.parametrize("name", [name for name in NUMBERS if RANGES[name].kind is int])
def test_a_fraction_is_no_integer(name):
    assert refused([1], SamplingParams(**{name: 1.0})).field == name


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"max_tokens", "seed", "logprobs"}))
def test_none_is_no_number(name):
    assert refused([1], SamplingParams(**{name: None})).field == name


def test_max_tokens_must_fit_the_context_beside_the_prompt():
    assert len(check_request([1] * 500, SamplingParams(max_tokens=12), LIMITS)) == 500
    error = refused([1] * 500, SamplingParams(max_tokens=13))
    assert str(error) == "max_tokens: 13, allowed an integer 1..12: the context of 512 less the prompt of 500"
    assert "an integer of 3322 bits" in str(refused([1], SamplingParams(max_tokens=10**1000)))


def test_min_tokens_stays_below_max_tokens():
    check_request([1], SamplingParams(max_tokens=4, min_tokens=4), LIMITS)
    assert str(refused([1], SamplingParams(max_tokens=4, min_tokens=5))) == "min_tokens: 5, allowed an integer 0..4"
    assert "0..12" in str(refused([1] * 500, SamplingParams(min_tokens=13)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {1000: 1.0}, "1000, allowed an integer 0..999"),
        ("logit_bias", {-1: 1.0}, "-1, allowed"),
        ("logit_bias", {"word": 1.0}, "'word', allowed"),
        ("logit_bias", {True: 1.0}, "True, allowed"),
        ("logit_bias", {1: 1e9}, "1000000000.0, allowed a number -100.0..100.0"),
        ("logit_bias", {1: math.nan}, "nan, allowed"),
        ("logit_bias", {1: None}, "None, allowed"),
        ("logit_bias", dict.fromkeys(range(4), 1.0), "4 entries, allowed at most 3"),
        ("logit_bias", [(1, 2.0), (1, 3.0)], "token id 1 twice, allowed each id once"),
        ("logit_bias", [(1, 2.0, 3.0)], "pairs"),
        ("logit_bias", [5], "5, allowed pairs"),
        ("logit_bias", 5, "5, allowed a mapping"),
        ("stop", ["x"] * 17, "17 entries, allowed at most 16"),
        ("stop", ["x" * 1_000_000], "a string of 1000000 characters, allowed 1..1024"),
        ("stop", [""], "a string of 0 characters"),
        ("stop", "", "a string of 0 characters"),
        ("stop", [5], "5, allowed strings"),
        ("stop", 5, "5, allowed a list"),
        ("stop", None, "None, allowed a list"),
        ("stop_token_ids", [1000], "1000, allowed an integer 0..999"),
        ("stop_token_ids", [True], "True, allowed"),
        ("stop_token_ids", list(range(17)), "17 entries, allowed at most 16"),
        ("stop_token_ids", 5, "5, allowed a list"),
        ("ignore_eos", 1, "1, allowed true or false"),
        ("ignore_eos", None, "None, allowed true or false"),
        ("constraint", "json", "'json', allowed an object"),
    ],
)
def test_bad_lists_and_flags_are_refused(field, value, message):
    error = refused([1], SamplingParams(**{field: value}))
    assert error.field == field and message in str(error)


def test_good_parameters_pass_in_every_form():
    params = SamplingParams(
        max_tokens=5,
        top_k=np.int64(3),
        temperature=1,
        logit_bias={5: -100, 6: 100.0},
        seed=0,
        logprobs=0,
        stop="END",
        stop_token_ids=[3],
        constraint=Anything(),
    )
    check_request([1], params, LIMITS)
    assert params.logit_bias == ((5, -100), (6, 100.0)) and params.stop == ("END",) and params.stop_token_ids == (3,)
    assert SamplingParams(logit_bias=[[5, 1.0]]).logit_bias == ((5, 1.0),)
    assert hash(params) == hash(params)


def test_params_must_be_params():
    assert refused([1], {"temperature": 1}).field == "params"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(prompt=anything, field=st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), value=anything)
def test_any_input_at_all_is_accepted_or_refused_briefly(prompt, field, value):
    for ids, params in ((prompt, SamplingParams()), ([1], SamplingParams(**{field: value}))):
        try:
            check_request(ids, params, LIMITS)
        except RequestError as error:
            assert error.field in {"prompt", field} and len(str(error)) < 300


def test_what_ends_a_request():
    prompt = np.array([5], np.int32)
    both = Request(0, prompt, SamplingParams(stop_token_ids=(3,)), eos_ids=(1,))
    assert both.stop_ids == {1, 3}
    assert Request(0, prompt, SamplingParams(stop_token_ids=(3,), ignore_eos=True), eos_ids=(1,)).stop_ids == {3}
    assert [Request(0, prompt, SamplingParams(max_tokens=most)).max_new_tokens(10) for most in (None, 4, 20)] == [
        9,
        4,
        9,
    ]
    assert Request(0, prompt, score=True).max_new_tokens(10) == 0


def test_what_counts_as_greedy_and_as_penalised():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().uses_penalties
    for change in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 0.9}):
        assert SamplingParams(**change).uses_penalties


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 15}, "page_size: 15, allowed an even number"),
        ({"max_step_tokens": 7}, "max_step_tokens: 7, allowed at least max_rows = 8"),
        ({"max_rows": 0}, "max_rows: 0, allowed at least 1"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(change, message):
    sizes = {"vocab_size": 10, "max_context": 64, "max_rows": 8, "max_step_tokens": 64, "page_size": 16}
    with pytest.raises(ValueError, match=message):
        Limits(**(sizes | change))
