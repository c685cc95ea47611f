"""`elsa bench run --engine ray`: the cells of plans filled by as many processes as a Ray cluster has room for.

Each process runs the plan as if it were alone; the claims beside RESULTS see that none does another's work, so RESULTS
must lie on a file system with locks that all machines share.
"""

from pathlib import Path
from typing import Any

from elsa.bench.run import run_plan
from elsa.errors import UserError
from elsa.progress import silent
from elsa.ship.ray_engine import connect


def run_plan_on_ray(
    plans: list[str],
    results: Path,
    cifar10: Path | None,
    budget: float,
    device: str,
    settings: dict[str, Any],
    data: Path | None = None,
    encoders: Path | None = None,
) -> int:
    """Run missing cells on every GPU, or every core, of the cluster; how many were added."""
    ray = connect()
    kind = "GPU" if device.startswith("cuda") else "CPU"
    room = int(ray.cluster_resources().get(kind, 0))
    if not room:
        raise UserError(f"--device {device}: the Ray cluster has no {kind}; give another --device or another cluster")
    results = results.absolute()
    cifar10, data, encoders = (place and place.absolute() for place in (cifar10, data, encoders))

    def fill() -> int:
        return run_plan(plans, results, cifar10, budget, device, settings, silent, data=data, encoders=encoders)

    task = ray.remote(num_gpus=1)(fill) if kind == "GPU" else ray.remote(num_cpus=1)(fill)
    try:
        return sum(ray.get([task.remote() for _ in range(room)]))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
