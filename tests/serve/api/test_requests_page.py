"""docs/requests.md says what the tables say. Run this file to write the page anew."""

import json
from collections.abc import Mapping
from pathlib import Path

from rorqual.serve.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, Honoured, NoEffect, Rule
from rorqual.serve.limits import Limits, sampling_ranges

PAGE = Path(__file__).parents[3] / "docs" / "requests.md"
SHOWN = Limits(vocab_size=129280, max_context=32768, max_rows=32, max_step_tokens=256, page_size=128)
HEAD = """# Requests: fields and ranges

Everything about a request is decided on the host before the engine sees it; a refusal names the field, what was found
and what is allowed (HTTP 400, offline a `RequestError`).

Three rules for body fields: a field of these tables is **honoured**, or it is **known but not supported** and may
only have a value under which it changes nothing (anything else is a 400 that names it), or it never changes the
answer. A field that is in no table is ignored, named once in the log and listed in the response header
`x-rorqual-ignored-fields`, since gateways add fields of their own. `null` counts as absent.
"""


def _rule(rule: Rule) -> str:
    if isinstance(rule, Honoured):
        return f"honoured: {rule.kind}"
    if isinstance(rule, NoEffect):
        return "accepted, changes nothing"
    allowed = ", ".join(f"`{json.dumps(value)}`" for value in (None, *rule.values))
    return f"not supported yet; allowed: {allowed}"


def _fields(title: str, rules: Mapping[str, Rule]) -> str:
    rows = "\n".join(f"| `{name}` | {_rule(rule)} |" for name, rule in sorted(rules.items()))
    return f"\n## {title}\n\n| field | what is done |\n|---|---|\n{rows}\n"


def _ranges() -> str:
    rows = "\n".join(f"| `{name}` | {found.allowed} | {found.note} |" for name, found in sampling_ranges(SHOWN).items())
    lists = (
        f"At most {SHOWN.max_logit_bias} entries of `logit_bias`, {SHOWN.max_stop_strings} stop strings of "
        f"{SHOWN.max_stop_chars} characters, {SHOWN.max_stop_token_ids} `stop_token_ids`."
    )
    return (
        f"\n## Ranges\n\nFor a vocabulary of {SHOWN.vocab_size} and a context of {SHOWN.max_context}; `max_tokens` and "
        "the prompt together fit the context.\n\n"
        f"| value | allowed | |\n|---|---|---|\n{rows}\n\n{lists}\n"
    )


def page() -> str:
    """The whole page."""
    return (
        HEAD + _ranges() + _fields("/v1/chat/completions", CHAT_FIELDS) + _fields("/v1/completions", COMPLETION_FIELDS)
    )


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/requests.md is stale: run this file"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
