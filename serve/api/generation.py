"""The HTTP response of a generation: whole or as server-sent events, given up at once when the client leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rorqual.serve.api.errors import ApiError
from rorqual.serve.api.service import as_api_error

log = logging.getLogger("rorqual.api")


class Answer(Protocol):
    """One generation in the words of its protocol. Both methods raise the errors that `as_api_error` knows."""

    renamed: dict[str, str]

    async def whole(self) -> dict[str, Any]:
        """The complete response object."""
        ...

    def chunks(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Stream objects; None says that the request is accepted, so that the response may start."""
        ...


class Generation(Response):
    """Runs an Answer while listening for the client's disconnect, and cancels it then.

    Sending waits for the client to read (the server's flow control), which holds up nobody else: events of a
    request wait in its own list, bounded by its answer length.
    """

    def __init__(self, answer: Answer, stream: bool, headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers))
        self._answer = answer
        self._stream = stream
        self._named = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        work = asyncio.ensure_future(self._run(scope, receive, send))
        listener = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({work, listener}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, listener):
                task.cancel()
            await asyncio.gather(work, listener, return_exceptions=True)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            if not self._stream:
                body = await self._answer.whole()
                await JSONResponse(body, headers=self._named)(scope, receive, send)
                return
            async with aclosing(self._answer.chunks()) as chunks:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await send(self._start())
                    if chunk is not None:
                        await send(_piece(_event(chunk)))
            await send(_piece(b"data: [DONE]\n\n", more=False))
        except Exception as error:
            known = as_api_error(error, self._answer.renamed)
            if known is None:
                log.exception("a generation failed")
                known = ApiError(500, "internal error", code="internal_error")
            if started:
                # No [DONE] follows, so that a cut answer is not taken for a whole one.
                await send(_piece(_event(known.body), more=False))
            else:
                response = known.response()
                response.headers.update(self._named)
                await response(scope, receive, send)

    def _start(self) -> dict[str, Any]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._named,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
