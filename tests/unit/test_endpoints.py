"""Prometheus and OpenTelemetry: names, what a scraper and a collector read, and that none of them holds a run up."""

import atexit
import http.server
import logging
import random
import socket
import threading
import urllib.request

import prometheus_client
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families as parsed

from zero3d.config import load
from zero3d.train import endpoints
from zero3d.train.endpoints import CLOSING, Heard, Latest, OpenTelemetry, Prometheus, metric_of
from zero3d.train.folder import Folder
from zero3d.train.metrics import Metrics

RECORDS = [
    {"step": 7, "loss": 2.5, "applied": True, "grad_norm": 1.0, "tokens": 900, "tokens_per_s": 50.0, "seconds": 2.0},
    {"step": 8, "loss": float("nan"), "applied": False, "grad_norm": None, "tokens": 1000, "tokens_per_s": 200.0, "seconds": 0.5,
     "forward_s_largest": 0.25, "validation_loss": 2.0, "validation_loss/web=a": 2.25},
]  # fmt: skip
WANTED = {
    ("zero3d_step", ""): 8, ("zero3d_applied", ""): 0, ("zero3d_tokens", ""): 1000, ("zero3d_step_seconds", ""): 0.5,
    ("zero3d_tokens_per_second", ""): 200, ("zero3d_forward_largest_seconds", ""): 0.25,
    ("zero3d_validation_loss", ""): 2.0, ("zero3d_validation_loss", "web=a"): 2.25,
    ("zero3d_session_steps_total", ""): 2, ("zero3d_session_tokens_total", ""): 200,
    ("zero3d_session_skipped_steps_total", ""): 1, ("zero3d_running", ""): 0,
}  # fmt: skip
NAN = {("zero3d_loss", ""), ("zero3d_grad_norm", "")}
NOW = ("zero3d_last_record_timestamp_seconds", "")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama").mkdir()
    return Folder(tmp_path / "llama")


def logged(folder, *words, records=RECORDS, say=pytest.fail):
    with Metrics(folder, load(None, list(words)), 0, say=say) as metrics:
        for record in records:
            metrics.write(record)


def samples(text):
    """(name, part) -> value, where every sample names the run."""
    found = [sample for family in parsed(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in found} == {"llama"}
    keys = [(sample.name, sample.labels.get("part", "")) for sample in found]
    assert len(keys) == len({*keys}), "which Prometheus would refuse"
    return dict(zip(keys, (sample.value for sample in found), strict=True))


def check(found):
    assert {key for key, value in found.items() if value != value} == NAN
    assert found[NOW] > 1.7e9
    assert {key: value for key, value in found.items() if key not in NAN and key != NOW} == WANTED


# --- names and values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "name", "unit", "part"),
    [
        ("loss", "zero3d_loss", "", ""),
        ("seconds", "zero3d_step_seconds", "s", ""),
        ("save_seconds", "zero3d_save_seconds", "s", ""),
        ("wait_s", "zero3d_wait_seconds", "s", ""),
        ("forward_s_least", "zero3d_forward_least_seconds", "s", ""),
        ("tokens_per_s_per_rank", "zero3d_tokens_per_second_per_rank", "", ""),
        ("memory_bytes", "zero3d_memory_bytes", "By", ""),
        ("steps", "zero3d_steps", "", ""),
        ("validation_loss/a/b c", "zero3d_validation_loss", "", "a/b c"),
        ("exact match %", "zero3d_exact_match__", "", ""),
    ],
)
def test_a_field_has_a_name_that_prometheus_takes_with_its_unit_last(field, name, unit, part):
    metric = metric_of(field)
    assert (metric.name, metric.unit, metric.part, metric.counts) == (name, unit, part, False)


def values(latest):
    return {metric.name: value for family in latest.families().values() for metric, value in family}


def test_what_a_record_has_not_keeps_its_value_but_a_loss_that_is_not_finite_is_nan():
    latest = Latest("run")
    latest.take(1, {"loss": 2.0, "validation_loss": 3.0})
    before = latest.fields
    latest.take(2, {})
    assert values(latest)["zero3d_validation_loss"] == 3.0
    assert values(latest)["zero3d_loss"] != values(latest)["zero3d_loss"]
    assert before["loss"] == 2.0, "which another thread may be reading"


def test_a_slow_rank_is_there_until_times_are_told_without_one():
    latest, seen = Latest("run"), []
    slow = {"forward_s": 1.0, "slowest_rank": 3, "slowest_host_s": 0.5, "usual_loss": 2.0}
    for step, scalars in enumerate([slow, {}, {"forward_s": 1.0}], 1):
        latest.take(step, scalars)
        seen.append({name for name in values(latest) if "slowest" in name or "usual" in name})
    told = {"zero3d_slowest_rank", "zero3d_slowest_host_seconds"}
    assert seen == [told | {"zero3d_usual_loss"}, told, set()]


def test_a_part_of_a_step_is_there_until_times_are_told_without_it():
    latest, seen = Latest("run"), []
    saved = {"forward_s": 1.0, "saves_s": 0.5, "saves_s_least": 0.25, "saves_s_largest": 0.75, "save_seconds": 0.5}
    for step, scalars in enumerate([saved, {"loss": 1.0}, {"forward_s": 2.0}], 1):
        latest.take(step, scalars)
        seen.append({name: value for name, value in values(latest).items() if "save" in name or "forward" in name})
    first = {
        "zero3d_forward_seconds": 1.0,
        "zero3d_saves_seconds": 0.5,
        "zero3d_saves_least_seconds": 0.25,
        "zero3d_saves_largest_seconds": 0.75,
        "zero3d_save_seconds": 0.5,
    }
    assert seen == [first, first, {"zero3d_forward_seconds": 2.0, "zero3d_save_seconds": 0.5}]


# --- Prometheus -------------------------------------------------------------------------------------


def test_the_file_has_the_last_values_and_counts_and_nothing_else_is_left(folder):
    logged(folder, "log.to=prometheus")
    check(samples((folder.root / "metrics.prom").read_text()))
    assert sorted(path.name for path in folder.root.iterdir()) == ["metrics.jsonl", "metrics.prom"]
    (folder.root / "metrics.prom.4711.140").touch()  # of a writer that was killed
    (folder.root / "metrics.prom.mine").touch()
    folder.clear()
    assert [path.name for path in folder.root.iterdir()] == ["metrics.prom.mine"]


@pytest.fixture
def served(folder):
    """A tracker that listens at a free port."""
    tracker = Prometheus(folder.root, "llama", "127.0.0.1", 0, pytest.fail)
    yield tracker
    tracker.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", tracker.port))


def scraped(tracker):
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=60) as answer:
        return samples(answer.read().decode())


def test_a_scrape_gets_the_values_of_now_whatever_other_scrapers_do(served):
    """One connects and says nothing; one asks and never reads."""
    silent, deaf = (socket.create_connection(("127.0.0.1", served.port)) for _ in range(2))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with silent, deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 100)
        for step in range(1, 200):
            served.log(step, {"loss": 1 / step, **{f"own {number}": 1.0 for number in range(50)}})
        found = scraped(served)
    assert (found["zero3d_step", ""], found["zero3d_loss", ""], found["zero3d_running", ""]) == (199, 1 / 199, 1)


def test_only_the_address_that_is_named_is_listened_on(served):
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", served.port))


def test_a_scraper_that_asks_nothing_is_cut_off(folder, monkeypatch):
    monkeypatch.setattr(endpoints, "IDLE", 0.01)
    tracker = Prometheus(folder.root, "llama", "127.0.0.1", 0, pytest.fail)
    with socket.create_connection(("127.0.0.1", tracker.port), 60) as silent:
        assert silent.recv(1) == b""
    tracker.close()


def test_a_port_that_is_taken_is_one_line_and_the_file_goes_on(folder):
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        logged(folder, "log.to=prometheus", f"log.port={port}", say=said.append)
    (line,) = said
    assert line.startswith(f"warning: tracker prometheus cannot listen on 127.0.0.1:{port} (Address already in use); ")
    assert line.endswith("metrics.prom is written")
    check(samples((folder.root / "metrics.prom").read_text()))


def test_a_disk_that_hangs_holds_neither_steps_nor_the_end_up(folder, monkeypatch):
    come, go_on = threading.Event(), threading.Event()

    def hangs(path, registry):
        assert threading.current_thread() is not threading.main_thread()
        come.set()
        go_on.wait()

    monkeypatch.setattr(prometheus_client, "write_to_textfile", hangs)
    tracker = Prometheus(folder.root, "llama", "127.0.0.1", None, pytest.fail, patience=0.0)
    tracker.log(1, {"loss": 1.0})
    assert come.wait(60)
    tracker.log(2, {"loss": 2.0})
    tracker.close()
    assert not go_on.is_set()
    go_on.set()


def test_a_file_that_cannot_be_written_is_one_line(folder):
    (folder.root / "metrics.prom").mkdir()
    said = []
    logged(folder, "log.to=prometheus", say=said.append)
    (line,) = said
    assert line.startswith("warning: tracker prometheus failed at ")
    assert "Is a directory" in line


# --- OpenTelemetry ----------------------------------------------------------------------------------


class Collector:
    """Receives exports over HTTP; one that is deaf takes the connection and never answers."""

    def __init__(self, answers=True, code=200):
        self.got, self.asked, self.release = [], threading.Event(), threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                owner.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                owner.asked.set()
                if not answers:
                    owner.release.wait()
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def last(self):
        """(name, part) -> value of the last export, and the attributes of whom it is of."""
        path, body = self.got[-1]
        assert path == "/v1/metrics"
        (whole,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        found = {}
        for metric in whole.scope_metrics[0].metrics:
            kind = "sum" if metric.name.endswith("_total") else "gauge"
            assert metric.WhichOneof("data") == kind
            assert metric.unit == ("s" if metric.name.endswith("_seconds") else "")
            for point in getattr(metric, kind).data_points:
                labels = {each.key: each.value.string_value for each in point.attributes}
                assert labels.pop("run") == "llama"
                found[metric.name, labels.get("part", "")] = getattr(point, point.WhichOneof("value"))
        return found, {each.key: each.value.string_value for each in whole.resource.attributes}


@pytest.fixture
def otel(monkeypatch):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    return lambda collector: monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)


def test_of_what_the_sdk_logs_the_first_line_is_told_once():
    logger, heard = logging.getLogger("opentelemetry.sdk"), Heard()
    logger.warning("no\nway")
    logger.warning("again")
    assert (heard.first(), heard.first()) == ("no way", None)
    heard.close()
    assert heard not in logging.getLogger("opentelemetry").handlers


def test_nothing_is_exported_once_more_at_the_end_of_the_process(otel):
    with Collector() as collector:
        otel(collector)
        first, before = OpenTelemetry("llama", "mine", lambda line: None), atexit._ncallbacks()
        second = OpenTelemetry("llama", "mine", lambda line: None)
        assert atexit._ncallbacks() == before
        second.close()
        first.close()


def test_a_collector_gets_the_same_values_by_the_same_names(folder, otel, monkeypatch):
    with Collector() as collector:
        otel(collector)
        logged(folder, "log.to=otel", "log.project=mine")
        found, whose = collector.last
        assert not NAN & found.keys(), "a gap, since its SDK takes no NaN"
        check(found | dict.fromkeys(NAN, float("nan")))
        assert (whose["service.name"], whose["run"]) == ("mine", "llama")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
        logged(folder, "log.to=otel")
        assert collector.last[1]["service.name"] == "theirs"


def test_exports_while_a_run_trains_draw_nothing_from_its_randomness(otel, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
    with Collector() as collector:
        otel(collector)
        random.seed(3)
        tracker = OpenTelemetry("llama", "mine", lambda line: None)
        tracker.log(1, {"loss": 1.0})
        assert collector.asked.wait(60)
        assert random.random() == random.Random(3).random()
        tracker.close()


def test_a_collector_that_refuses_is_one_line_and_nothing_is_logged_beside_it(folder, otel, capfd):
    said = []
    with Collector(code=400) as collector:
        otel(collector)
        logged(folder, "log.to=otel", say=said.append)
    (line,) = said
    assert line.startswith("warning: tracker otel could not export, and the run goes on: Failed to export metrics")
    assert capfd.readouterr() == ("", "")


def test_a_collector_that_never_answers_holds_neither_steps_nor_the_end_up(otel, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
    with Collector(answers=False) as collector:
        otel(collector)
        said = []
        tracker = OpenTelemetry("llama", "mine", said.append, patience=0.0)
        tracker.log(1, {"loss": 1.0})
        assert collector.asked.wait(60)
        tracker.log(2, {"loss": 2.0, "a new one": 3.0})
        tracker.close()
        assert "last export" in {thread.name for thread in threading.enumerate()}, "which is not waited for"
        assert said[-1] == "warning: tracker otel: the collector has not answered for 0 s at the end"


def test_the_end_of_a_run_waits_for_seconds_alone():
    assert 0 < CLOSING <= 5
