"""Errors of the HTTP side: one exception, one JSON shape."""

from typing import Any

from starlette.responses import JSONResponse

MAX_MESSAGE_CHARS = 1000
"""An error message never carries more than this much of anything."""


class ApiError(Exception):
    """An answer of the form {"error": {message, type, param, code}} with an HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @classmethod
    def bad_value(cls, field: str, found: str, allowed: str) -> "ApiError":
        """A 400 in the words of all request errors: "<field>: <found>, allowed <range>"."""
        return cls(400, f"{field}: {found}, allowed {allowed}", field)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> JSONResponse:
        """The HTTP response; 503 asks the client to come back in a second."""
        headers = {"retry-after": "1"} if self.status == 503 else None
        return JSONResponse(self.body, status_code=self.status, headers=headers)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object for a status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    shown = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}
