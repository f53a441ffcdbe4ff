"""The server process: uvicorn with a drain on SIGTERM."""

import logging
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from rorqual.serve.api.service import Service

log = logging.getLogger("rorqual.api")

LEAVE_TIMEOUT_S = 2
"""After the drain: time for connections to close before they are cut."""


def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    drain_timeout_s: float = 30.0,
    keep_alive_s: int = 75,
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    The port opens when this is called, so call it after the engine's warm-up. Draining: new generations get a 503 and
    /ready turns 503 while the port stays open; running ones go on for at most `drain_timeout_s` seconds, the rest
    ends with an error. A second signal ends them at once.

    Raises:
        SystemExit: the port cannot be opened.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=LEAVE_TIMEOUT_S,
    )
    DrainingServer(config, app.state.service, drain_timeout_s).run()


class DrainingServer(uvicorn.Server):
    """uvicorn's server, whose end waits for the generations under way."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler: begin to drain; at the second signal drain no longer."""
        # Not recorded for uvicorn, which would raise the signal again after the shutdown instead of exiting with 0.
        again = self._service.draining
        self._service.draining = True
        self._deadline = time.monotonic() + (0.0 if again else self._drain_timeout_s)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: True when the server is to stop."""
        if self._deadline is not None:
            num_open = self._service.runs.num_open
            if num_open and time.monotonic() >= self._deadline:
                log.warning("drain time of %g s is over, ending %d requests", self._drain_timeout_s, num_open)
                self._service.runs.fail_all("the server is shutting down")
                self.should_exit = True
            elif not num_open:
                self.should_exit = True
        return await super().on_tick(counter)
