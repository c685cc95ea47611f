"""What `elsa serve` carries: its throughput beside offline scoring, twice its capacity for minutes, kills and swaps.

Run: python benchmarks/serve.py capacity|overload|cycles [--model mobilenet|tiny] [--seconds S] [--results FILE]

capacity  `offline` and `served` take turns, so that whatever else the machine does slows both; the figure is the median
          of the rounds' ratios. Raw pixels (Open Inference Protocol, binary) are compared with anomaly_score over
          images already decoded; JPEGs (multipart) with decoding the same files and then scoring them.
          mobilenet: requests of 1 image at 224 px; tiny: requests of 64 images at 32 px.
overload  requests are sent at twice the rate the service just proved, whether or not answers come back: every answer
          must be 200 or 429, memory flat, p99 of the accepted under 10 times their median.
cycles    kills (SIGTERM, SIGKILL) with restarts, and hot swaps between two models, under load: every answer must be
          complete and hold, to the digit, the score that the model it names gives offline; on SIGTERM all that was
          accepted is answered.

The load generator runs on the same cores: its share of CPU time is in every line.
"""

import argparse
import asyncio
import http.client
import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ingest import synthetic_photo

from elsa.model_file import read_model, write_model

ROOT = Path(__file__).parent.parent
MODELS = {"mobilenet": (224, 1, 96), "tiny": (32, 64, 512)}  # side, images a request, distinct images
QUICK = ["--set", "pretrain_epochs=1", "--set", "finetune_epochs=1", "--set", "num_prototypes=10"]
BOUNDARY = b"a-boundary-no-jpeg-holds"
MINUTE = 60.0

# A process of its own, told when to work: between its turns it holds no core.
OFFLINE = """
import sys, time
from pathlib import Path
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.saved import open_model
model, folder = sys.argv[1:]
detector, about = open_model(Path(model))
decoded = load_images(open_source(Path(folder)), **about["preprocessing"]).images
detector.anomaly_score(decoded[:64])
for line in sys.stdin:
    kind, seconds = line.split()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < float(seconds):
        images = decoded
        if kind == "jpeg":
            images = load_images(open_source(Path(folder)), **about["preprocessing"]).images
        count += len(detector.anomaly_score(images))
    print(count / (time.perf_counter() - began), flush=True)
"""

EXPECTED = """
import json, sys
from pathlib import Path
import torch
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.saved import open_model
folder, *models = sys.argv[1:]
found = {}
for model in models:
    detector, about = open_model(Path(model))
    loaded = load_images(open_source(Path(folder)), **about["preprocessing"])
    assert len(loaded.images) % 32 == 0
    scores = detector.anomaly_score(loaded.images).tolist()
    found[about["sha256_json"][:16]] = dict(zip(loaded.names, scores))
print(json.dumps(found))
"""


def environment() -> dict[str, str]:
    """As the `elsa` command sets it before torch is loaded."""
    return {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"), "PYTHONPATH": str(ROOT)}


def elsa(*arguments: str) -> None:
    """Run the command."""
    subprocess.run([sys.executable, "-m", "elsa", *arguments], check=True, env=environment(), stderr=subprocess.DEVNULL)


@dataclass
class Prepared:
    """Images and a model fitted on them."""

    kind: str
    folder: Path
    photos: Path

    @property
    def model(self) -> Path:
        """The MODEL folder."""
        return self.folder / "model"


def prepare(kind: str, work: Path, seed: int = 0) -> Prepared:
    """Synthetic photos and a model fitted on them, made once for each work folder."""
    side, _, count = MODELS[kind]
    found = Prepared(kind, work / f"{kind}-{seed}", work / f"{kind}-photos")
    if not found.photos.exists():
        found.photos.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for number in range(count):
            synthetic_photo(rng).resize((side, side)).save(found.photos / f"{number:04}.jpg", quality=85)
    if not found.model.exists():
        found.folder.mkdir(exist_ok=True)
        encoder = ["--encoder", "mobilenet_v2"] if kind == "mobilenet" else ["--encoder", "tiny", *QUICK]
        elsa("fit", str(found.photos), "--out", str(found.model), "--device", "cpu", "--seed", str(seed), *encoder)
    return found


def multipart_body(files: Sequence[Path]) -> bytes:
    """A form with each file as a part."""
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="images"; filename="%b"\r\n\r\n%b\r\n'
        % (BOUNDARY, path.name.encode(), path.read_bytes())
        for path in files
    ]
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


def request_of(path: str, content_type: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {content_type}", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def jpeg_requests(prepared: Prepared) -> list[bytes]:
    """All photos, encoded, in multipart requests."""
    per_request = MODELS[prepared.kind][1]
    files = sorted(prepared.photos.iterdir())
    kind = f"multipart/form-data; boundary={BOUNDARY.decode()}"
    groups = [files[start : start + per_request] for start in range(0, len(files), per_request)]
    return [request_of("/score", kind, multipart_body(group)) for group in groups]


def raw_requests(prepared: Prepared) -> list[bytes]:
    """All photos as pixels, in binary tensors."""
    from PIL import Image

    side, per_request, _ = MODELS[prepared.kind]
    files = sorted(prepared.photos.iterdir())
    found = []
    for start in range(0, len(files), per_request):
        pixels = np.stack(
            [np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files[start : start + per_request]]
        )
        parameters = {"binary_data_size": pixels.size}
        tensor = {"name": "images", "shape": [*pixels.shape], "datatype": "UINT8", "parameters": parameters}
        head = json.dumps({"inputs": [tensor]}).encode()
        length = f"Inference-Header-Content-Length: {len(head)}"
        body = head + pixels.tobytes()
        found.append(request_of("/v2/models/model/infer", "application/octet-stream", body, length))
        assert pixels.shape[2] == side
    return found


REQUESTS = {"jpeg": jpeg_requests, "raw": raw_requests}


class Server:
    """`elsa serve` as a process of its own."""

    def __init__(self, model: Path, log: Path, *options: str, port: int = 0) -> None:
        self.log = log
        began = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", "elsa", "serve", str(model), "--port", str(port), "--device", "cpu", *options]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(command, stderr=file, env=environment())
        while not (said := self.said("listening", began)):
            if self.process.poll() is not None:
                raise SystemExit(f"elsa serve ended with {self.process.returncode}; see {log}")
            time.sleep(0.05)
        self.port = int(said[0]["url"].rpartition(":")[2])

    def said(self, event: str, since: int = 0) -> list[dict[str, Any]]:
        """The log lines of an event."""
        with open(self.log, "rb") as file:
            file.seek(since)
            lines = [line for line in file.read().split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        numbers = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; the exit code."""
        self.process.send_signal(how)
        return self.process.wait(60)


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """A server for as long as the block runs."""
    server = Server(model, log, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


class Connection:
    """One keep-alive connection; a request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; ConnectionError or IncompleteReadError if there is none."""
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            self.writer.write(request)
            head = await self.reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await self.reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise
        if b"\r\nconnection: close" in lower:
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        """Drop the connection; the next request opens another."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


@dataclass
class Load:
    """What a stretch of load came to."""

    seconds: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    client_cpu: float = 0.0
    server_cpu: float = 0.0


@contextmanager
def measured(load: Load, server: Server) -> Iterator[None]:
    """Time and CPU time of the block, on both sides."""
    ours = resource.getrusage(resource.RUSAGE_SELF)
    theirs, began = server.cpu(), time.perf_counter()
    yield
    load.seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    load.client_cpu = (after.ru_utime + after.ru_stime - ours.ru_utime - ours.ru_stime) / load.seconds
    load.server_cpu = (server.cpu() - theirs) / load.seconds


async def closed_loop(server: Server, requests: Sequence[bytes], seconds: float, connections: int) -> Load:
    """So many clients, each asking again as soon as it is answered."""
    load = Load()
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection, turn = Connection(server.port), number
        while time.perf_counter() < until:
            began = time.perf_counter()
            status, _ = await connection.ask(requests[turn % len(requests)])
            load.answers[status] += 1
            load.latencies.append(time.perf_counter() - began)
            turn += connections
        connection.close()

    with measured(load, server):
        await asyncio.gather(*map(client, range(connections)))
    return load


async def open_loop(server: Server, requests: Sequence[bytes], seconds: float, rate: float) -> Load:
    """Requests at random moments at a rate, whatever becomes of those before; as many connections as that takes."""
    load, idle, under_way = Load(), list[Connection](), set[asyncio.Task[None]]()
    dice = random.Random(0)

    async def one(request: bytes) -> None:
        connection = idle.pop() if idle else Connection(server.port)
        began = time.perf_counter()
        try:
            status, _ = await connection.ask(request)
        except (OSError, asyncio.IncompleteReadError) as error:
            load.errors[type(error).__name__] += 1
            return
        idle.append(connection)
        load.answers[status] += 1
        if status == 200:
            load.latencies.append(time.perf_counter() - began)

    with measured(load, server):
        began = due = time.perf_counter()
        last_look, number = began, 0
        while due - began < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(one(requests[number % len(requests)]))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            number += 1
            due += dice.expovariate(rate)
            if time.perf_counter() - last_look > 1:
                last_look = time.perf_counter()
                load.memory.append(server.memory())
        await asyncio.gather(*under_way)
    for connection in idle:
        connection.close()
    return load


def capacity(kind: str, work: Path, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Served beside offline."""
    prepared = prepare(kind, work)
    command = [sys.executable, "-c", OFFLINE, str(prepared.model), str(prepared.photos)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        ) as offline,
        serving(prepared.model, work / "serve.log") as server,
    ):
        return list(_capacity(kind, prepared, server, offline, seconds, rounds))


def _capacity(
    kind: str, prepared: Prepared, server: Server, offline: "subprocess.Popen[str]", seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    per_request = MODELS[kind][1]
    connections = 64 if per_request == 1 else 4
    assert offline.stdin is not None
    assert offline.stdout is not None
    for path, make in REQUESTS.items():
        requests = make(prepared)
        asyncio.run(closed_loop(server, requests, min(seconds, 5), connections))  # warm
        alone, served, loads = [], [], []
        for _ in range(rounds):
            offline.stdin.write(f"{path} {seconds}\n")
            offline.stdin.flush()
            alone.append(float(offline.stdout.readline()))
            load = asyncio.run(closed_loop(server, requests, seconds, connections))
            assert set(load.answers) == {200}, load.answers
            served.append(per_request * load.answers[200] / load.seconds)
            loads.append(load)
        ratio = statistics.median(one / other for one, other in zip(served, alone, strict=True))
        yield {
            "what": "capacity",
            "model": kind,
            "path": path,
            "offline": "anomaly_score over decoded images" if path == "raw" else "decoding, then anomaly_score",
            "images_per_request": per_request,
            "connections": connections,
            "offline_images_per_s": round(statistics.median(alone), 1),
            "served_images_per_s": round(statistics.median(served), 1),
            "ratio": round(ratio, 3),
            "rounds": rounds,
            "seconds": seconds,
            "latency_median_s": round(statistics.median(loads[-1].latencies), 4),
            "client_cpu_cores": round(statistics.median(load.client_cpu for load in loads), 3),
            "server_cpu_cores": round(statistics.median(load.server_cpu for load in loads), 3),
            "needed": 0.9 if kind == "mobilenet" else 0.7,
            "met": ratio >= (0.9 if kind == "mobilenet" else 0.7),
        }


def overload(kind: str, work: Path, seconds: float, path: str) -> list[dict[str, Any]]:
    """Twice what the service can do."""
    prepared = prepare(kind, work)
    requests = REQUESTS[path](prepared)
    with serving(prepared.model, work / "serve.log") as server:
        before = asyncio.run(closed_loop(server, requests, min(seconds, 20), 64 if kind == "mobilenet" else 4))
        rate = before.answers[200] / before.seconds
        load = asyncio.run(open_loop(server, requests, seconds, 2 * rate))
    ordered = sorted(load.latencies)
    median, p99 = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
    # the first fifth fills the queue and the allocator's pools
    settled = load.memory[len(load.memory) // 5 :]
    early, late = statistics.median(settled[: len(settled) // 4]), statistics.median(settled[-(len(settled) // 4) :])
    growth = late / early - 1
    clean = not load.errors and set(load.answers) <= {200, 429}
    return [
        {
            "what": "overload",
            "model": kind,
            "path": path,
            "seconds": round(load.seconds, 1),
            "capacity_requests_per_s": round(rate, 2),
            "sent_per_s": round((sum(load.answers.values()) + sum(load.errors.values())) / load.seconds, 2),
            "answers": {str(status): count for status, count in sorted(load.answers.items())},
            "errors": dict(load.errors),
            "accepted_per_s": round(load.answers[200] / load.seconds, 2),
            "latency_median_s": round(median, 4),
            "latency_p99_s": round(p99, 4),
            "p99_over_median": round(p99 / median, 2),
            "memory_mb": {
                "early": round(early / 1e6, 1),
                "late": round(late / 1e6, 1),
                "most": max(load.memory) // 10**6,
            },
            "memory_growth": round(growth, 4),
            "client_cpu_cores": round(load.client_cpu, 3),
            "server_cpu_cores": round(load.server_cpu, 3),
            "met": clean and p99 < 10 * median and growth < 0.02,
        }
    ]


def cycles(kind: str, work: Path, count: int, connections: int) -> list[dict[str, Any]]:
    """Kills, restarts and swaps, a fixed number of clients asking all the while."""
    pair = [prepare(kind, work, seed) for seed in (0, 1)]
    live, log = work / "live", work / "cycles.log"
    log.unlink(missing_ok=True)
    models = [read_model(one.model) for one in pair]
    write_model(live, *models[0])
    found = subprocess.run(
        [sys.executable, "-c", EXPECTED, str(pair[0].photos), *(str(one.model) for one in pair)],
        check=True, capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    return asyncio.run(
        _cycles(kind, live, log, models, json.loads(found.stdout), jpeg_requests(pair[0]), count, connections)
    )


async def _cycles(
    kind: str,
    live: Path,
    log: Path,
    models: Sequence[Any],
    expected: dict[str, dict[str, float]],
    requests: Sequence[bytes],
    count: int,
    connections: int,
) -> list[dict[str, Any]]:
    server = await asyncio.to_thread(Server, live, log)
    counts: Counter[str] = Counter()
    furthest = 0.0
    done = False

    async def client(number: int) -> None:
        """Asks each question until it has the answer, as a client that must not lose one does."""
        nonlocal furthest
        connection, turn = Connection(server.port), number
        while not done:
            counts["asked"] += 1
            while True:
                try:
                    status, body = await connection.ask(requests[turn % len(requests)])
                except ConnectionRefusedError:
                    counts["refused while down"] += 1
                    await asyncio.sleep(0.05)
                except asyncio.IncompleteReadError as error:
                    counts["cut in the middle of an answer" if error.partial else "closed without an answer"] += 1
                except OSError:
                    counts["closed without an answer"] += 1
                else:
                    if status == 200:
                        break
                    counts[f"status {status}"] += 1
                    await asyncio.sleep(0.05)
            answer = json.loads(body)
            known = expected[answer["model"]["id"]]
            counts["answered"] += 1
            counts[f"by {answer['model']['id']}"] += 1
            gaps = [abs(result["score"] - known[result["name"]]) for result in answer["results"]]
            furthest = max(furthest, *gaps)
            counts["wrong answers"] += any(gaps)
            turn += connections
        connection.close()

    clients = [asyncio.create_task(client(number)) for number in range(connections)]
    unanswered = 0
    for cycle in range(count):
        await asyncio.sleep(0.5)
        kinds = ("SIGTERM", "swap by SIGHUP", "SIGKILL", "swap by POST")
        what = kinds[cycle % 4]
        counts[what] += 1
        if what.startswith("SIG"):
            how = signal.Signals[what]
            code = await asyncio.to_thread(server.stop, how)
            if how is signal.SIGTERM:
                ended = server.said("stopped")[-1]
                unanswered += ended["accepted"] - ended["answered"]
                counts["unclean exits"] += code != 0
            server = await asyncio.to_thread(partial(Server, live, log, port=server.port))
        else:
            await asyncio.to_thread(write_model, live, *models[(cycle // 2 + 1) % 2])
            size = log.stat().st_size
            if what.endswith("SIGHUP"):
                server.process.send_signal(signal.SIGHUP)
            else:
                await asyncio.to_thread(reload_by_post, server.port)
            while not server.said("reloaded", size):
                await asyncio.sleep(0.05)
        print(f"\r{cycle + 1}/{count} {what}: {counts['answered']} answers", end="", file=sys.stderr, flush=True)
    done = True
    await asyncio.gather(*clients)
    server.stop()
    print(file=sys.stderr)
    lost = counts["asked"] - counts["answered"]
    return [
        {
            "what": "cycles",
            "model": kind,
            "cycles": count,
            "connections": connections,
            **dict(sorted(counts.items())),
            "lost": lost,
            "accepted_unanswered_on_sigterm": unanswered,
            "largest_difference_to_offline": furthest,
            "met": not (lost or unanswered or counts["wrong answers"] or counts["unclean exits"]),
        }
    ]


def reload_by_post(port: int) -> None:
    """POST /admin/reload."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("POST", "/admin/reload")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()


def provenance() -> dict[str, Any]:
    """What the numbers were measured with."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "command": " ".join(["python", "benchmarks/serve.py", *sys.argv[1:]]),
        "commit": commit.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": round(os.getloadavg()[1], 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["capacity", "overload", "cycles"])
    parser.add_argument("--model", choices=list(MODELS), help="capacity: both; overload: mobilenet; cycles: tiny")
    parser.add_argument("--seconds", type=float, help="capacity: of a turn (20); overload: of the load (600)")
    parser.add_argument("--rounds", type=int, default=5, help="capacity: turns of each")
    parser.add_argument("--path", choices=list(REQUESTS), default="jpeg", help="overload: what is sent")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--connections", type=int, default=4, help="cycles: clients")
    parser.add_argument("--work", type=Path, help="where images, models and logs are kept; default: a temporary folder")
    parser.add_argument("--results", type=Path, help="append the lines to this file")
    asked = parser.parse_args()
    about = provenance()
    with tempfile.TemporaryDirectory(prefix="elsa-serve-") as temporary:
        work = asked.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if asked.what == "capacity":
            kinds = [asked.model] if asked.model else list(MODELS)
            lines = [line for kind in kinds for line in capacity(kind, work, asked.seconds or 20, asked.rounds)]
        elif asked.what == "overload":
            lines = overload(asked.model or "mobilenet", work, asked.seconds or 10 * MINUTE, asked.path)
        else:
            lines = cycles(asked.model or "tiny", work, asked.cycles, asked.connections)
    for line in lines:
        print(json.dumps(line, indent=1))
        if asked.results:
            with open(asked.results, "a") as file:
                file.write(json.dumps(line | about) + "\n")


if __name__ == "__main__":
    main()
