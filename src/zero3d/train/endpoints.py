"""Trackers of monitoring: the last values of a run, for Prometheus to scrape, or sent to an OpenTelemetry collector.

    name         where                                              who asks or sends, and how often
    prometheus   OUTPUT/metrics.prom, for node_exporter             a thread writes it, at most once in EVERY seconds
                 a port, where log.port names one                   a thread for each scrape
    otel         OTEL_EXPORTER_OTLP_ENDPOINT, over HTTP             a thread of its SDK, OTEL_METRIC_EXPORT_INTERVAL

    field of a record      metric                                   with the same names in both
    loss                   zero3d_loss{run="llama"}                 a gauge for each field
    forward_s_largest      zero3d_forward_largest_seconds           units in full, and last
    tokens_per_s           zero3d_tokens_per_second
    seconds                zero3d_step_seconds
    validation_loss/web    zero3d_validation_loss{part="web"}
                           zero3d_session_steps_total               counters, which begin at 0 with each session
                           zero3d_running, zero3d_last_record_timestamp_seconds

`log` only puts a record where these threads find it: a disk, a scraper or a collector that hangs holds no step up, and
the end of a run for CLOSING seconds at most.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from zero3d.zero.step_parts import PARTS

Say = Callable[[str], Any]  # prints one line
PREFIX = "zero3d_"
EVERY, CLOSING = 5.0, 5.0
IDLE = 30.0  # seconds after which a scraper that asks nothing is cut off
USUAL = "usual_loss"  # beside a loss far above it, in that record alone
NONE = dict.fromkeys(
    ("loss", "grad_norm", USUAL), math.nan
)  # of a record without one; the first two are not finite then
SLOWEST, TIMES = "slowest_", "forward_s"  # told where times of parts are told, while there is a slow rank
OF_PARTS = frozenset(f"{part}_s{end}" for part in PARTS for end in ("", "_least", "_largest"))
SESSION, LAST, RUNNING = "session_", "last_record_timestamp_seconds", "running"
UNITS = {"_seconds": "s", "_bytes": "By"}  # as OpenTelemetry spells them


class Metric(NamedTuple):
    """Names a value: a metric, and a part of what it is of, such as a source of a mixture, or ""."""

    name: str
    part: str = ""

    @property
    def counts(self) -> bool:
        """Return whether the metric is a counter; all others are gauges."""
        return self.name.endswith("_total")

    @property
    def unit(self) -> str:
        return next((unit for end, unit in UNITS.items() if self.name.endswith(end)), "")

    def labels(self, run: str) -> dict[str, str]:
        """Return the labels of its value in a run."""
        return {"run": run} | ({"part": self.part} if self.part else {})


@cache
def metric_of(field: str) -> Metric:
    """Return the metric of a field of a record."""
    stem, _, part = field.partition("/")
    stem = re.sub(r"_per_s(?=_|$)", "_per_second", "step_seconds" if stem == "seconds" else stem)
    stem = re.sub(r"_s(_least|_largest)?$", r"\1_seconds", stem)
    return Metric(f"{PREFIX}{re.sub('[^a-zA-Z0-9_]', '_', stem)}", part)


def told_with_times(field: str) -> bool:
    """Return whether a record with times that lacks this field says that there is none: no slow rank, no such part."""
    return field.startswith(SLOWEST) or field in OF_PARTS


class Latest:
    """Keeps the last value of every field, and counts what a session does. Other threads read it at any time.

    run     name of the output folder
    fields  a new mapping with each record, which nobody changes: names of metrics are made where it is read
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.fields: Mapping[str, float] = {}

    def take(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a record. What it has not keeps its value, such as the held-out loss between evaluations."""
        before = self.fields
        if TIMES in scalars:
            before = {name: value for name, value in before.items() if not told_with_times(name)}
        tokens = round(scalars.get("tokens_per_s", 0.0) * scalars.get("seconds", 0.0))
        counted = {"steps": 1, "tokens": tokens, "skipped_steps": not scalars.get("applied", 1)}
        totals = {f"{SESSION}{name}_total": many for name, many in counted.items()}
        counts = {name: before.get(name, 0) + many for name, many in totals.items()}
        own = {"step": step, RUNNING: 1, LAST: time.time(), **counts}
        self.fields = {**before, **NONE, **scalars, **own}

    def end(self) -> None:
        """Mark the run as over: no more records come."""
        self.fields = {**self.fields, RUNNING: 0}

    def families(self) -> dict[str, list[tuple[Metric, float]]]:
        """Return the values of a moment, by their metrics' names."""
        found: dict[str, dict[Metric, float]] = {}
        for field, value in self.fields.items():
            metric = metric_of(field)
            if field != USUAL or math.isfinite(value):
                found.setdefault(metric.name, {})[metric] = float(value)
        return {name: list(values.items()) for name, values in found.items()}


def meaning(name: str) -> str:
    """Return the line of help of a metric."""
    name = name.removeprefix(PREFIX)
    if name.startswith(SESSION):
        return "since this session began"
    return {LAST: "when the last step was recorded", RUNNING: "1 while it trains, 0 after the last step"}.get(
        name, "as in metrics.jsonl, of the last record that has it"
    )


# --- Prometheus ------------------------------------------------------------------------------------


class Prometheus:
    """Writes metrics.prom, and answers scrapes at a port.

    say       prints one line, of a port that cannot be listened on
    patience  seconds for the last writing of the file
    """

    def __init__(
        self, folder: Path, run: str, host: str, port: int | None, say: Say, patience: float = CLOSING
    ) -> None:
        from prometheus_client import CollectorRegistry

        self._latest, self._patience = Latest(run), patience
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._file = str(folder / "metrics.prom")
        self._due, self._over = Event(), Event()
        self._trouble: Exception | None = None
        self._server = None if port is None else self._served(host, port, say)
        self._writer = Thread(target=self._keep_file, name="metrics.prom", daemon=True)
        self._writer.start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a record. Raises the error of a file that could not be written."""
        self._latest.take(step, scalars)
        self._due.set()
        if self._trouble is not None:
            raise self._trouble

    def close(self) -> None:
        """Write the file once more, and stop listening."""
        self._latest.end()
        self._over.set()
        self._due.set()
        self._writer.join(self._patience)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._trouble is not None:
            raise self._trouble

    @property
    def port(self) -> int | None:
        """The port that is listened on, or None."""
        return None if self._server is None else self._server.server_port

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of a scrape, as a collector of prometheus_client does."""
        from prometheus_client.core import Metric as Family

        for name, values in self._latest.families().items():
            counts = values[0][0].counts
            family = Family(name.removesuffix("_total"), meaning(name), "counter" if counts else "gauge")
            for metric, value in values:
                family.add_sample(name, metric.labels(self._latest.run), value)
            yield family

    def _keep_file(self) -> None:
        while not self._over.is_set():
            self._due.wait()
            self._due.clear()
            self._write()
            self._over.wait(EVERY)
        self._write()

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self._file, self._registry)
        except Exception as error:  # noqa: BLE001 (told by the thread that trains)
            self._trouble = error

    def _served(self, host: str, port: int, say: Say) -> Any:
        """Return a server that answers scrapes, or None where it cannot listen."""
        from prometheus_client import start_http_server

        try:
            server, _ = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            why = error.strerror or error
            say(f"warning: tracker prometheus cannot listen on {host}:{port} ({why}); {self._file} is written")
            return None
        kind = server.RequestHandlerClass
        server.RequestHandlerClass = type(kind.__name__, (kind,), {"timeout": IDLE})
        server.handle_error = lambda *_: None  # what becomes of a scraper is no news of a run
        return server


# --- OpenTelemetry ---------------------------------------------------------------------------------


class OpenTelemetry:
    """Sends metrics to a collector by OpenTelemetry's own SDK, which its variables configure (OTEL_...).

    say       prints one line: of the first export that fails; each one is tried anew
    patience  seconds for the last export
    """

    def __init__(self, run: str, project: str, say: Say, patience: float = CLOSING) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        self._latest = Latest(run)
        self._say, self._patience = say, patience
        self._log = Heard()
        own = Resource.create({"service.name": project, "run": run})
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        draw_apart()
        self._provider = MeterProvider(
            [reader], resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("zero3d")
        self._known: set[str] = set()  # fields
        self._made: set[str] = set()  # names of instruments

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a record."""
        self._latest.take(step, scalars)
        for field in self._latest.fields.keys() - self._known:
            self._known.add(field)
            if (metric := metric_of(field)).name not in self._made:
                self._made.add(metric.name)
                make = self._meter.create_observable_counter if metric.counts else self._meter.create_observable_gauge
                make(metric.name, [partial(self._observed, metric.name)], metric.unit, meaning(metric.name))
        self._tell()

    def close(self) -> None:
        """Export once more. A collector that does not answer is waited for no longer than `patience`."""
        self._latest.end()
        ending = Thread(target=self._end, name="last export", daemon=True)
        ending.start()
        ending.join(self._patience)
        self._tell()
        if ending.is_alive():
            self._say(f"warning: tracker otel: the collector has not answered for {self._patience:g} s at the end")
        else:
            self._log.close()

    def _end(self) -> None:
        with suppress(Exception):  # it has logged why
            self._provider.shutdown(1000 * CLOSING)

    def _tell(self) -> None:
        if (trouble := self._log.first()) is not None:
            self._say(f"warning: tracker otel could not export, and the run goes on: {trouble}")

    def _observed(self, name: str, options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        for metric, value in self._latest.families().get(name, ()):
            if math.isfinite(value):  # the SDK takes no other
                yield Observation(value, metric.labels(self._latest.run))


class Heard(logging.Handler):
    """Takes what the SDK logs, which would be lines for each export on a terminal, and keeps the first for the run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first: str | None = None
        self._told = False
        self._logger = logging.getLogger("opentelemetry")
        self._before, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._first is None:
            self._first = " ".join(record.getMessage().split())

    def first(self) -> str | None:
        """Return the first line, once."""
        if self._told or self._first is None:
            return None
        self._told = True
        return self._first

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._before
        super().close()


def draw_apart() -> None:
    """Give exporters a generator of their own: their thread draws the time to a retry, from Python's own one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("opentelemetry.exporter.") and getattr(module, "random", None) is random:
            module.random = random.Random(os.getpid())  # type: ignore[attr-defined]
