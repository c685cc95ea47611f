"""What fewer views cost: one fitted network, scored with 1 to 10 weak views of each image.

Run: python benchmarks/views.py [--seeds 1 2 3] [--results FILE]
Plain Elsa from scratch as `elsa demo --from-scratch` fits it, on the embedded garments; AUROC on their 1,000 test
images. `--table` prints the lines of the results as docs/speed.md shows them.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

from elsa.bench.run import append_line, provenance
from elsa.data.demo import load_demo
from elsa.demo import FROM_SCRATCH
from elsa.elsa import Elsa
from elsa.trust.metrics import auroc

VIEWS = (1, 2, 4, 10)


def main() -> None:
    """Fit once a seed, score with each number of views."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=Path("results/views.jsonl"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(given.results)))
        return
    for seed in given.seeds:
        demo = load_demo(seed)
        model = Elsa(method="elsa", seed=seed, **FROM_SCRATCH).fit(demo.images, demo.labels)
        own = model.config
        for views in VIEWS:
            model.config = dataclasses.replace(own, views=views)
            began = time.process_time()
            scores = model.anomaly_score(demo.test_images)
            line = {
                "detector": "elsa",
                "normal": "bag",
                "seed": seed,
                "views": views,
                "auroc": round(100 * auroc(scores.numpy(), demo.test_anomaly.numpy()), 3),
                "cpu_seconds": round(time.process_time() - began, 3),
                "settings": FROM_SCRATCH,
                **provenance("cpu"),
            }
            append_line(given.results, line)
            print(json.dumps(line), flush=True)


def table(results: Path) -> list[str]:
    """Mean over the seeds, and against 10 views."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for text in results.read_text().splitlines():
        line = json.loads(text)
        found[line["views"]][line["seed"]] = line["auroc"]
    rows = ["| views | AUROC | against 10 views, by seed |", "|---|---|---|"]
    for views, by_seed in sorted(found.items()):
        cost = [f"{by_seed[seed] - found[10][seed]:+.2f}" for seed in sorted(by_seed)]
        rows.append(f"| {views} | {statistics.fmean(by_seed.values()):.2f} | {', '.join(cost)} |")
    return rows


if __name__ == "__main__":
    main()
