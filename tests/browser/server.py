"""The server of `elsa label` as a process, to be opened, killed and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, source: Path, workspace: Path, *options: str) -> None:
        self.workspace, self.port = workspace, free_port()
        self.command = [
            sys.executable, "-m", "elsa", "label", str(source), "--workspace", str(workspace), "--who", "ann",
            "--no-browser", "--port", str(self.port), *options,
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        self.wait(until=lambda state: True)

    def wait(self, seconds: float = 240, until=lambda state: state["phase"] == "ready") -> dict:
        """The first state that is as wanted."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.process.stderr.read()
            try:
                state = self.get("api/state")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
                continue
            assert not state["trouble"], state["trouble"]
            if until(state):
                return state
            time.sleep(0.1)
        raise AssertionError(f"not as wanted after {seconds} s: {state}")

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()
