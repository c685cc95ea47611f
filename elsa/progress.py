"""How work reports that it goes on: a plain callback, so that the method knows nothing of terminals."""

from collections.abc import Callable

# progress(stage, done, total, figures): e.g. ("pretrain", 3, 1000, {"loss": 5.1, "views/s": 91000.0})
Progress = Callable[[str, int, int, dict[str, float]], None]


def silent(stage: str, done: int, total: int, figures: dict[str, float]) -> None:
    """Report nothing."""
