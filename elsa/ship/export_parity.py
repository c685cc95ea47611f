"""Does an exported file score as the trained model does? Asked at every export, of real or generated images.

Shape suffix: N images.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import interpolate

from elsa.errors import UserError
from elsa.ship.export_onnx import Run
from elsa.trust.calibrate import p_values, verdicts

TOLERANCE = 1e-4
LEAST_RANK_CORRELATION = {"fp16": 0.99, "int8": 0.9}
GENERATED = 32
BATCH = 16


@dataclass(frozen=True)
class Parity:
    """How an exported file's answers compare with the trained model's."""

    images: int
    kind: str
    """real or generated"""
    largest_difference: float
    rank_correlation: float
    verdicts_changed: int

    def line(self) -> str:
        """The comparison in words."""
        return (
            f"Parity on {self.images:,} {self.kind} images: scores differ by at most {self.largest_difference:.1e}, "
            f"rank correlation {self.rank_correlation:.4f}, {self.verdicts_changed} verdicts changed"
        )


def answers(run: Run, images_N: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Scores, p-values and verdicts; the first image is sent alone, so that batches of two sizes are met."""
    batches = [images_N[:1], *(images_N[start : start + BATCH] for start in range(1, len(images_N), BATCH))]
    score, p_value, verdict = (np.concatenate(parts) for parts in zip(*map(run, batches), strict=True))
    return score, p_value, verdict


def compare(
    exported: tuple[NDArray, NDArray, NDArray], trained_N: NDArray, threshold: float, kind: str, precision: str
) -> Parity:
    """The comparison, or a refusal: fp32 must give the scores to 1e-4 and the verdicts, the others the ranking."""
    score_N, _, verdict_N = exported
    expected = np.array([word == "anomaly" for word in verdicts(torch.from_numpy(trained_N), threshold)])
    parity = Parity(
        images=len(trained_N),
        kind=kind,
        largest_difference=float(np.abs(score_N - trained_N).max()),
        rank_correlation=float(spearmanr(score_N, trained_N).statistic),
        verdicts_changed=int((verdict_N != expected).sum()),
    )
    if precision == "fp32":
        near = np.abs(trained_N - threshold) <= TOLERANCE
        agrees = parity.largest_difference <= TOLERANCE and bool((near | (verdict_N == expected)).all())
    else:
        agrees = parity.rank_correlation >= LEAST_RANK_CORRELATION[precision]
    if not agrees:  # also where a number is NaN
        raise UserError(f"the exported file does not score as MODEL does, nothing was written. {parity.line()}")
    return parity


def check_consistent(exported: tuple[NDArray, NDArray, NDArray], calibration: Tensor, threshold: float) -> None:
    """The file's p-values and verdicts are those of its own scores."""
    score_N, p_value_N, verdict_N = exported
    expected = p_values(torch.from_numpy(score_N), calibration).numpy()
    if np.abs(p_value_N - expected).max() > 1e-12 or (verdict_N != (score_N > threshold)).any():
        raise UserError("the exported file's p-values are not those of its scores, nothing was written")


def generated_images(channels: int, size: int, count: int = GENERATED) -> Tensor:
    """uint8 images of coloured clouds, coarse to fine, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    clouds = torch.zeros(count, channels, size, size)
    for cells in (2, 5, 13):
        noise = torch.randn(count, channels, cells, cells, generator=generator)
        clouds += interpolate(noise, (size, size), mode="bicubic")
    return (128 + 50 * clouds).clamp(0, 255).to(torch.uint8)


def generated_vectors(memory_MD: Tensor, count: int = GENERATED) -> Tensor:
    """float32 vectors between remembered ones, the first near them and the last far away."""
    generator = torch.Generator().manual_seed(0)
    chosen = memory_MD[torch.randint(len(memory_MD), (count,), generator=generator)].float()
    noise = torch.randn(chosen.shape, generator=generator) / chosen.shape[1] ** 0.5
    return chosen + torch.linspace(0, 1, count)[:, None] * noise
