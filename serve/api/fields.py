"""Which body fields the generation endpoints know: what is honoured, what may only have its default value.

The rule: a field that would change the answer is honoured or refused by name; an unknown field is ignored, named once
in the log and in a response header, because gateways add fields of their own.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rorqual.serve.api.errors import ApiError

IGNORED_HEADER = "x-rorqual-ignored-fields"
MAX_NAMED_FIELDS = 32
MAX_NAME_CHARS = 64
MAX_REMEMBERED_NAMES = 1000

log = logging.getLogger("rorqual.api")


@dataclass(frozen=True)
class Honoured:
    """A field that is acted upon. `fits` decides the JSON type; ranges are judged where the field is used."""

    kind: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class OnlyDefault:
    """A known field that is not supported: only these values (besides null), under which it changes nothing."""

    values: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """True for a default; JSON's true and 1 are different values."""
        return value is None or any(type(value) is type(v) and value == v for v in self.values)


@dataclass(frozen=True)
class NoEffect:
    """A known field that never changes the answer: accepted with any value."""


Rule = Honoured | OnlyDefault | NoEffect


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


NUMBER = Honoured("a number", _is_number)
INTEGER = Honoured("an integer", _is_integer)
BOOLEAN = Honoured("true or false", lambda value: isinstance(value, bool))
STRING = Honoured("a string", lambda value: isinstance(value, str))
OBJECT = Honoured("an object", lambda value: isinstance(value, dict))
LIST = Honoured("a list", lambda value: isinstance(value, list))
STRINGS = Honoured(
    "a string or a list of strings",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)),
)
INTEGERS = Honoured("a list of integers", lambda value: isinstance(value, list) and all(map(_is_integer, value)))
PROMPT = Honoured("a string, a list of strings, a list of token ids or a list of such lists", lambda value: True)

_SAMPLING: dict[str, Rule] = {
    "model": STRING,
    "max_tokens": INTEGER,
    "min_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": OBJECT,
    "seed": INTEGER,
    "stop": STRINGS,
    "stop_token_ids": INTEGERS,
    "ignore_eos": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "user": NoEffect(),
}

_UNSUPPORTED: dict[str, Rule] = {
    "n": OnlyDefault((1,)),
    "best_of": OnlyDefault((1,)),
    "response_format": OnlyDefault(({"type": "text"},)),
    "structured_outputs": OnlyDefault(),
    "guided_json": OnlyDefault(),
    "guided_regex": OnlyDefault(),
    "guided_choice": OnlyDefault(),
    "guided_grammar": OnlyDefault(),
    "regex": OnlyDefault(),
    "ebnf": OnlyDefault(),
    "json_schema": OnlyDefault(),
    "structural_tag": OnlyDefault(),
    "prompt_logprobs": OnlyDefault(),
    "echo": OnlyDefault((False,)),
    "use_beam_search": OnlyDefault((False,)),
    "length_penalty": OnlyDefault((1, 1.0)),
    "early_stopping": OnlyDefault((False,)),
    "bad_words": OnlyDefault(([],)),
    "allowed_token_ids": OnlyDefault(),
    "truncate_prompt_tokens": OnlyDefault(),
    "include_stop_str_in_output": OnlyDefault((False,)),
    "no_stop_trim": OnlyDefault((False,)),
    "skip_special_tokens": OnlyDefault((True,)),
    "stop_regex": OnlyDefault(([],)),
    "logits_processors": OnlyDefault(([],)),
    "custom_logit_processor": OnlyDefault(),
    "return_hidden_states": OnlyDefault((False,)),
    "return_token_ids": OnlyDefault((False,)),
    "return_tokens_as_token_ids": OnlyDefault((False,)),
    "session_params": OnlyDefault(),
    "lora_path": OnlyDefault(),
}

COMPLETION_FIELDS: Mapping[str, Rule] = {
    **_SAMPLING,
    **_UNSUPPORTED,
    "prompt": PROMPT,
    "logprobs": INTEGER,
    "suffix": OnlyDefault(("",)),
    "prompt_embeds": OnlyDefault(),
}

CHAT_FIELDS: Mapping[str, Rule] = {
    **_SAMPLING,
    **_UNSUPPORTED,
    "messages": LIST,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "reasoning_effort": STRING,
    "thinking": OBJECT,
    "separate_reasoning": OnlyDefault((True,)),
    "stream_reasoning": OnlyDefault((True,)),
    "include_reasoning": OnlyDefault((True,)),
    "tools": OnlyDefault(([],)),
    "tool_choice": OnlyDefault(("auto", "none")),
    "parallel_tool_calls": OnlyDefault((True,)),
    "functions": OnlyDefault(([],)),
    "function_call": OnlyDefault(("auto", "none")),
    "modalities": OnlyDefault((["text"],)),
    "audio": OnlyDefault(),
    "web_search_options": OnlyDefault(),
    "verbosity": OnlyDefault(("medium",)),
    "chat_template": OnlyDefault(),
    "chat_template_kwargs": OnlyDefault(({},)),
    "documents": OnlyDefault(([],)),
    "add_generation_prompt": OnlyDefault((True,)),
    "continue_final_message": OnlyDefault((False,)),
    "add_special_tokens": OnlyDefault((False,)),
}


class FieldCheck:
    """Applies one endpoint's table; remembers which unknown names it has already logged."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._logged: set[str] = set()

    def __call__(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Honoured fields that are not null, and response headers naming what was ignored.

        Raises:
            ApiError: 400 naming a field of the wrong type, or an unsupported one that is not at its default.
        """
        values: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in body.items():
            rule = self._rules.get(name)
            if rule is None:
                ignored.append(name)
            elif isinstance(rule, OnlyDefault) and not rule.accepts(value):
                allowed = " or ".join(["null", *map(_json, rule.values)])
                raise ApiError(400, f"{name}: {_shown(value)} is not supported, allowed {allowed}", name)
            elif isinstance(rule, Honoured) and value is not None:
                if not rule.fits(value):
                    raise ApiError.bad_value(name, json_type(value), rule.kind)
                values[name] = value
        return values, self._report(ignored)

    def _report(self, ignored: list[str]) -> dict[str, str]:
        names = [quote(name[:MAX_NAME_CHARS], safe="", errors="replace") for name in ignored[:MAX_NAMED_FIELDS]]
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_REMEMBERED_NAMES:
                self._logged.add(name)
                log.warning("unknown field %s is ignored (said once)", name)
        return {IGNORED_HEADER: ",".join(names)} if names else {}


def _json(value: Any) -> str:
    texts = {True: "true", False: "false"}
    return texts[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def _shown(value: Any) -> str:
    """A number or short text as JSON writes it, anything else by its type."""
    short = isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_NAME_CHARS)
    return json.dumps(value)[: 2 * MAX_NAME_CHARS] if short else json_type(value)


def json_type(value: Any) -> str:
    """A JSON value's type in words."""
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
