"""How a process writes its log: lines for people, or one JSON object a line for machines.

Invariants and semantics: a line says what its record says and no more: Kev logs no texts of questions or answers, at
any level. JSON lines carry the request and the trace of the call that logged, where there is one.

Not here: what is logged.
"""

from __future__ import annotations

import json
import logging
import time

from common.config_sections import LogFormat, LogLevel
from common.tracing.context import current_request_id, current_trace, parts_of

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message; request_id, trace_id, span_id and error where there are."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, ASCII only."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        if (parts := parts_of(current_trace.get())) is not None:
            line |= {"trace_id": f"{parts[0]:032x}", "span_id": f"{parts[1]:016x}"}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: LogLevel, form: LogFormat) -> None:
    """Write this process's log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
