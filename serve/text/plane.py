"""The text side of one checkpoint in one value: tokenizer, chat format if the tokenizer has one, sampling defaults."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rorqual.serve.text.chat import ChatFormat
from rorqual.serve.text.tokenizer import Tokenizer, TokenizerError

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TextPlane:
    """`chat` is None where the tokenizer cannot write chat prompts; `chat_refusal` then says why."""

    tokenizer: Tokenizer
    chat: ChatFormat | None = None
    chat_refusal: str | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, sampling_defaults: Mapping[str, float] | None = None) -> "TextPlane":
        """The plane around a tokenizer, with chat where it has the chat tokens."""
        defaults = sampling_defaults or {}
        try:
            return cls(tokenizer, ChatFormat(tokenizer), None, defaults)
        except TokenizerError as error:
            return cls(tokenizer, None, str(error), defaults)

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> "TextPlane":
        """Read tokenizer.json, tokenizer_config.json and generation_config.json of a checkpoint folder.

        Raises:
            TokenizerError: the tokenizer is missing or malformed.
            ValueError: generation_config.json is malformed.
        """
        return cls.from_tokenizer(Tokenizer.from_dir(model_dir), read_sampling_defaults(model_dir))


def read_sampling_defaults(model_dir: str | Path) -> dict[str, float]:
    """Sampling defaults of generation_config.json by SamplingParams field; empty where there is no such file.

    `do_sample: false` means greedy: temperature 0.

    Raises:
        ValueError: not a JSON object, or a field that is no number; the message names file and field.
    """
    path = Path(model_dir) / "generation_config.json"
    if not path.exists():
        return {}
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: {type(config).__name__}, expected an object")
    defaults: dict[str, float] = {}
    for name in SAMPLING_FIELDS:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: {name} is {value!r}, expected a number")
        defaults[name] = value
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
