"""The tokenizers of the two text planes."""

import pytest

from rorqual.serve.text.plane import TextPlane
from rorqual.serve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_text: TextPlane) -> Tokenizer:
    return tiny_text.tokenizer


@pytest.fixture(scope="session")
def real_tokenizer(real_text: TextPlane) -> Tokenizer:
    return real_text.tokenizer
