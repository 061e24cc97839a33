"""One line of JSON for each thing that happened; one for each request, without its text."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from kvboost.server.work import Served

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that this task answers: stands in each line that is logged meanwhile."""

_log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, the request's id if there is one, then `extra["data"]`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["id"] = current
        line |= getattr(record, "data", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Log to stderr from now on, warnings too. Run uvicorn with `log_config=None`, so that it
    leaves its loggers as they are set here."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.access").addFilter(_refused)


def served(what: Served) -> None:
    """A request is over."""
    data = {
        "id": what.id,
        "tenant": what.tenant,
        "outcome": what.outcome,
        "prompt": what.prompt,
        "tokens": asdict(what.usage),
        "misses": dict(what.misses),
        "queued": round(what.queued, 4),
        "ttft": None if what.ttft is None else round(what.ttft, 4),
        "total": round(what.seconds, 4),
        "policy": what.policy,
        "exact": what.exact,
    }
    if what.error:
        data["error"] = what.error
    level = logging.ERROR if what.outcome == "failed" else logging.INFO
    _log.log(level, "request", extra={"data": data})


def _refused(record: logging.LogRecord) -> bool:
    """Of uvicorn's access log, what was refused: what was answered has its own line, and the page
    and Prometheus ask every second."""
    match record.args:
        case (*_, int(status)):
            return status >= 400
    return True
