"""How fast training and scoring are, against the loop people usually write and against the card's own limits.

All variants run in turns within one process, so that what else the machine does hits them alike; figures are medians
over the turns with the lowest and the highest.
"""

import math
import os
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from elsa.augment import draw, two_views
from elsa.bench.plain import loader, score_batch, train_step
from elsa.bench.run import append_line, provenance
from elsa.bench.time_to import RECIPE, TARGET, learn_ours, learn_plainly
from elsa.config import ElsaConfig, method_config
from elsa.data.demo import load_demo
from elsa.data.parallel import available_cores
from elsa.elsa import Elsa
from elsa.finetune import finetune_loss
from elsa.memory import peak_memory_mb
from elsa.nets import Net, build_net, channels_last
from elsa.pretrain import contrastive_loss
from elsa.seeds import generator
from elsa.training import TrainStep, build_optimizer, tuned

WARM_UP = 3  # calls before the clock runs: compilation, allocator, worker start


@dataclass(frozen=True)
class Measured:
    """One figure: the median over the turns, and its spread."""

    what: str
    variant: str
    value: float
    low: float
    high: float
    unit: str


def measure_speed(
    device: str, settings: dict[str, Any], size: int, channels: int, turns: int, seconds: float
) -> list[Measured]:
    """Views per second of augmentation, both training steps and scoring, ours and the plain loop's, in turns."""
    config = method_config(**settings)
    work = _Work(config, torch.device(device), size, channels)
    variants: dict[tuple[str, str], Callable[[], int]] = {
        ("augment", "elsa"): work.augment,
        ("augment", "plain"): work.plain_augment,
        ("pretrain", "elsa"): work.pretrain,
        ("pretrain", "plain"): work.plain_pretrain,
        ("finetune", "elsa"): work.finetune,
        ("score", "elsa"): work.score,
        ("score", "plain"): work.plain_score,
    }
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in variants}
    for turn in range(turns):
        for key, step in variants.items():
            rates[key].append(_rate(step, work.device, seconds, warm_up=WARM_UP if turn == 0 else 1))
    figures = [_measured(what, variant, found, "views/s") for (what, variant), found in rates.items()]
    for what in ("augment", "pretrain", "score"):  # ratios are taken within a turn
        ratios = [ours / theirs for ours, theirs in zip(rates[what, "elsa"], rates[what, "plain"], strict=True)]
        figures.append(_measured(what, "elsa / plain", ratios, "times"))
    figures += _limits(work)
    return [*figures, _peak_memory(work.device)]


def measure_time_to(device: str, workers: int, target: float = TARGET, **recipe: Any) -> list[Measured]:
    """Seconds until the AUROC on the embedded garments first reaches the target, for plain Elsa on the tiny network."""
    config = method_config("elsa", "cpu", **{**RECIPE, **recipe})
    demo = load_demo(0)
    found = {
        "elsa": learn_ours(config, demo, torch.device(device), 0).seconds_to(target),
        "plain": learn_plainly(config, demo, torch.device(device), 0, workers).seconds_to(target),
    }
    what = f"time to AUROC {target:g}"
    figures = [Measured(what, who, when, when, when, "s") for who, when in found.items() if when is not None]
    if len(figures) == len(found):
        ratio = figures[1].value / figures[0].value
        figures.append(Measured(what, "plain / elsa", ratio, ratio, ratio, "times"))
    return figures


def speed_lines(figures: list[Measured], device: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of results/speed.jsonl; one run has one id, so that ratios are taken within it."""
    run = uuid.uuid4().hex[:12]
    origin = {**provenance(device), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    return [
        {
            "run": run,
            "what": figure.what,
            "variant": figure.variant,
            "value": round(figure.value, 3),
            "low": round(figure.low, 3),
            "high": round(figure.high, 3),
            "unit": figure.unit,
            "settings": settings,
            **origin,
        }
        for figure in figures
    ]


def write_speed(figures: list[Measured], results: Path, device: str, settings: dict[str, Any]) -> list[str]:
    """Append the run to the results; what to print."""
    for line in speed_lines(figures, device, settings):
        append_line(results, line)
    width = max(len(figure.what) + len(figure.variant) for figure in figures) + 2
    return [
        f"{f'{figure.what}, {figure.variant}':{width}}  {figure.value:>12,.1f} {figure.unit:8} "
        f"({figure.low:,.1f} to {figure.high:,.1f})"
        for figure in figures
    ]


def views_flops(net: nn.Module, channels: int, size: int) -> tuple[float, float]:
    """Floating-point operations of one view: forward, and forward with backward."""
    # counted on a copy's meta device: no arithmetic is done
    with torch.device("meta"):
        x = torch.empty(2, channels, size, size)
    net = net.to("meta")
    with FlopCounterMode(display=False) as forward:
        raw, logits = net(x)
    with FlopCounterMode(display=False) as both:
        raw, logits = net(x)
        (raw.sum() + logits.sum()).backward()
    return forward.get_total_flops() / 2, both.get_total_flops() / 2


class _Work:
    """The pieces that are timed; each call does a little and says how many views it made."""

    def __init__(self, config: ElsaConfig, device: torch.device, size: int, channels: int):
        self.config, self.device, self.size, self.channels = config, device, size, channels
        shape = (2048, channels, size, size)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(0, "speed")).to(device)
        self.labels = torch.zeros(config.finetune_batch, dtype=torch.int8, device=device)
        prototypes = torch.randn(config.num_prototypes, 128, generator=generator(0, "prototypes"))
        self.prototypes = F.normalize(prototypes, dim=1).to(device)
        self.draws = generator(0, "draws", device=device)
        self.net, self.plain_net, self.tuned_net = self._net(), self._fresh().to(device), self._net()
        optimizer = build_optimizer(config.pretrain_optimizer, self.net, 1e-4, config.pretrain_weight_decay)
        self.pretrain_step = TrainStep(contrastive_loss, self.net, optimizer, config)
        optimizer = build_optimizer("adam", self.tuned_net, 1e-4, 0.0)
        self.finetune_step = TrainStep(finetune_loss, self.tuned_net, optimizer, config)
        self.plain_optimizer = torch.optim.Adam(self.plain_net.parameters(), 1e-4)
        self.model = Elsa(device=str(device))
        self.model.config, self.model.net_, self.model.prototypes_ = config, self._net().eval(), self.prototypes
        self.model.shape_ = (channels, size, size)
        workers = available_cores()
        pixels = self.images.cpu().numpy()
        area = config.crop_area_min
        self.pairs = loader(pixels, 2, config.shifts, area, config.pretrain_batch, workers)
        self.ensembles = loader(pixels, config.views, config.shifts, area, 16, workers)
        self.batches: dict[str, Any] = {}

    def _fresh(self) -> Net:
        config = self.config
        return build_net(
            config.encoder, config.stem, self.channels, self.size, config.shifts, generator(0, "initial weights")
        )

    def _net(self) -> Net:
        return channels_last(self._fresh(), self.device)

    def augment(self) -> int:
        config, batch = self.config, self.config.pretrain_batch
        views = 2 * config.shifts * batch
        function = tuned(two_views, self.device)
        function(
            self.images[:batch], draw(views, self.draws), config.shifts, config.crop_area_min, config.crop_area_max
        )
        return views

    def pretrain(self) -> int:
        config, batch = self.config, self.config.pretrain_batch
        views = 2 * config.shifts * batch
        self.net.train()
        self.pretrain_step(self.images[:batch], draw(views, self.draws))
        return views

    def finetune(self) -> int:
        config, batch = self.config, self.config.finetune_batch
        views = 2 * config.shifts * batch
        self.tuned_net.train(config.finetune_batchnorm == "train")
        self.finetune_step(self.prototypes, self.images[:batch], self.labels, draw(views, self.draws))
        return views

    def score(self) -> int:
        images = self.images[: 2048 if self.device.type == "cuda" else 256]
        self.model.anomaly_score(images)
        return len(images) * self.config.views * self.config.shifts

    def plain_augment(self) -> int:
        return self._next("pairs").shape[:2].numel()

    def plain_pretrain(self) -> int:
        views = self._next("pairs").to(self.device)
        self.plain_net.train()
        train_step(self.plain_net, views, self.config.shifts, self.config.pretrain_tau, self.plain_optimizer)
        return views.shape[:2].numel()

    def plain_score(self) -> int:
        views = self._next("ensembles").to(self.device)
        self.plain_net.eval()
        score_batch(self.plain_net, views, self.prototypes, self.config.shifts, self.config.score_tau)
        return views.shape[:2].numel()

    def _next(self, which: str) -> Tensor:
        """The next batch of a data loader that starts again when it is through."""
        for _ in range(2):
            if which not in self.batches:
                self.batches[which] = iter(getattr(self, which))
            batch = next(self.batches[which], None)
            if batch is not None:
                return batch
            del self.batches[which]
        raise AssertionError("a fresh loader has batches")

    def rest(self, which: str) -> None:
        """Stop the workers of a loader, which would go on filling their queue while another variant is timed."""
        self.batches.pop(which, None)


def _rate(step: Callable[[], int], device: torch.device, seconds: float, warm_up: int) -> float:
    for _ in range(warm_up):
        step()
    _wait(device)
    views, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        views += step()
        _wait(device)
    rate = views / (time.perf_counter() - began)
    owner = getattr(step, "__self__", None)
    if isinstance(owner, _Work):
        owner.rest("pairs")
        owner.rest("ensembles")
    return rate


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _limits(work: _Work) -> list[Measured]:
    """The rate of a large matrix product here, and the views/s it would allow if nothing else took time."""
    side = 8192 if work.device.type == "cuda" else 1024
    kind = torch.bfloat16 if work.device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=work.device, dtype=kind) for _ in range(2))

    def product() -> int:
        torch.mm(a, b)
        return 1

    rates = [_rate(product, work.device, 1.0, WARM_UP) * 2 * side**3 for _ in range(3)]
    forward, both = views_flops(work._net(), work.channels, work.size)
    found = [_measured("limit", f"matrix product {side}", [rate / 1e12 for rate in rates], "TFLOP/s")]
    for what, flops in (("train", both), ("score", forward)):
        found.append(_measured("limit", what, [rate / flops for rate in rates], "views/s"))
    return found


def _peak_memory(device: torch.device) -> Measured:
    """What the tensors took of a GPU at most, or this process of the host."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 1e9
    else:
        peak = (peak_memory_mb() or math.nan) / 1e3
    return Measured("memory", "peak", peak, peak, peak, "GB")


def _measured(what: str, variant: str, found: list[float], unit: str) -> Measured:
    return Measured(what, variant, statistics.median(found), min(found), max(found), unit)
