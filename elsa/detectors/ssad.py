"""SSAD: semi-supervised support vector data description in its convex form (Goernitz et al., JAIR 2013), RBF kernel.

Primal, with y = -1 for labelled anomalies and +1 otherwise:

    min  |w|^2 / 2 - rho - kappa * gamma + sum_i C_i xi_i
    s.t. w.phi(x_i) >= rho - xi_i                 for unlabelled images
         y_j (w.phi(x_j) - rho) >= gamma - xi_j   for labelled images
         gamma >= 0, xi >= 0

Its dual has one number alpha in [0, C] for each image and is what is solved here:

    min  alpha' (y y' K) alpha / 2   s.t.  y' alpha = 1,  sum of alpha over labelled images >= kappa

With C = 1 / (nu N) and no labelled anomalies this is the one-class SVM. The score is rho - w.phi(x).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from elsa.detectors.inputs import Images, as_rows, checked, hold_out, not_anomalies, scored, subsample
from elsa.detectors.networks import refuse_below, refuse_unless_positive, settings_of
from elsa.detectors.shallow import median_squared_distance, squared_distances
from elsa.errors import UserError
from elsa.labels import ANOMALY, UNLABELLED
from elsa.progress import Progress, silent

MOST_TRAINED_ON = 8_000  # three matrices of N x N doubles: 1.5 GB
MOST_SELECTED_ON = 2_000
MOST_STEPS = 100  # of the interior-point method; about 20 are needed
TOLERANCE = 1e-9  # of the gap between primal and dual, beside an objective of about 0.1 to 1
STAY_INSIDE = 0.99  # share of the way to the nearest bound that a step may take
SUPPORT = 1e-6  # what a multiplier must exceed, as a share of its bound, to count as a support vector
Solver = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SSADConfig:
    """Settings of SSAD."""

    kappa: float = 1.0
    """What the margin of the labelled images weighs; their multipliers sum to at least this."""
    nu: float = 0.1
    """Share of the unlabelled images that may lie outside."""
    labelled_cost: float = 1.0
    """C of a labelled image: what it costs to leave it on the wrong side, by its distance from the margin."""
    kernel_gamma: float = 0.0
    """Of exp(-gamma |a - b|^2); 0 takes one over the median squared distance between training images."""

    def __post_init__(self) -> None:
        refuse_below(self, 0, ["kappa", "kernel_gamma"])
        refuse_unless_positive(self, ["nu", "labelled_cost"])
        if self.nu > 1:
            raise UserError(f"nu={self.nu}: the share of images left outside is at most 1")


def solve_dual(
    kernel_NN: Tensor, y_N: Tensor, is_labelled_N: Tensor, upper_N: Tensor, kappa: float
) -> tuple[Tensor, float]:
    """The multipliers alpha and rho of the dual above, by Mehrotra's interior-point method in double precision.

    The inequality of the labelled images becomes an equality with a slack variable, which has a bound on one side only.
    """
    slack = bool(is_labelled_N.any())
    num, size = len(y_N), len(y_N) + slack
    constraints = torch.zeros(1 + slack, size, dtype=torch.float64, device=y_N.device)
    constraints[0, :num] = y_N
    target = torch.tensor([1.0, kappa][: 1 + slack], dtype=torch.float64, device=y_N.device)
    upper = torch.cat([upper_N, upper_N.new_full((size - num,), torch.inf)])
    if slack:
        constraints[1, :num], constraints[1, num] = is_labelled_N.double(), -1.0
    quadratic_NN = kernel_NN * y_N[:, None] * y_N

    def times(v: Tensor) -> Tensor:
        product = torch.zeros_like(v)
        product[:num] = quadratic_NN @ v[:num]
        return product

    v = torch.where(upper.isfinite(), upper / 2, torch.ones_like(upper))
    low, high = torch.ones_like(v), torch.where(upper.isfinite(), 1.0, 0.0).double()  # multipliers of the bounds
    prices = torch.zeros(1 + slack, dtype=torch.float64, device=y_N.device)
    num_bounds = int(size + upper.isfinite().sum())
    for _ in range(MOST_STEPS):
        room = torch.where(upper.isfinite(), upper - v, 1.0)
        dual_residual = times(v) - constraints.T @ prices - low + high
        primal_residual = constraints @ v - target
        gap = (v @ low + room @ high) / num_bounds
        error = max(gap * num_bounds, primal_residual.abs().max(), dual_residual.abs().max())
        if error < TOLERANCE:
            break
        solve = _newton_solver(quadratic_NN, low / v + high / room, constraints)
        direction = partial(_direction, solve, v, room, low, high, dual_residual, primal_residual)

        # straight at the solution first; how far that gets says how much to stay in the middle
        dv, _, dlow, dhigh = direction(-v * low, -room * high)
        along, along_dual = _longest(v, dv, upper - v), _longest_dual(low, dlow, high, dhigh)
        reached = (v + along * dv) @ (low + along_dual * dlow) + (room - along * dv) @ (high + along_dual * dhigh)
        centred = gap * (reached / num_bounds / gap) ** 3
        from_high = torch.where(upper.isfinite(), centred, 0.0) - room * high + dv * dhigh
        dv, dprices, dlow, dhigh = direction(centred - v * low - dv * dlow, from_high)
        along, along_dual = _longest(v, dv, upper - v), _longest_dual(low, dlow, high, dhigh)
        v = v + STAY_INSIDE * along * dv
        low, high = low + STAY_INSIDE * along_dual * dlow, high + STAY_INSIDE * along_dual * dhigh
        prices = prices + STAY_INSIDE * along_dual * dprices
    else:
        assert error < 1e-5, f"the interior-point method stopped at an error of {error:.1e}"
    return v[:num], float(prices[0])


def _newton_solver(quadratic_NN: Tensor, diagonal: Tensor, constraints: Tensor) -> Solver:
    """Solves [Q + D, -A'; A, 0] [dv; dp] = [r; s] with one Cholesky factor; the slack has no part in Q."""
    num = len(quadratic_NN)
    damped_NN = quadratic_NN.clone()
    damped_NN.diagonal().add_(diagonal[:num])
    factor_NN = torch.linalg.cholesky(damped_NN)

    def inverse(columns: Tensor) -> Tensor:
        return torch.cat([torch.cholesky_solve(columns[:num], factor_NN), columns[num:] / diagonal[num:, None]])

    spread = inverse(constraints.T.contiguous())
    small = constraints @ spread

    def solve(right: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        free = inverse(right[:, None])[:, 0]
        dprices = torch.linalg.solve(small, target - constraints @ free)
        return free + spread @ dprices, dprices

    return solve


def _direction(
    solve: Solver,
    v: Tensor,
    room: Tensor,
    low: Tensor,
    high: Tensor,
    dual_residual: Tensor,
    primal_residual: Tensor,
    low_target: Tensor,
    high_target: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Newton's step for v, the prices and both kinds of multipliers, to the given changes of their products."""
    dv, dprices = solve(-dual_residual + low_target / v - high_target / room, -primal_residual)
    return dv, dprices, (low_target - low * dv) / v, (high_target + high * dv) / room


def _longest(v: Tensor, dv: Tensor, room: Tensor) -> Tensor:
    """The share of a step, at most 1, after which a variable first meets a bound."""
    ratios = torch.cat([v[dv < 0] / -dv[dv < 0], room[dv > 0] / dv[dv > 0], v.new_ones(1)])
    return ratios.min()


def _longest_dual(low: Tensor, dlow: Tensor, high: Tensor, dhigh: Tensor) -> Tensor:
    ratios = [low[dlow < 0] / -dlow[dlow < 0], high[dhigh < 0] / -dhigh[dhigh < 0], low.new_ones(1)]
    return torch.cat(ratios).min()


class SSADDetector:
    """A boundary around normal images that labelled anomalies stay out of; pixels in [0, 1], or vectors as they are."""

    settings_class = SSADConfig

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, **settings: Any):
        self.config = settings_of(SSADConfig, settings)
        self.seed, self.progress = seed, progress
        self.device = torch.device("cpu" if device.startswith("mps") else device)  # mps has no double precision

    def fit(self, images: Images, labels: Sequence[str | None]) -> Self:
        """Find the boundary from uint8 images or float vectors and their label words."""
        config = self.config
        codes = checked(images, labels)
        train, held_out = hold_out(not_anomalies(codes), self.seed)
        train = torch.cat([train, (codes == ANOMALY).nonzero().flatten()])
        train = _at_most(train, codes, self.seed)
        codes = codes[train].to(self.device)
        # A margin lies between two kinds: without labelled anomalies, normals are as good as unlabelled.
        is_labelled = (codes != UNLABELLED) & (codes == ANOMALY).any()
        rows_ND = as_rows(images, train).to(self.device)
        y_N = torch.where(codes == ANOMALY, -1.0, 1.0).double()
        num_unlabelled = int((~is_labelled).sum())
        free = 1 / (config.nu * max(1, num_unlabelled))
        upper_N = torch.where(is_labelled, config.labelled_cost, free).double()
        _check_feasible(config, y_N, is_labelled, upper_N)
        some = subsample(torch.arange(len(rows_ND)), MOST_SELECTED_ON, self.seed).to(self.device)
        self.gamma_ = config.kernel_gamma or 1 / median_squared_distance(rows_ND[some])
        kernel_NN = torch.exp(-self.gamma_ * squared_distances(rows_ND, rows_ND))
        self.progress("kernel", 1, 2, {"gamma": self.gamma_})
        alpha_N, self.rho_ = solve_dual(kernel_NN, y_N, is_labelled, upper_N, config.kappa)
        kept = alpha_N > SUPPORT * upper_N
        self.support_MD_, self.weight_M_ = rows_ND[kept], (alpha_N * y_N)[kept]
        self.calibration_ = self.anomaly_score(as_rows(images, held_out))
        self.progress("solve", 2, 2, {"support vectors": float(len(self.support_MD_))})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """rho - w.phi(x), how far outside the boundary; higher is more anomalous."""
        return scored(images, self.support_MD_.shape[1], self._score)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        tensors = {"support": self.support_MD_, "weight": self.weight_M_, "calibration": self.calibration_}
        about = {"settings": asdict(self.config), "seed": self.seed, "gamma": self.gamma_, "rho": self.rho_}
        return tensors, about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(seed=about["seed"], device=device, progress=progress, **about["settings"])
        model.gamma_, model.rho_ = about["gamma"], about["rho"]
        model.support_MD_ = tensors["support"].to(model.device)
        model.weight_M_, model.calibration_ = tensors["weight"].to(model.device), tensors["calibration"]
        return model

    def _score(self, rows_BD: Tensor) -> Tensor:
        distances_BM = squared_distances(rows_BD.to(self.device), self.support_MD_)
        return self.rho_ - torch.exp(-self.gamma_ * distances_BM) @ self.weight_M_


def _at_most(train: Tensor, codes: Tensor, seed: int) -> Tensor:
    """Every labelled image and as many unlabelled ones as the matrices have room for."""
    is_labelled = codes[train] != UNLABELLED
    labelled = subsample(train[is_labelled], MOST_TRAINED_ON // 2, seed)
    unlabelled = subsample(train[~is_labelled], MOST_TRAINED_ON - len(labelled), seed)
    return torch.cat([unlabelled, labelled])


def _check_feasible(config: SSADConfig, y_N: Tensor, is_labelled: Tensor, upper_N: Tensor) -> None:
    """Refuse settings under which no multipliers satisfy the constraints, saying what is possible."""
    if not is_labelled.any():
        return
    normals, anomalies = float(upper_N[is_labelled & (y_N > 0)].sum()), float(upper_N[y_N < 0].sum())
    unlabelled = float(upper_N[~is_labelled].sum())
    # What anomalies give must be matched by the others, beside the sum of 1, and the same the other way round.
    anomalies = min(anomalies, normals + unlabelled - 1)
    reach = anomalies + min(normals, 1 + anomalies)
    if not config.kappa < reach:
        raise UserError(
            f"kappa={config.kappa} with nu={config.nu} and labelled_cost={config.labelled_cost} has no solution for "
            f"{int(is_labelled.sum())} labelled images: kappa must be below {max(reach, 0):.4g}; lower kappa or nu"
        )
