"""Reading a request body: bounded, strict JSON, an object."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rorqual.serve.api.errors import ApiError

SHOWN_CHARS = 60


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 415 wrong content type, 413 more than `max_bytes`, 400 not UTF-8, not strict JSON (NaN and duplicate
            keys included) or not an object.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"content-type: {_short(kind)}, allowed application/json")
    return parse_object(await _read(request, max_bytes))


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise ApiError(413, f"body: {int(declared)} bytes, allowed at most {max_bytes} bytes")
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > max_bytes:
                raise ApiError(413, f"body: more than {max_bytes} bytes, allowed at most {max_bytes} bytes")
    except ClientDisconnect as error:
        raise ApiError(400, "body: cut off, the client left before sending it all") from error
    return bytes(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON object from UTF-8 bytes; raises ApiError(400) otherwise."""
    if not data:
        raise ApiError(400, "body: empty, allowed a JSON object")
    try:
        body = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"body: not JSON ({error.msg} at line {error.lineno} column {error.colno})") from error
    except RecursionError as error:
        raise ApiError(400, "body: not JSON that can be read (nested too deeply)") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(400, "body: not JSON that can be read (a number with too many digits)") from error
    if not isinstance(body, dict):
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise ApiError(400, f"body: {names.get(type(body), 'a number')}, allowed a JSON object")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ApiError(400, f"body: the key {_short(key)} twice in one object, allowed once")
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise ApiError(400, f"body: not JSON ({name} is no JSON number)")


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")
