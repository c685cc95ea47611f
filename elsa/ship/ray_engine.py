"""The shards of a bulk job as a Ray Data pipeline: on this machine, or on the cluster that RAY_ADDRESS names.

Every machine of the cluster must see MODEL, SOURCE and --out under the same names. Ray restarts what dies.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

from elsa.errors import UserError
from elsa.ship.bulk import Job, worker_scorer


class ShardScorer:
    """One actor of the pipeline; it keeps its detector from shard to shard."""

    def __init__(self, job: Job) -> None:
        self.scorer = worker_scorer(job)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Score the shard of this row."""
        return {"rows": self.scorer.score(int(row["shard"]))}


def connect() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or started on this machine; a user's own connection is kept."""
    try:
        import ray
    except ImportError as error:
        raise UserError("--engine ray needs Ray: pip install elsa[ray]") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        try:
            dashboard = False if address == "local" else None  # a cluster has its own
            ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"RAY_ADDRESS={address}: {error}; start the cluster, or unset RAY_ADDRESS") from error
    return ray


def score_on_ray(job: Job, missing: list[int], workers: int) -> Iterator[int]:
    """The rows of each shard, as the shards are done."""
    ray = connect()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    shards = ray.data.from_items([{"shard": number} for number in missing], override_num_blocks=max(1, len(missing)))
    needs = {"num_cpus": 1} if job.device == "cpu" else {"num_gpus": 1}
    actors = ray.data.ActorPoolStrategy(size=min(workers, max(1, len(missing))))
    scored = shards.map(ShardScorer, fn_constructor_args=(job,), compute=actors, **needs)
    try:
        for row in scored.iter_rows():
            yield int(row["rows"])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
