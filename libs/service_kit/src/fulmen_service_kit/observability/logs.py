"""Structured logs: a constant event with data as keys; never payloads, prompts, tokens or secrets."""

import logging
import traceback

import structlog
from opentelemetry import metrics, trace
from structlog.typing import EventDict, Processor, WrappedLogger

from fulmen.ids import trace_id_in
from fulmen_service_kit.standard_streams import never_raise

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_MAX_CAUSES = 8


def configure_logs(*, service: str, log_format: str, level: str) -> None:
    """Configures structlog and logging to write one line per event to standard error.

    Lines that cannot be written, because the disk is full, are lost and counted.

    Args:
        service: Name of the service, added to every line.
        log_format: `json` or `console`.
        level: Minimum level.
    """
    stream = never_raise()
    metrics.get_meter("fulmen.log").create_observable_counter(
        "fulmen.log.lost_lines",
        callbacks=[lambda _: [metrics.Observation(stream.lost)]],
        description="Log lines that could not be written, as on a full disk.",
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace_id,
        structlog.processors.format_exc_info,
    ]
    renderer = structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream),  # type: ignore[arg-type]  # all of a stream that it uses
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[level], logging.WARNING), force=True)


def places_of(error: BaseException) -> list[str]:
    """Returns types and stack frames of an error and its causes, without their texts.

    The text of an unexpected error may contain a caller's data.
    """
    found: list[str] = []
    while len(found) < _MAX_CAUSES:
        frames = traceback.extract_tb(error.__traceback__)
        places = " < ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
        found.append(f"{type(error).__name__} at {places}")
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    return found


def _add_trace_id(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Adds the trace id: of the event's rollout or attempt, otherwise of the current span."""
    context = trace.get_current_span().get_span_context()
    trace_id = trace_id_in(str(event.get("attempt") or event.get("rollout") or ""))
    if trace_id:
        event["trace_id"] = trace_id
    elif context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event
