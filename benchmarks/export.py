"""What an export costs and gains: parity, AUROC and pace of each precision beside the trained model, on two threads.

    python benchmarks/export.py MODEL CALIBRATE TEST [--results results/export.jsonl]

CALIBRATE and TEST are sources of images, TEST with labels; nothing of TEST enters an export. Paces are medians of
rounds in which all variants take turns, in batches of 16, so that what else the machine does hits all alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from elsa.bench.lines import commit
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.progress import silent
from elsa.saved import open_model
from elsa.ship.export import export_model
from elsa.trust.metrics import auroc

THREADS, BATCH, ROUNDS, TIMED = 2, 16, 5, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibrate", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(THREADS)
    detector, about = open_model(asked.model)
    loaded = load_images(open_source(asked.test), **about["preprocessing"])
    images, is_anomaly = loaded.images[0 : len(loaded)], np.array([word == "anomaly" for word in loaded.labels])
    trained = detector.anomaly_score(images).numpy()
    variants: dict[str, Callable[[np.ndarray], tuple]] = {
        "torch": lambda part: (detector.anomaly_score(torch.from_numpy(part)).numpy(),)
    }
    sizes = {"torch": 0}
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "fp16", "int8"):
            file = Path(folder) / f"{precision}.onnx"
            calibrate = asked.calibrate if precision == "int8" else None
            export_model(
                asked.model, file, format=None, precision=precision, calibrate=calibrate, views=None,
                false_alarms=None, progress=silent,
            )  # fmt: skip
            variants[precision], sizes[precision] = opened(file), file.stat().st_size
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            began = time.perf_counter()
            for start in range(0, TIMED, BATCH):
                run(images[start : start + BATCH].numpy())
            seconds[name].append(time.perf_counter() - began)
    limit = None
    for name, run in variants.items():
        parts = [run(images[start : start + BATCH].numpy()) for start in range(0, len(images), BATCH)]
        score = np.concatenate([part[0] for part in parts])
        verdict = np.concatenate([part[1] for part in parts]) if name != "torch" else None
        if name == "fp32":
            limit = verdict
        line = {
            "what": "export",
            "precision": name,
            "images": len(images),
            "size": about["preprocessing"]["size"],
            "largest_difference": float(np.abs(score - trained).max()),
            "auroc": round(100 * auroc(score, is_anomaly), 3),
            "verdicts_unlike_fp32": None if verdict is None else int((verdict != limit).sum()),
            "false_alarms": None if verdict is None else round(float(verdict[~is_anomaly].mean()), 4),
            "images_per_second": round(TIMED / statistics.median(seconds[name]), 1),
            "file_mb": round(sizes[name] / 1e6, 1),
            "threads": THREADS,
            "commit": commit(),
            "command": "python benchmarks/export.py MODEL CALIBRATE TEST",
        }
        print(json.dumps(line), flush=True)
        if asked.results:
            with asked.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def opened(file: Path) -> Callable[[np.ndarray], tuple]:
    """Score and verdict by ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, THREADS
    session = onnxruntime.InferenceSession(file.read_bytes(), options)
    return lambda part: tuple(session.run(["score", "verdict"], {"images": part}))


if __name__ == "__main__":
    main()
