"""`elsa score` in bulk: its rate against the offline engine, its memory, and what 20 kills change in its output.

Run: python benchmarks/bulk.py [--images 100000] [--kills 20] [--engine local] [--workers N] [--results FILE]
A tiny model (one view) is fitted on 400 of the embedded demo images. The source is a folder of Parquet files of 10,000
PNGs of 32 px, all links to one file. "Offline" is one process that reads one such file with load_images, calls
anomaly_score, and counts neither its start nor its imports; it runs before and after the job, and the faster counts.
The job's rate counts everything, from the start of the command to the finished table. CPU times
compare the two on a machine that others use, too. Memory is the largest sum of the
proportional set sizes of the command and all its processes. Kills alternate between the command and one of its workers,
each with SIGKILL at a random moment; every time the same command goes on with --resume.
"""

import argparse
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from elsa.bench.lines import append_line, commit
from elsa.data.demo import load_demo
from elsa.data.parallel import available_cores

PER_FILE = 10_000
SIZE = 32
SETTINGS = ["pretrain_epochs=2", "finetune_epochs=1", "num_prototypes=20", "views=1"]

# In a process of its own, as the job is.
OFFLINE = """
import json, sys, time
from pathlib import Path
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.saved import open_model
detector, about = open_model(Path(sys.argv[1]))
begin, cpu = time.perf_counter(), time.process_time()
loaded = load_images(open_source(Path(sys.argv[2])), **about["preprocessing"])
between = time.perf_counter()
detector.anomaly_score(loaded.images)
end = time.perf_counter()
cpu = time.process_time() - cpu
count = len(loaded)
print(json.dumps({"rate": count / (end - begin), "scoring": count / (end - between), "cpu": cpu / count * 1e6}))
"""


def make_source(folder: Path, images: int) -> None:
    """Parquet files of PNGs, the last one shorter."""
    demo = load_demo(0)
    contents = []
    for pixels in demo.images[:, 0].numpy():
        file = io.BytesIO()
        Image.fromarray(pixels).resize((SIZE, SIZE)).save(file, "PNG")
        contents.append(file.getvalue())
    rows = [{"bytes": contents[i % len(contents)], "path": f"{i:05d}.png"} for i in range(PER_FILE)]
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))])
    folder.mkdir()
    first = folder / "00000.parquet"
    pq.write_table(pa.table({"image": rows[:images]}, schema=schema), first, row_group_size=1000)
    for number in range(1, images // PER_FILE):
        os.link(first, folder / f"{number:05d}.parquet")
    if images > PER_FILE and images % PER_FILE:
        last = folder / f"{images // PER_FILE:05d}.parquet"
        pq.write_table(pa.table({"image": rows[: images % PER_FILE]}, schema=schema), last, row_group_size=1000)


def fit_model(folder: Path, out: Path) -> None:
    """A tiny Elsa+ of one view."""
    photos = folder / "photos"
    photos.mkdir()
    for number, pixels in enumerate(load_demo(0).images[:400, 0].numpy()):
        Image.fromarray(pixels).save(photos / f"{number:04d}.png")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    elsa("fit", str(photos), "--out", str(out), "--encoder", "tiny", "--size", str(SIZE), "--device", "cpu", *settings)


def elsa(*arguments: str) -> None:
    """Run the command and see that it succeeds."""
    subprocess.run([sys.executable, "-m", "elsa", *arguments], check=True, stdout=subprocess.DEVNULL)


def offline(model: Path, table: Path) -> dict[str, float]:
    """Images/s of the engine without a job around it, of its scoring alone, and its CPU time an image in us."""
    done = subprocess.run([sys.executable, "-c", OFFLINE, str(model), str(table)], check=True, capture_output=True)
    return json.loads(done.stdout)


def start(model: Path, source: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """The job, begun."""
    command = [sys.executable, "-m", "elsa", "score", str(model), str(source), "--out", str(out), "--device", "cpu"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def cpu_seconds() -> float:
    """What all processes that this one started, and that have ended, took of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def children(process: int) -> list[int]:
    """All processes below this one."""
    try:
        found = [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in children(child)]


def memory_mb(process: int) -> float:
    """The proportional set sizes of a process and all below it."""
    total = 0
    for one in [process, *children(process)]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def watched(job: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Seconds until the job ended well, and its largest memory."""
    began, peak, over = time.perf_counter(), 0.0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.5):
            peak = max(peak, memory_mb(job.pid))

    looker = threading.Thread(target=look)
    looker.start()
    code = job.wait()
    seconds = time.perf_counter() - began
    over.set()
    looker.join()
    if code:
        raise SystemExit(f"elsa score ended with {code}")
    return seconds, peak


def killed(times: int, seconds: float, *arguments: Path, options: list[str]) -> int:
    """Kill the job at random moments and let it go on, then let it end; how often it was killed before its end."""
    chance, kills = random.Random(0), 0
    for number in range(times):
        job = start(*arguments, "--resume", *options)
        wait = chance.uniform(0.1, 2) * (seconds / times + 4)  # 4 s: until a job that goes on scores again
        try:
            job.wait(wait)
            break
        except subprocess.TimeoutExpired:
            workers = children(job.pid)
            victim = chance.choice(workers) if workers and number % 2 else job.pid
            os.kill(victim, signal.SIGKILL)
            job.wait()
            kills += 1
    last = start(*arguments, "--resume", *options)
    watched(last)
    return kills


def main() -> None:
    """Measure, print, and add a line to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    options = ["--engine", given.engine, "--workers", str(given.workers)]
    with tempfile.TemporaryDirectory(prefix="elsa-bulk-") as name:
        folder = Path(name)
        model, source = folder / "model", folder / "source"
        fit_model(folder, model)
        make_source(source, given.images)
        before = offline(model, source / "00000.parquet")
        cpu = cpu_seconds()
        seconds, peak = watched(start(model, source, folder / "undisturbed.parquet", *options))
        cpu = cpu_seconds() - cpu
        after = offline(model, source / "00000.parquet")
        kills = 0
        if given.kills:
            kills = killed(given.kills, seconds, model, source, folder / "killed.parquet", options=options)
        rows = pq.read_table(folder / "undisturbed.parquet")
        equal = not kills or rows.equals(pq.read_table(folder / "killed.parquet"))
    best = {kind: max(before[kind], after[kind]) for kind in ("rate", "scoring")}
    rate = given.images / seconds
    line = {
        "what": "bulk",
        "images": given.images,
        "engine": given.engine,
        "workers": given.workers,
        "cores": available_cores(),
        "seconds": round(seconds, 1),
        "images/s": round(rate),
        "offline images/s": round(best["rate"]),
        "offline images/s, scoring alone": round(best["scoring"]),
        "share of offline": round(rate / best["rate"], 3),
        "cpu us an image": round(cpu / given.images * 1e6),
        "offline cpu us an image": round(min(before["cpu"], after["cpu"])),
        "peak memory MB": round(peak),
        "rows": len(rows),
        "kills": kills,
        "equal after kills": equal,
        "command": f"python benchmarks/bulk.py {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(),
    }
    print(json.dumps(line, indent=1))
    if given.results:
        append_line(given.results, line)


if __name__ == "__main__":
    main()
