"""The service as a process: signals, ports, slow clients, and the benchmark's three runs in short."""

import asyncio
import json
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from served_model import make_model, pixels, png

import elsa.ship.serve as module
from elsa.cli import cli, run
from elsa.model_file import read_model, write_model
from elsa.ship.serving.app import build_app
from elsa.ship.serving.limits import BODIES_IN_MEMORY, Limits
from elsa.ship.serving.service import Service

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import serve as benchmark

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """What the benchmark prepares, without the fits."""
    work = tmp_path_factory.mktemp("work")
    for seed in (0, 1):
        make_model(work / f"tiny-{seed}" / "model", seed)
    photos = work / "tiny-photos"
    photos.mkdir()
    for number, image in enumerate(pixels(128)):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.save(photos / f"{number:04}.jpg", quality=85)
    return work


@pytest.fixture(scope="module")
def server(work):
    with benchmark.serving(work / "tiny-0" / "model", work / "serve.log") as server:
        yield server


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def answer_of(connection):
    """Status, headers and body of one answer."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = dict(line.decode().lower().strip().split(": ", 1) for line in iter(file.readline, b"\r\n"))
        return status, headers, json.loads(file.read(int(headers["content-length"])))


def question(image):
    body = b'--b\r\nContent-Disposition: form-data; filename="a.png"\r\n\r\n' + png(image) + b"\r\n--b--\r\n"
    return benchmark.request_of("/score", "multipart/form-data; boundary=b", body)


def test_sigterm_finishes_what_was_begun_and_takes_last_orders(work):
    """A request half sent when the signal comes, and one that comes just after it, are both answered."""
    request = question(pixels(1)[0])
    with benchmark.serving(work / "tiny-0" / "model", work / "term.log") as server:
        with connected(server) as half, connected(server) as late:
            half.sendall(request[:-50])
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            while not server.said("draining"):
                time.sleep(0.01)
            late.sendall(request)
            status, headers, answer = answer_of(late)
            assert (status, headers["connection"]) == (200, "close")
            half.sendall(request[-50:])
            assert answer_of(half)[::2] == (200, answer)
        assert server.process.wait(30) == 0
        ended = server.said("stopped")[-1]
        assert (ended["accepted"], ended["answered"]) == (2, 2)
        with pytest.raises(ConnectionRefusedError):
            connected(server)


def test_a_port_in_use_is_one_line_and_code_2(server, work, capfd):
    assert run(["serve", str(work / "tiny-0" / "model"), "--port", str(server.port), "--device", "cpu"]) == 2
    assert f"Error: cannot listen on 127.0.0.1 port {server.port}" in capfd.readouterr().err


def test_a_client_that_trickles_its_headers_is_cut_off(work, monkeypatch):
    """In this process, so that the clock can be set."""
    monkeypatch.setattr(module, "HEADERS_SECONDS", 0.5)
    app = build_app(Service(work / "tiny-0" / "model", Limits()))
    config = uvicorn.Config(app, port=0, http=module.ImpatientProtocol, log_config=None, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    try:
        for first in (b"", b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            slow = socket.create_connection(address, timeout=10)
            slow.sendall(first)
            if first:
                assert answer_of(slow)[0] == 200
            began = time.monotonic()
            closed = False
            while not closed and time.monotonic() - began < 5:
                try:
                    slow.sendall(b"G")
                    time.sleep(0.1)
                    slow.setblocking(False)
                    closed = slow.recv(100) == b""
                except BlockingIOError:
                    slow.setblocking(True)
                except ConnectionError:
                    closed = True
            assert closed
            assert time.monotonic() - began < 3
            slow.close()
    finally:
        server.should_exit = True
        thread.join()


def test_sighup_loads_the_folder_again_or_says_why_not(work, tmp_path):
    folder = tmp_path / "model"
    write_model(folder, *read_model(work / "tiny-0" / "model"))
    with benchmark.serving(folder, tmp_path / "log") as server:
        other = read_model(work / "tiny-1" / "model")
        write_model(folder, *other)
        server.process.send_signal(signal.SIGHUP)
        while not server.said("reloaded"):
            time.sleep(0.02)
        assert server.said("reloaded")[0]["model"] == other[1]["sha256_json"][:16]
        (folder / "model.json").write_text("{}")
        server.process.send_signal(signal.SIGHUP)
        while not server.said("reload refused"):
            time.sleep(0.02)
        assert "model.json is incomplete" in server.said("reload refused")[0]["reason"]
        with connected(server) as connection:
            connection.sendall(question(pixels(1)[0]))
            assert answer_of(connection)[2]["model"]["id"] == other[1]["sha256_json"][:16]


def test_what_the_page_says_is_so(server, work):
    page = (Path(__file__).parent.parent.parent / "docs" / "serve.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    files = {"a.jpg": (work / "tiny-photos" / "0000.jpg").read_bytes(), "b.png": b""}
    found = names["score"](files, f"http://127.0.0.1:{server.port}/score")
    assert set(found[0]) == {"name", "score", "p_value", "verdict", "prototype"}
    assert found[1] == {"name": "b.png", "error": "the file is empty (0 bytes)"}
    limits = Limits()
    assert BODIES_IN_MEMORY == 8
    for words in (
        f"`--queue` | {limits.queue} images",
        f"`--max-body` | {limits.max_body >> 20} MiB a request, and eight times",
        f"`--max-pixels` | {limits.max_pixels // 10**6} million",
        f"`--timeout` | {limits.timeout:g} s",
        f"| {limits.max_batch} images, {limits.max_wait:g} ms",
        f"longer than {module.HEADERS_SECONDS:g} s",
    ):
        assert words in page
    given = {parameter.name: parameter.default for parameter in cli.commands["serve"].params}
    assert {name: given[name] for name in vars(limits)} == vars(limits)


def test_capacity_in_short(work):
    lines = benchmark.capacity("tiny", work, seconds=0.5, rounds=1)
    assert [line["path"] for line in lines] == ["jpeg", "raw"]
    assert all(line["served_images_per_s"] > 0 and line["offline_images_per_s"] > 0 for line in lines)
    assert all(line["client_cpu_cores"] < line["server_cpu_cores"] for line in lines)


def test_twice_the_capacity_in_short(work):
    """As `overload`, with a queue so short that a second fills it."""
    with benchmark.serving(work / "tiny-0" / "model", work / "over.log", "--queue", "128") as server:
        requests = benchmark.jpeg_requests(benchmark.prepare("tiny", work))
        before = asyncio.run(benchmark.closed_loop(server, requests, 1, 2))
        load = asyncio.run(benchmark.open_loop(server, requests, 4, 3 * before.answers[200] / before.seconds))
    assert not load.errors
    assert set(load.answers) == {200, 429}
    assert len(load.latencies) == load.answers[200] > 0
    assert max(load.memory) < 2e9


def test_kills_and_swaps_in_short(work):
    [line] = benchmark.cycles("tiny", work, 4, 2)
    assert line["met"], line
    assert line["answered"] == line["asked"] > 4
    assert {line["SIGTERM"], line["SIGKILL"], line["swap by SIGHUP"], line["swap by POST"]} == {1}
    assert line["largest_difference_to_offline"] == 0
    assert len([name for name in line if name.startswith("by ")]) == 2
