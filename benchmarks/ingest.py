"""How fast a folder of photos is read, against what Pillow alone decodes on the same cores, and in how much memory.

Run: python benchmarks/ingest.py [IMAGES] [--size PX] [--folder DIR]
IMAGES (50,000) JPEGs of 640x480 are written to a temporary folder: copies of 300 different synthetic photos. "Pillow
alone" is a pool of one process per core doing Image.open(file).convert("RGB").resize(size) and nothing else. The two
take turns, so that whatever else the machine does slows both; each ingestion is a fresh process without a cache.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 640, 480
DISTINCT = 300

# Run in a process of its own: memory is then that of an ingestion from nothing, torch included.
INGEST = """
import json, sys, time
from pathlib import Path
from elsa.data.load import load_images
from elsa.data.sources import open_source
folder, cache, size, memory_limit = sys.argv[1:]
begin = time.perf_counter()
images = load_images(open_source(Path(folder)), size=int(size), cache=Path(cache), memory_limit=int(memory_limit))
print(json.dumps({"images": len(images), "seconds": time.perf_counter() - begin, "kind": type(images.images).__name__}))
"""


def synthetic_photo(rng: np.random.Generator) -> Image.Image:
    """Smooth colours, edges and grain, so that its JPEG has about the size of a photo's."""
    smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
        (WIDTH, HEIGHT), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(smooth, np.int16).copy()
    for _ in range(40):
        left, top = rng.integers(0, WIDTH), rng.integers(0, HEIGHT)
        width, height = rng.integers(10, 120, 2)
        pixels[top : top + height, left : left + width] += rng.integers(-60, 60, 3, np.int16)
    pixels += rng.normal(0, 6, pixels.shape).astype(np.int16)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_folder(folder: Path, images: int) -> None:
    """The photos, a thousand to a sub-folder; every file is a file of its own, not a link."""
    rng = np.random.default_rng(0)
    originals = []
    for _ in range(min(DISTINCT, images)):
        synthetic_photo(rng).save(folder / "original.jpg", quality=85)
        originals.append((folder / "original.jpg").read_bytes())
        (folder / "original.jpg").unlink()
    for number in range(images):
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(originals[number % len(originals)])
    print(f"{images} JPEGs of {WIDTH}x{HEIGHT}, {np.mean([len(o) for o in originals]) / 1000:.0f} kB on average")


def pillow_decode(job: tuple[str, int]) -> int:
    path, size = job
    return Image.open(path).convert("RGB").resize((size, size)).width


def time_pillow(paths: list[str], size: int, cores: int) -> float:
    """Images per second of a warm pool that only decodes and resizes."""
    with multiprocessing.Pool(cores) as pool:
        pool.map(pillow_decode, [(path, size) for path in paths[: 4 * cores]])
        begin = time.perf_counter()
        for _ in pool.imap_unordered(pillow_decode, ((path, size) for path in paths), chunksize=16):
            pass
        return len(paths) / (time.perf_counter() - begin)


def time_ingestion(folder: Path, size: int, memory_limit: int) -> tuple[dict, float]:
    """What the ingestion says of itself, and the peak of its resident memory in MB, children included."""
    cache = tempfile.mkdtemp(dir=folder.parent)
    command = [sys.executable, "-c", INGEST, str(folder), cache, str(size), str(memory_limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = [0.0]
        watcher = threading.Thread(target=watch_memory, args=(process, peak))
        watcher.start()
        output, _ = process.communicate()
        watcher.join()
    shutil.rmtree(cache)
    if process.returncode:
        raise SystemExit("the ingestion failed")
    return json.loads(output), peak[0]


def watch_memory(process: subprocess.Popen, peak: list[float]) -> None:
    while process.poll() is None:
        peak[0] = max(peak[0], sum(resident_mb(pid) for pid in family(process.pid)))
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # ended meanwhile
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def resident_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(lines[0].split()[1]) / 1000 if lines else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="?", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--turn", type=int, default=4000, help="images of one turn")
    parser.add_argument("--folder", type=Path, help="where the images are written (a new folder in it; default: /tmp)")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place) / "photos"
        folder.mkdir()
        write_folder(folder, given.images)
        paths = sorted(str(path) for path in folder.rglob("*.jpg"))
        # A few thousand a turn give a steady rate; the whole is read once more, for the memory of the full job.
        share = min(given.turn, len(paths) // given.rounds)
        ratios = []
        for turn in range(given.rounds):
            part = Path(place) / f"part{turn}"
            part.mkdir()
            for path in paths[turn * share : (turn + 1) * share]:
                os.link(path, part / Path(path).name)
            before = time_pillow(paths[turn * share : (turn + 1) * share], given.size, cores)
            about, _ = time_ingestion(part, given.size, memory_limit=0)
            after = time_pillow(paths[turn * share : (turn + 1) * share], given.size, cores)
            ours, pillow = about["images"] / about["seconds"], (before + after) / 2
            ratios.append(ours / pillow)
            print(f"turn {turn}: ours {ours:.0f}/s, Pillow {before:.0f} and {after:.0f}/s, ratio {ours / pillow:.2f}")
        about, peak = time_ingestion(folder, given.size, memory_limit=1 << 30)
        print(f"all {about['images']} into {about['kind']}: {about['seconds']:.0f} s, peak memory {peak:.0f} MB")
        print(f"ratio {np.mean(ratios):.2f} (lowest {min(ratios):.2f}), {given.size} px, {cores} cores")


if __name__ == "__main__":
    main()
