"""The page of `elsa label` under load: many images, many people, and a server that is killed.

Run: python benchmarks/labelling.py large [--images 100000] [--seconds 60]
     python benchmarks/labelling.py crowd [--people 50] [--seconds 300] [--kills 10]

large: answers of the page while the head is fitted beside it again and again, and the memory of both processes beside
the embeddings. The images are repetitions of the embedded garments and the embeddings 1280 drawn numbers around twenty
centres, for embedding 100,000 images takes a CPU the better part of an hour and is not what is measured.
crowd: every label that the server has acknowledged must be in the store exactly once, however often it was killed.
Each appends a line to results/labelling.jsonl.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from elsa.bench.lines import commit
from elsa.data.demo import DEMO_FILE
from elsa.data.sources import open_source
from elsa.encoders import Encoder, parse_encoder
from elsa.weights import find_mobilenet_v2
from elsa.workspace import prepare as preparing
from elsa.workspace.prepare import prepare
from elsa.workspace.session import open_session
from elsa.workspace.store import open_store

RESULTS = Path(__file__).parent.parent / "results" / "labelling.jsonl"
CENTRES = 20


class Server:
    """`elsa label` as a process that can be killed and started again on the same port."""

    def __init__(self, source: Path, workspace: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            sys.executable, "-m", "elsa", "label", str(source), "--workspace", str(workspace), "--no-browser",
            "--who", "somebody", "--port", str(self.port), *options,
        ]  # fmt: skip

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, until: Callable[[dict], bool], seconds: float = 300) -> dict:
        """The first state that is as wanted."""
        ends, state = time.monotonic() + seconds, None
        with closing(Person(self.port)) as person:
            while time.monotonic() < ends:
                state = person.ask("GET", "/api/state")
                if state is not None and until(state):
                    return state
                time.sleep(0.1)
        raise SystemExit(f"the server is not as wanted after {seconds} s: {state}")


class Person:
    """One client with a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port, self.connection = port, http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def close(self) -> None:
        self.connection.close()

    def ask(self, method: str, path: str, body: dict | None = None) -> Any:
        """What the server answers; None if it does not, as while it is dead."""
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            self.connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = self.connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            return None
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {content[:300]!r}")
        return json.loads(content) if answer.headers["content-type"] == "application/json" else content


def crowd(server: Server, names: list[str], people: int, seconds: float, kills: int) -> dict[str, Any]:
    """People label until the time is up while the server is killed; which requests were acknowledged, and how soon."""
    ends = time.monotonic() + seconds
    acknowledged: list[tuple[str, str, str, str]] = []
    waited: list[float] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        chance, person, who = random.Random(number), Person(server.port), f"person {number}"
        try:
            while time.monotonic() < ends:
                said = {"name": chance.choice(names), "label": chance.choice(["normal", "anomaly", "unsure"])}
                request = uuid4().hex
                began = time.monotonic()
                while person.ask("POST", "/api/labels", {"request": request, "who": who, "items": [said]}) is None:
                    time.sleep(0.05)  # as the page does: the same request again until it is acknowledged
                waited.append(time.monotonic() - began)
                acknowledged.append((f"{request}:0", who, said["name"], said["label"]))
                time.sleep(chance.uniform(0.05, 0.15))
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            person.close()

    threads = [threading.Thread(target=work, args=[number]) for number in range(people)]
    for thread in threads:
        thread.start()
    for _ in range(kills):
        time.sleep(seconds / (kills + 1))
        server.kill()
        server.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"a labeller failed: {failures[0]}")
    return {"acknowledged": acknowledged, "p50_ms": at(waited, 50), "p95_ms": at(waited, 95)}


def compare(workspace: Path, acknowledged: list[tuple[str, str, str, str]]) -> dict[str, int]:
    """How many acknowledged labels are missing, doubled or altered in the store, and how many nobody acknowledged."""
    with open_store(workspace) as store:
        stored = Counter((event.request, event.who, event.image, event.label) for event in store.events())
    return {
        "acknowledged": len(acknowledged),
        "missing": sum(stored[one] == 0 for one in acknowledged),
        "more_than_once": sum(count > 1 for count in stored.values()),
        "not_acknowledged": len(set(stored) - set(acknowledged)),
    }


def at(values: list[float], percentile: float) -> float:
    return round(1000 * float(np.percentile(values, percentile)), 1)


def make_large(folder: Path, images: int) -> tuple[Path, Path, str]:
    """A source of that many small images and its prepared workspace."""
    with np.load(DEMO_FILE, allow_pickle=False) as stored:
        garments = stored["images"]
    np.savez(folder / "garments.npz", images=np.resize(garments, (images, *garments.shape[1:])))
    encoder = f"mobilenet_v2:{find_mobilenet_v2()}"
    session = open_session(folder / "garments.npz", folder / "workspace", encoder=encoder)
    session.close()
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(CENTRES, 1280, generator=generator)

    def drawn(encoder: Encoder, part: torch.Tensor) -> list[torch.Tensor]:
        which = torch.randint(CENTRES, (len(part),), generator=generator)
        return [centres[which] + 0.4 * torch.rand(len(part), 1280, generator=generator)]

    preparing.embed_batches = drawn  # type: ignore[assignment]
    preparing.CHUNK = 4096
    prepare(folder / "workspace", open_source(folder / "garments.npz"), parse_encoder(encoder))
    return folder / "garments.npz", folder / "workspace", encoder


def large(folder: Path, images: int, seconds: float) -> dict[str, Any]:
    """Answers per kind of request, with and without a fit going on; seconds of a fit; memory beside the embeddings."""
    began = time.monotonic()
    source, workspace, encoder = make_large(folder, images)
    print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    server = Server(source, workspace, "--encoder", encoder, "--batch", "10")
    began = time.monotonic()
    server.start()
    try:
        state = server.wait(lambda state: state["phase"] == "ready" and not state["work"])
        print(f"first model after {time.monotonic() - began:.1f} s", file=sys.stderr)
        memory = Memory(server.process.pid)
        times: dict[tuple[str, bool], list[float]] = {}
        person, chance, ends = Person(server.port), random.Random(0), time.monotonic() + seconds
        key = state["key"]
        fitting = False
        turn = 0

        def measured(kind: str, method: str, path: str, body: dict | None = None) -> Any:
            began = time.monotonic()
            answer = person.ask(method, path, body)
            times.setdefault((kind, fitting), []).append(time.monotonic() - began)
            return answer

        while time.monotonic() < ends:
            turn += 1
            fitting = bool(measured("state", "GET", "/api/state")["work"])
            if turn % 5 == 1:
                asked = measured("queue", "GET", f"/api/queue?count=15&seed={turn}")
            show = chance.choice(["all", "unlabelled", "flagged", "suspects"])
            measured("browse", "GET", f"/api/images?show={show}&prototype={turn % 13}&count=60")
            for _ in range(3):
                measured("thumbnail", "GET", f"/thumb/{key}/{chance.randrange(images)}")
            item = asked[turn % len(asked)]
            said = {
                **{name: item[name] for name in ("name", "model", "score", "strategy", "probability")},
                "label": chance.choice(["normal", "normal", "anomaly"]),
            }
            measured("label", "POST", "/api/labels", {"request": uuid4().hex, "items": [said]})
            time.sleep(0.1)
        models = person.ask("GET", "/api/models")
        while_fitting = [second for (_, busy), found in times.items() if busy for second in found]
        return {
            "what": "page of 100,000 images while the head is fitted" if images == 100_000 else "page while fitting",
            "images": images,
            "requests_while_fitting": len(while_fitting),
            "p50_ms": at(while_fitting, 50),
            "p95_ms": at(while_fitting, 95),
            "p95_ms_idle": at([s for (_, busy), found in times.items() if not busy for s in found] or [0.0], 95),
            "p95_ms_by_request": {kind: at(found, 95) for (kind, busy), found in sorted(times.items()) if busy},
            "fits": len(models) - 1,
            "fit_seconds": [model["seconds"] for model in models],
            **memory.stop(),
        }
    finally:
        server.kill()


class Memory(threading.Thread):
    """The most memory that the page and its refit process take beside what they map from files."""

    def __init__(self, page: int) -> None:
        super().__init__(daemon=True)
        self.page, self.most, self.most_resident, self.ended = page, 0, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            own = [status(process) for process in (self.page, *children(self.page))]
            self.most = max(self.most, sum(one.get("RssAnon", 0) + one.get("RssShmem", 0) for one in own))
            self.most_resident = max(self.most_resident, sum(one.get("VmRSS", 0) for one in own))

    def stop(self) -> dict[str, float]:
        self.ended.set()
        return {
            "gb_beside_mapped_files": round(self.most / 1e6, 2),
            "gb_resident_mapped_files_counted_in_both": round(self.most_resident / 1e6, 2),
        }


def status(process: int) -> dict[str, int]:
    """The figures in kB of /proc; none for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}


def children(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(number) for number in task.read_text().split()]
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("large")
    one.add_argument("--images", type=int, default=100_000)
    one.add_argument("--seconds", type=float, default=60)
    one = commands.add_parser("crowd")
    one.add_argument("--people", type=int, default=50)
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elsa-labelling-") as temporary:
        folder = Path(temporary)
        if given.what == "large":
            line = large(folder, given.images, given.seconds)
        else:
            source, workspace, encoder = make_large(folder, 2000)
            server = Server(source, workspace, "--encoder", encoder, "--batch", "1000")
            server.start()
            server.wait(lambda state: state["phase"] == "ready")
            names = [f"image-{number:05d}" for number in range(2000)]
            found = crowd(server, names, given.people, given.seconds, given.kills)
            server.kill()
            line = {
                "what": "crowd",
                "people": given.people,
                "seconds": given.seconds,
                "kills": given.kills,
                **found,
                **compare(workspace, found["acknowledged"]),
            }
    line |= {
        "load_average": [round(one, 1) for one in os.getloadavg()],
        "cores": os.cpu_count(),
        "command": shlex.join(["python", "benchmarks/labelling.py", *sys.argv[1:]]),
        "commit": commit(),
    }
    print(json.dumps(line, indent=1))
    with open(RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
