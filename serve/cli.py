"""The `rorqual` command: serve, generate, demo."""

import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="DeepSeek-V4.1-Flash on JAX.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a failure is read in a log, where boxes around its lines are in the way
)

Model = Annotated[Path, typer.Argument(help="checkpoint folder in the released layout", show_default=False)]
Config = Annotated[
    Path | None, typer.Option("--config", help="JSON file of engine options, for the rarer ones; flags win over it")
]
Context = Annotated[int | None, typer.Option(help="tokens of one request, prompt and answer")]
MaxRows = Annotated[int | None, typer.Option(help="requests that run at the same time")]
StepTokens = Annotated[int | None, typer.Option(help="tokens of one step: bounds the time between two tokens")]
MemoryGb = Annotated[float | None, typer.Option(help="memory budget in 10^9 bytes")]
MemoryShare = Annotated[float | None, typer.Option(help="memory budget as a share of the device's memory")]
Weights = Annotated[str | None, typer.Option(help="auto, packed, bfloat16 or float32: how weights are kept")]
CompileCache = Annotated[Path | None, typer.Option(help="folder that keeps compiled programs between starts")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error")]


def _options(config: Path | None, **flags: Any) -> dict[str, Any]:
    """Engine options of a file and of flags. Raises OptionError for a name that is no option."""
    from rorqual.serve.options import EngineOptions, OptionError

    known = {field.name for field in fields(EngineOptions)}
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"{config}: {error}") from error
        if not isinstance(values, dict):
            raise OptionError(f"{config}: {type(values).__name__}, expected an object")
        for name in values:
            if name not in known:
                raise OptionError(f"{config}: {name!r}, allowed {', '.join(sorted(known))}")
    return values | {name: value for name, value in flags.items() if value is not None}


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


def _start_log(level: str) -> None:
    if level not in ("debug", "info", "warning", "error"):
        raise _fail(ValueError(f"log-level: {level!r}, allowed debug, info, warning, error"))
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.WARNING)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=0, max=65535)] = 8000,
    name: Annotated[list[str] | None, typer.Option(help="model name in the API; repeat for aliases")] = None,
    context: Context = None,
    max_rows: MaxRows = None,
    step_tokens: StepTokens = None,
    memory_gb: MemoryGb = None,
    memory_share: MemoryShare = None,
    weights: Weights = None,
    compile_cache: CompileCache = None,
    drain_timeout: Annotated[float, typer.Option(help="seconds that running requests get after SIGTERM", min=0)] = 30.0,
    config: Config = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model over HTTP. The port opens when every step program is compiled."""
    _start_log(log_level)
    from rorqual.serve.api.app import create_app
    from rorqual.serve.api.server import serve as run_server
    from rorqual.serve.api.service import ServerInfo
    from rorqual.serve.llm import LLM

    try:
        options = _options(
            config,
            context=context,
            max_rows=max_rows,
            step_tokens=step_tokens,
            memory_gb=memory_gb,
            memory_share=memory_share,
            weights=weights,
            compile_cache=compile_cache,
        )
        llm = LLM(model, **options)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    with llm:
        info = ServerInfo(tuple(name) if name else (model.resolve().name,))
        served = create_app(llm.engine, llm.text, info)
        logging.getLogger("rorqual").info("serving the model as %s", ", ".join(info.model_names))
        run_server(served, host, port, drain_timeout_s=drain_timeout, log_level=log_level)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="prompt text; repeat for several")] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help='JSON lines: {"prompt": text or ids, and any sampling field}'),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON lines of answers; default: standard output")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens to generate at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the best tokens that have this probability")] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from so many best tokens; 0: from all")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same draws; default: drawn anew")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; repeat for several")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="answers as JSON with token ids")] = False,
    context: Context = None,
    max_rows: MaxRows = None,
    step_tokens: StepTokens = None,
    memory_gb: MemoryGb = None,
    memory_share: MemoryShare = None,
    weights: Weights = None,
    compile_cache: CompileCache = None,
    config: Config = None,
    log_level: LogLevel = "warning",
) -> None:
    """Generate from prompts, offline."""
    _start_log(log_level)
    from rorqual.serve.batch import Job, read_jobs, write_answers
    from rorqual.serve.llm import LLM

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    if bool(prompt) == (input_file is not None):
        raise _fail(ValueError("generate: give either --prompt or --input"))
    try:
        jobs = read_jobs(input_file) if input_file is not None else [Job(text, {}, None) for text in prompt or ()]
        options = _options(
            config,
            context=context,
            max_rows=max_rows,
            step_tokens=step_tokens,
            memory_gb=memory_gb,
            memory_share=memory_share,
            weights=weights,
            compile_cache=compile_cache,
        )
        with LLM(model, **options) as llm:
            stated = {key: value for key, value in sampling.items() if value is not None}
            num_errors = write_answers(llm, jobs, stated, output, as_json or output is not None)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    if num_errors:
        typer.echo(f"{num_errors} of {len(jobs)} prompts were answered with an error", err=True)
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="folder to write", show_default=False)],
    seed: Annotated[int, typer.Option(help="same seed, same bytes")] = 0,
) -> None:
    """Write a small synthetic checkpoint in the released layout. It speaks noise, through every part of the engine."""
    from rorqual.model.demo import write_demo_checkpoint

    try:
        write_demo_checkpoint(folder, seed)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    typer.echo(f"demo checkpoint in {folder}")


def main() -> None:
    """Entry point of the `rorqual` command."""
    app()
