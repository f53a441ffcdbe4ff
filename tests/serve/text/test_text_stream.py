import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.serve.request import Finished, SamplingParams, Token
from rorqual.serve.text.plane import read_sampling_defaults
from rorqual.serve.text.text_stream import TextStream
from rorqual.serve.text.tokenizer import Tokenizer


def play(tokenizer: Tokenizer, ids: list[int], reason: str, step: int, **params) -> tuple:
    """Text, token ids, number of cuts and Finish of a script fed `step` events at a time."""
    events = [Token(7, i) for i in ids] + [Finished(7, reason, 3, len(ids), 2)]
    stream, deltas = TextStream(tokenizer, SamplingParams(**params)), []
    for at in range(0, len(events), step):
        deltas.append(stream.feed(events[at : at + step]))
    assert all(delta.finish is None for delta in deltas[:-1])
    tokens = [token.token_id for delta in deltas for token in delta.tokens]
    return "".join(d.text for d in deltas), tokens, sum(d.cut for d in deltas), deltas[-1].finish


@given(text=st.text(alphabet="ab é🙂", max_size=30), stop=st.text(alphabet="ab é🙂", min_size=1, max_size=3))
def test_result_does_not_depend_on_how_events_are_grouped(text: str, stop: str, tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode(text)
    one = play(tiny_tokenizer, ids, "length", 1, stop=(stop,))
    assert one[0] == text.split(stop)[0]
    for step in (2, 3, 5, 1000):
        some = play(tiny_tokenizer, ids, "length", step, stop=(stop,))
        assert (some[0], some[1], some[3]) == (one[0], one[1], one[3])


def test_a_stop_string_cuts_once_and_counts_to_its_end(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("one two three")
    text, tokens, cuts, finish = play(tiny_tokenizer, ids, "stop", 1, stop=("wo t",))
    assert (text, cuts, finish.reason, finish.matched) == ("one t", 1, "stop", "wo t")
    assert finish.num_generated == len(tokens) < len(ids)
    assert (finish.num_prompt, finish.num_cached) == (3, 2)


def test_held_text_comes_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    text, _, cuts, finish = play(tiny_tokenizer, tiny_tokenizer.encode("end EN"), "stop", 1, stop=("END",))
    assert (text, cuts, finish.matched) == ("end EN", 0, None)


def test_special_tokens_give_no_text(tiny_tokenizer: Tokenizer) -> None:
    ids = [*tiny_tokenizer.encode("a"), 1, *tiny_tokenizer.encode("b")]
    assert play(tiny_tokenizer, ids, "length", 1)[0] == "ab"


def test_an_engine_error_keeps_its_text(tiny_tokenizer: Tokenizer) -> None:
    stream = TextStream(tiny_tokenizer, SamplingParams())
    finish = stream.feed([Finished(7, "error", 1, 0, 0, "device lost")]).finish
    assert (finish.reason, finish.error) == ("error", "device lost")


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (
            '{"temperature": 0.6, "top_p": 0.95, "do_sample": true, "eos_token_id": 1}',
            {"temperature": 0.6, "top_p": 0.95},
        ),
        ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}),
        ("{}", {}),
    ],
)
def test_sampling_defaults(tmp_path, content: str, defaults: dict) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(content)
    assert read_sampling_defaults(tmp_path) == defaults


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "list, expected an object"), ('{"top_p": "x"}', "top_p is 'x', expected a number")],
)
def test_malformed_sampling_defaults_are_named(tmp_path, content: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=f"generation_config.json: .*{message}"):
        read_sampling_defaults(tmp_path)
