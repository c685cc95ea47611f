"""From scored shards to what the user asked for: one table, most anomalous first, or a folder of shards.

P-values and verdicts are given here, when all scores are known. Memory holds one shard, or one bucket of the ranking.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.output import whole_file
from elsa.trust.calibrate import p_values

SCORED = pa.schema([("path", pa.string()), ("score", pa.float64()), ("error", pa.string())])
TABLE = pa.schema(
    [
        ("path", pa.string()),
        ("score", pa.float64()),
        ("p_value", pa.float64()),
        ("verdict", pa.string()),
        ("error", pa.string()),
    ]
)
BUCKET_ROWS = 500_000
SAMPLED = 1000  # scores of each shard that decide where the buckets of a ranking end
CSV_ROWS = 10_000
SHOWN = 5
BROKEN_SHOWN = 3
RANKED = [("score", "descending"), ("path", "ascending")]


@dataclass(frozen=True)
class Judge:
    """What turns scores into p-values and verdicts; without a calibration or a limit it keeps silent."""

    calibration: Tensor | None
    limit: float | None

    def __call__(self, scored: pa.Table) -> pa.Table:
        """The scored rows with their p-values and verdicts."""
        score, nothing = scored["score"].combine_chunks(), pa.nulls(len(scored), pa.float64())
        p, verdict = nothing, pa.array([""] * len(scored))
        if self.calibration is not None:
            found = p_values(torch.from_numpy(score.drop_null().to_numpy().copy()), self.calibration)
            p = pc.replace_with_mask(nothing, score.is_valid(), pa.array(found.numpy()))
        if self.limit is not None:
            verdict = pc.fill_null(pc.if_else(pc.greater(score, self.limit), "anomaly", "normal"), "")
        return pa.table([scored["path"], score, p, verdict, scored["error"]], schema=TABLE)


@dataclass
class Summary:
    """What to tell the user about all rows."""

    scored: int = 0
    anomalies: int = 0
    broken: int = 0
    some_broken: list[tuple[str, str]] = field(default_factory=list)
    highest: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a judged table."""
        fine = table.filter(table["score"].is_valid())
        self.scored += len(fine)
        self.anomalies += pc.sum(pc.equal(fine["verdict"], "anomaly")).as_py() or 0
        self.broken += len(table) - len(fine)
        if len(fine) < len(table):
            lost = table.filter(table["score"].is_null()).slice(0, BROKEN_SHOWN)
            new = list(zip(lost["path"].to_pylist(), lost["error"].to_pylist(), strict=True))
            self.some_broken = (self.some_broken + new)[:BROKEN_SHOWN]
        best = fine.take(pc.select_k_unstable(fine, SHOWN, RANKED)) if len(fine) else fine
        self.highest = sorted(self.highest + best.to_pylist(), key=lambda row: (-row["score"], row["path"]))[:SHOWN]


def write_ranked(out: Path, shards: Sequence[Path], judge: Judge, work: Path) -> Summary:
    """Write all rows as one .csv or .parquet, most anomalous first, those without a score at the end."""
    summary = Summary()
    with whole_file(out) as partial, _sink(partial, out.suffix) as write:
        for bucket in _buckets(shards, work):
            table = judge(bucket.sort_by(RANKED))
            summary.add(table)
            write(table)
    return summary


def write_shards(folder: Path, names: Sequence[str], shards: Sequence[Path], judge: Judge) -> Summary:
    """Write each shard with its verdicts, rows in the order of the source."""
    summary = Summary()
    for name, shard in zip(names, shards, strict=True):
        table = judge(pq.read_table(shard))
        summary.add(table)
        with whole_file(folder / name) as partial:
            pq.write_table(table, partial)
    return summary


def scores_of(shards: Sequence[Path]) -> Iterator[NDArray[np.float64]]:
    """The scores of each shard, without those that are missing."""
    for shard in shards:
        yield pq.read_table(shard, columns=["score"])["score"].combine_chunks().drop_null().to_numpy()


def _buckets(shards: Sequence[Path], work: Path) -> Iterator[pa.Table]:
    """All rows in tables of a bounded size, every score of one higher than every score of the next."""
    rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
    count = -(-rows // BUCKET_ROWS)
    if count <= 1:
        yield pa.concat_tables([pq.read_table(shard) for shard in shards])
        return
    sample = np.concatenate([scores[:: -(-len(scores) // SAMPLED) or 1] for scores in scores_of(shards)])
    highest_first = -np.unique(-np.quantile(sample, np.arange(1, count) / count)) if len(sample) else sample
    places = [work / f"bucket-{number:04d}.parquet" for number in range(len(highest_first) + 1)]
    writers = [pq.ParquetWriter(place, SCORED) for place in places]
    try:
        for shard in shards:
            table = pq.read_table(shard)
            # the number of edges above a score; a missing score is NaN, which sorts behind all edges
            number = np.searchsorted(-highest_first, -table["score"].to_numpy(), side="left")
            for chosen in np.unique(number).tolist():
                writers[chosen].write_table(table.filter(pa.array(number == chosen)))
    finally:
        for writer in writers:
            writer.close()
    for place in places:
        yield pq.read_table(place)


@contextmanager
def _sink(path: Path, suffix: str) -> Iterator[Callable[[pa.Table], None]]:
    """What takes judged tables one after the other and appends them to a file."""
    if suffix == ".parquet":
        with pq.ParquetWriter(path, TABLE) as writer:
            yield writer.write_table
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, TABLE.names, lineterminator="\n")
        rows.writeheader()

        def write(table: pa.Table) -> None:
            for batch in table.to_batches(CSV_ROWS):
                rows.writerows(batch.to_pylist())

        yield write
