"""The `rorqual` command: help says everything, what is wrong is named with exit code 2, and generate runs a batch."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from rorqual.serve.batch import PARAM_NAMES, read_jobs
from rorqual.serve.cli import app
from rorqual.serve.llm import LLM
from rorqual.serve.options import EngineOptions, OptionError
from rorqual.serve.request import SamplingParams

COMMANDS = ("serve", "generate", "demo")


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def flags(command: str) -> list[Any]:
    return typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]


def write(folder: Path, values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


# Help.


def test_the_command_lists_its_parts():
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_documented(command: str):
    shown = " ".join(run(command, "--help").stdout.split())
    for flag in flags(command):
        assert flag.help, flag.name
        assert " ".join(flag.help.split()) in shown
        if flag.param_type_name == "option":
            assert flag.opts[0] in shown


def test_serve_has_few_flags():
    """The rarer settings live in the file of --config."""
    assert len([flag for flag in flags("serve") if flag.param_type_name == "option"]) < 26


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_engine_flags_carry_the_names_of_the_options(command: str):
    names = {flag.name for flag in flags(command)}
    common = {"context", "max_rows", "step_tokens", "memory_gb", "memory_share", "weights", "compile_cache"}
    assert common <= names & set(asdict(EngineOptions()))


# Errors: one line that names it, exit code 2.


def refused(*args: Any) -> str:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_row": 4}, "'max_row', allowed compile_cache, context, "),
        ("{", "config.json: Expecting property name"),
        ([1], "config.json: list, expected an object"),
        ({"max_rows": 0}, "max_rows: 0, allowed an integer of at least 1"),
        ({"max_rows": 64, "step_tokens": 16}, "step_tokens: 16, allowed an integer of at least max_rows = 64"),
        ({"context": 1}, "context: 1, allowed an integer of at least 2"),
        ({"context": 513}, "context: 513, allowed 2..512"),
        ({"context": "512"}, "context: '512', allowed an integer"),
        ({"memory_gb": -1}, "memory_gb: -1, allowed a number above 0"),
        ({"memory_share": 1.5}, "memory_share: 1.5, allowed a number above 0 up to 1"),
        ('{"memory_gb": NaN}', "memory_gb: nan, allowed a number above 0"),
        ({"weights": "int8"}, "weights: 'int8', allowed auto, packed, bfloat16, float32"),
        ({"row_tile": 8}, "row_tile: 8, allowed 0 or 16"),
        ({"warm_up": "no"}, "warm_up: 'no', allowed true or false"),
        ({"strict_compiles": 1}, "strict_compiles: 1, allowed true or false"),
        ({"progress": None}, "progress: None, allowed true or false"),
        ({"compile_cache": 5}, "compile_cache: 5, allowed the path of a folder"),
        ({"stall_timeout_s": 0}, "stall_timeout_s: 0, allowed a number above 0"),
        ({"memory_gb": 0.0001}, "memory: 0.000 GB, needed at least"),
    ],
)
def test_a_wrong_option_in_the_file(tiny_dir: Path, tmp_path: Path, command: str, values: Any, message: str):
    more = ["--prompt", "x"] if command == "generate" else []
    assert message in refused(command, tiny_dir, "--config", write(tmp_path, values), *more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-rows", "0"], "max_rows: 0, allowed an integer of at least 1"),
        (["--context", "600"], "context: 600, allowed 2..512"),
        (["--memory-gb", "nan"], "memory_gb: nan, allowed a number above 0"),
        (["--weights", "fp8"], "weights: 'fp8', allowed auto"),
        (["--log-level", "loud"], "log-level: 'loud', allowed debug, info, warning, error"),
        (["--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_wrong_flag(tiny_dir: Path, arguments: list[str], message: str):
    assert message in refused("serve", tiny_dir, *arguments)


def test_a_flag_wins_over_the_file(tiny_dir: Path, tmp_path: Path):
    path = write(tmp_path, {"max_rows": 4, "context": 513})
    assert "max_rows: 0" in refused("serve", tiny_dir, "--config", path, "--max-rows", 0)


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--port", "x"], ["--max-rows", "many"], ["--drain-timeout", "-1"], ["--colour"]]
)
def test_a_flag_of_the_wrong_type_shows_the_usage(tiny_dir: Path, arguments: list[str]):
    result = run("serve", tiny_dir, *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]])
def test_a_folder_without_a_model(tmp_path: Path, command: list[str]):
    assert str(tmp_path / "nothing") in refused(*command, tmp_path / "nothing")


def test_generate_wants_one_source_of_prompts(tiny_dir: Path, tmp_path: Path):
    for arguments in ([], ["--prompt", "x", "--input", str(tmp_path)]):
        assert "either --prompt or --input" in refused("generate", tiny_dir, *arguments)
    assert "missing.jsonl" in refused("generate", tiny_dir, "--input", tmp_path / "missing.jsonl")


def test_demo_refuses_a_folder_it_cannot_write(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "file" in refused("demo", tmp_path / "file")


def test_every_option_can_stand_in_the_file():
    """`asdict` of valid options is valid again, whatever the type."""
    values = asdict(EngineOptions(context=64, memory_gb=1, compile_cache="folder"))
    assert EngineOptions(**json.loads(json.dumps(values))) == EngineOptions(**values)
    with pytest.raises(OptionError, match="warm_up"):
        EngineOptions(**(values | {"warm_up": 0}))


# Batches.

LINES = [
    {"prompt": "the whale", "max_tokens": 5},
    "not json",
    {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.7, "seed": 3, "logprobs": 2},
    {"max_tokens": 4},
    {"prompt": "x", "colour": 1, "\ud800": 2},
    {"prompt": "x", "temperature": -1},
    {"prompt": [100000]},
    {"prompt": [9, 9], "logit_bias": {"300": 100, "301": -100}, "max_tokens": 2},
    {"prompt": "x", "logit_bias": {"a": 1}},
    {"prompt": "", "max_tokens": 3},
    {"prompt": "line\u2028separator", "max_tokens": 2},
    {"prompt": "\ud800", "max_tokens": 2},
    {"prompt": "x", "constraint": 1},
]
GOOD = {0, 2, 7, 10}


def write_lines(folder: Path) -> Path:
    """As other writers write them: U+2028 stands as it is, lone surrogates are escaped. With an empty line."""
    lines = [line if isinstance(line, str) else json.dumps(line) for line in LINES]
    path = folder / "jobs.jsonl"
    path.write_text("\n\n".join(lines).replace("\\u2028", "\u2028") + "\n", encoding="utf-8")
    return path


def test_jobs_are_lines_and_nothing_else_ends_a_line(tmp_path: Path):
    jobs = read_jobs(write_lines(tmp_path))
    assert len(jobs) == len(LINES)
    assert jobs[10].prompt == "line\u2028separator"
    assert [i for i, job in enumerate(jobs) if job.error is not None] == [1, 3, 4, 8, 12]
    assert jobs[1].error.startswith("line 3: not JSON")  # type: ignore[union-attr]
    assert "line 9: unknown fields 'colour', '\\ud800', allowed frequency_penalty" in jobs[4].error  # type: ignore[operator]
    assert jobs[7].sampling["logit_bias"] == {300: 100, 301: -100}


def test_a_job_may_have_every_field_of_sampling_params(tmp_path: Path):
    values = {name: value for name, value in asdict(SamplingParams()).items() if name in PARAM_NAMES}
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps({"prompt": "x", **values}))
    assert SamplingParams(**read_jobs(path)[0].sampling) == SamplingParams()


@pytest.fixture(scope="module")
def engine_file(tiled_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The options of the shared engine, so that its compiled programs are found in the cache."""
    values = asdict(tiled_llm.engine.built.options)
    values["compile_cache"] = str(values["compile_cache"])
    return write(tmp_path_factory.mktemp("cli"), values)


def expected_answers(llm: LLM) -> dict[int, Any]:
    """With row tiles an answer does not depend on its company."""
    found = {}
    for place in GOOD:
        values = dict(LINES[place])  # type: ignore[call-overload]
        if "logit_bias" in values:
            values["logit_bias"] = {int(token): value for token, value in values["logit_bias"].items()}
        prompt = values.pop("prompt")
        found[place] = llm.generate([prompt], SamplingParams(**({"temperature": 0.0} | values)))[0]
    return found


def test_generate_answers_every_line_in_order(tiny_dir: Path, tmp_path: Path, tiled_llm: LLM, engine_file: Path):
    source, target = write_lines(tmp_path), tmp_path / "answers.jsonl"
    arguments = ["--config", engine_file, "--input", source, "--output", target, "--temperature", 0, "--json"]
    result = run("generate", tiny_dir, *arguments)
    assert result.exit_code == 1
    assert f"{len(LINES) - len(GOOD)} of {len(LINES)} prompts were answered with an error" in result.stderr
    assert result.stdout == ""
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(answers) == len(LINES)
    assert {i for i, answer in enumerate(answers) if "error" not in answer} == GOOD
    for place, wanted in expected_answers(tiled_llm).items():
        found = answers[place]
        assert (tuple(found["token_ids"]), found["text"]) == (wanted.token_ids, wanted.text)
        assert found["finish_reason"] == wanted.finish_reason
        assert found["usage"]["completion_tokens"] == wanted.usage.num_generated
        assert ("logprobs" in found) == (place == 2)
    assert [len(entry["alternatives"]) for entry in answers[2]["logprobs"]] == [2] * len(answers[2]["token_ids"])
    assert set(answers[7]["token_ids"]) == {300}
    for place in set(range(len(LINES))) - GOOD:
        assert answers[place]["finish_reason"] == "error"
        assert answers[place]["usage"]["completion_tokens"] == 0
    assert answers[5]["error"].startswith("temperature: -1")
    assert answers[6]["error"] == "prompt: token id 100000, allowed 0..511"


def test_generate_prints_answers(tiny_dir: Path, engine_file: Path):
    """As JSON lines, or as plain text with the errors beside it."""
    prompts = ["--prompt", "the whale", "--prompt", "", "--max-tokens", 3, "--temperature", 0]
    result = run("generate", tiny_dir, "--config", engine_file, *prompts, "--json")
    answers = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    assert [len(answer["token_ids"]) for answer in answers] == [3, 0]
    plain = run("generate", tiny_dir, "--config", engine_file, *prompts)
    assert plain.exit_code == 1
    assert plain.stdout == answers[0]["text"] + "\n"
    assert f"error: {answers[1]['error']}" in plain.stderr


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tiny_dir: Path, tmp_path: Path, engine_file: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_work(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done first")

    monkeypatch.setattr("rorqual.serve.batch.run_jobs", no_work)
    arguments = ["--config", engine_file, "--prompt", "x", "--output", tmp_path / "no" / "folder"]
    result = run("generate", tiny_dir, *arguments)
    assert result.exit_code == 2 and "No such file or directory" in result.stderr
