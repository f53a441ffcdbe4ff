"""The FastAPI application over an engine and a text plane."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rorqual.serve.api.chat import ChatAnswer
from rorqual.serve.api.completions import CompletionAnswer
from rorqual.serve.api.errors import ApiError, error_body
from rorqual.serve.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldCheck, Honoured, Rule
from rorqual.serve.api.generation import Answer, Generation
from rorqual.serve.api.intake import check_model
from rorqual.serve.api.json_body import read_json_object
from rorqual.serve.api.runs import EngineClient
from rorqual.serve.api.service import ServerInfo, Service, as_api_error
from rorqual.serve.text.plane import TextPlane


def create_app(engine: EngineClient, text: TextPlane, info: ServerInfo) -> FastAPI:
    """The HTTP application. `app.state.service` is what the server process drains at its end."""
    service = Service(engine, text, info)
    app = FastAPI(title="Rorqual", docs_url=None, redoc_url=None)
    app.state.service = service
    _add_errors(app)
    _add_status(app, service)
    _add_generation(app, service, "/v1/completions", COMPLETION_FIELDS, CompletionAnswer)
    _add_generation(app, service, "/v1/chat/completions", CHAT_FIELDS, ChatAnswer)
    return app


def _add_generation(
    app: FastAPI,
    service: Service,
    path: str,
    rules: Mapping[str, Rule],
    answer_of: Callable[[Service, dict[str, Any], str], Answer],
) -> None:
    check = FieldCheck(rules)

    @app.post(path, openapi_extra=_body_schema(rules), response_class=JSONResponse)
    async def generate(request: Request) -> Response:
        service.check_open()
        values, headers = check(await read_json_object(request, service.info.max_body_bytes))
        model = check_model(values, service.info.model_names)
        try:
            answer = answer_of(service, values, model)
        except ApiError as error:
            response = error.response()
            response.headers.update(headers)
            return response
        return Generation(answer, bool(values.get("stream", False)), headers)


def _add_status(app: FastAPI, service: Service) -> None:
    engine, info = service.engine, service.info

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = engine.alive()
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        if service.draining:
            return JSONResponse({"status": "draining"}, 503)
        serving = engine.alive() and engine.ready()
        return JSONResponse({"status": "ready" if serving else "not ready"}, 200 if serving else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": info.created,
                "owned_by": "rorqual",
                "max_model_len": engine.limits.max_context,
            }
            for name in info.model_names
        ]
        return {"object": "list", "data": cards}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        known = as_api_error(error) or ApiError(500, "internal error", code="internal_error")
        return known.response()


def _body_schema(rules: Mapping[str, Rule]) -> dict[str, Any]:
    """OpenAPI request body: the honoured fields with their JSON kinds in words."""
    properties = {name: {"description": rule.kind} for name, rule in rules.items() if isinstance(rule, Honoured)}
    schema = {"type": "object", "properties": properties, "additionalProperties": True}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
