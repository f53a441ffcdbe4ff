"""`rorqual generate`: jobs in, answers out, one line each."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from rorqual.serve.completion import Completion, refused
from rorqual.serve.llm import LLM, Prompt
from rorqual.serve.request import SamplingParams

PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams)) - {"constraint"}


@dataclass(frozen=True)
class Job:
    """One prompt with its own sampling fields, or what is wrong with its line."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    error: str | None


def _job(line: str, number: int) -> Job:
    try:
        values = json.loads(line)
    except ValueError as error:
        return Job("", {}, f"line {number}: not JSON ({error})")
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str | list):
        return Job("", {}, f'line {number}: expected an object with "prompt", a text or a list of token ids')
    prompt = values.pop("prompt")
    unknown = sorted(set(values) - PARAM_NAMES)
    if unknown:
        names = ", ".join(map(repr, unknown))
        return Job("", {}, f"line {number}: unknown fields {names}, allowed {', '.join(sorted(PARAM_NAMES))}")
    if isinstance(values.get("logit_bias"), dict):
        try:
            values["logit_bias"] = {int(token): value for token, value in values["logit_bias"].items()}
        except ValueError:
            return Job("", {}, f"line {number}: logit_bias: keys must be token ids")
    return Job(prompt, values, None)


def read_jobs(path: Path) -> list[Job]:
    """Jobs of a file of JSON lines; empty lines are skipped, a bad line becomes an answer with an error."""
    lines = path.read_text(encoding="utf-8").split("\n")  # a JSON string may hold the other line ends
    return [_job(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def as_json(answer: Completion) -> str:
    """One answer as a line of JSON."""
    values: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.usage.num_prompt,
            "completion_tokens": answer.usage.num_generated,
            "cached_tokens": answer.usage.num_cached,
        },
    }
    if answer.logprobs is not None:
        values["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "alternatives": [list(a) for a in entry.alternatives],
            }
            for entry in answer.logprobs
        ]
    if answer.error is not None:
        values["error"] = answer.error
    return json.dumps(values, ensure_ascii=False)


def run_jobs(llm: LLM, jobs: Sequence[Job], stated: Mapping[str, Any]) -> list[Completion]:
    """Answers in the order of the jobs. A job's own fields win over `stated`, those over the checkpoint's defaults."""
    good = [job for job in jobs if job.error is None]
    defaults = dict(llm.text.sampling_defaults) | dict(stated)
    params = [SamplingParams(**(defaults | dict(job.sampling))) for job in good]
    answers = iter(llm.generate([job.prompt for job in good], params, progress=sys.stderr.isatty()))
    return [next(answers) if job.error is None else refused(job.error) for job in jobs]


def write_answers(
    llm: LLM, jobs: Sequence[Job], stated: Mapping[str, Any], output: Path | None, json_lines: bool
) -> int:
    """Run the jobs and write one line of JSON, or the plain text, for each; returns how many are errors."""
    target = nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8")
    with target as file:  # opened first: what cannot be written should be known before hours of work
        answers = run_jobs(llm, jobs, stated)
        for answer in answers:
            _write(file, answer, json_lines)
    return sum(answer.error is not None for answer in answers)


def _write(file: IO[str], answer: Completion, json_lines: bool) -> None:
    if json_lines:
        print(as_json(answer), file=file)
    elif answer.error is not None:
        print(f"error: {answer.error}", file=sys.stderr)
    else:
        print(answer.text, file=file)
