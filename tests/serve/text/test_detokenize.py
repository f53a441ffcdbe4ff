import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.serve.text.detokenize import Detokenizer
from rorqual.serve.text.tokenizer import Tokenizer

TEXT = "café 你好 🙂🙂 가나"


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_deltas_end_between_characters(step: int, tiny_tokenizer: Tokenizer, real_tokenizer: Tokenizer) -> None:
    for tokenizer in (tiny_tokenizer, real_tokenizer):
        ids, stream = tokenizer.encode(TEXT), Detokenizer()
        deltas = [
            "".join(stream.feed(tokenizer.token_bytes(i)) for i in ids[at : at + step])
            for at in range(0, len(ids), step)
        ]
        assert "".join(deltas) == TEXT
        assert stream.flush() == ""


def test_held_bytes_are_flushed_once() -> None:
    stream = Detokenizer()
    assert stream.feed(b"ab\xf0\x9f") == "ab"
    assert stream.num_held_bytes == 2
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@given(st.lists(st.binary(max_size=4)))
def test_any_bytes_equal_decoding_at_once(pieces: list[bytes]) -> None:
    stream = Detokenizer()
    text = "".join([stream.feed(piece) for piece in pieces]) + stream.flush()
    assert text == b"".join(pieces).decode("utf-8", errors="replace")
