"""Prometheus metrics in its text format 0.0.4: a few counters and histograms need no library."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Labels = tuple[tuple[str, str], ...]


class Metric:
    """One name with its values by labels."""

    def __init__(self, name: str, kind: str, about: str) -> None:
        self.name, self.kind, self.about = name, kind, about
        self.values: dict[Labels, float] = defaultdict(float)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Raise a counter."""
        self.values[tuple(sorted(labels.items()))] += amount

    def set(self, value: float, **labels: str) -> None:
        """Set a gauge, forgetting values under other labels."""
        self.values = {tuple(sorted(labels.items())): value}

    def lines(self) -> list[str]:
        """The metric in text form."""
        head = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        return head + [f"{self.name}{braces(labels)} {number(value)}" for labels, value in self.values.items()]


class Histogram:
    """Counts of values below bounds."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> list[str]:
        """The histogram in text form: each bucket counts all values up to its bound."""
        found = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} histogram"]
        total = 0
        for bound, count in zip([*self.bounds, math.inf], self.counts, strict=True):
            total += count
            found.append(f"{self.name}_bucket{braces((('le', number(bound)),))} {total}")
        return [*found, f"{self.name}_sum {number(self.sum)}", f"{self.name}_count {total}"]


class Metrics:
    """Everything the service counts; written by the event loop alone."""

    def __init__(self) -> None:
        self.requests = Metric("elsa_requests_total", "counter", "Requests answered, by route and status.")
        self.request_seconds = Histogram("elsa_request_seconds", "From request to answer, scored ones.", SECONDS)
        self.images = Metric("elsa_images_total", "counter", "Images scored, by verdict.")
        self.broken = Metric("elsa_broken_images_total", "counter", "Images that could not be read.")
        self.batch_images = Histogram("elsa_batch_images", "Images scored together.", IMAGES)
        self.batch_seconds = Histogram("elsa_batch_seconds", "Time to score a batch.", SECONDS)
        self.reloads = Metric("elsa_reloads_total", "counter", "Changes of the model, by result.")
        self.waiting = Metric("elsa_waiting_images", "gauge", "Images accepted and not answered yet.")
        self.capacity = Metric("elsa_waiting_images_limit", "gauge", "Images that may wait.")
        self.ready = Metric("elsa_ready", "gauge", "1 while requests are welcome.")
        self.model = Metric("elsa_model_info", "gauge", "The model that answers new requests.")
        self.drift_distance = Metric("elsa_drift_distance", "gauge", "Kolmogorov-Smirnov, last scores to calibration.")
        self.drift_alarm = Metric("elsa_drift_alarm", "gauge", "1 while the last scores do not fit the calibration.")
        self.cpu = Metric("process_cpu_seconds_total", "counter", "CPU time of this process.")
        self.memory = Metric("process_resident_memory_bytes", "gauge", "Resident memory of this process.")

    def text(self) -> str:
        """What /metrics answers."""
        return "\n".join(line for metric in vars(self).values() for line in metric.lines()) + "\n"


def braces(labels: Labels) -> str:
    """{a="b"}, escaped; nothing without labels."""
    escaped = [
        f'{name}="{value.translate({92: chr(92) * 2, 34: chr(92) + chr(34), 10: chr(92) + "n"})}"'
        for name, value in labels
    ]
    return f"{{{','.join(escaped)}}}" if escaped else ""


def number(value: float) -> str:
    """As Prometheus reads it."""
    return "+Inf" if value == math.inf else repr(value)
