"""What pre-training, fine-tuning and scoring share: batches, schedules, optimisers, precision, compilation."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from elsa.config import ElsaConfig
from elsa.lars import Lars

PROJECTION_BATCH = 1024  # views per forward pass outside training: one shape, so one compilation


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def tuned(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled for a GPU, once per process and shared by all experiments in it; as it is on a CPU."""
    return _compiled(function) if device.type == "cuda" else function


def precision(config: ElsaConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Automatic bf16 where asked for; matrix products otherwise in fp32."""
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def fetch(images: Any, index_B: Tensor, device: torch.device) -> Tensor:
    """The images at these places, uint8 on the device, wherever the set itself lies."""
    if isinstance(images, Tensor):
        return images[index_B.to(images.device)].to(device, non_blocking=True)
    return images[index_B.cpu()].to(device, non_blocking=True)


def reside(images: Any, device: torch.device) -> Any:
    """The whole set on the device if it fits in half of the free memory there; otherwise the set as it is."""
    if not isinstance(images, Tensor) or images.device == device:
        return images
    if device.type == "cuda" and images.numel() > torch.cuda.mem_get_info(device)[0] // 2:
        return images.pin_memory()
    return images.to(device)


def epoch_batches(index_N: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of one size in random order; what is left over differs from epoch to epoch."""
    batch = min(batch, len(index_N))
    order = index_N[torch.randperm(len(index_N), generator=generator).to(index_N.device)]
    yield from order[: len(order) // batch * batch].split(batch)


def batches_per_epoch(num_images: int, batch: int) -> int:
    """How many batches epoch_batches yields."""
    return num_images // min(batch, num_images)


def warm_cosine(step: int, steps: int, warmup: int) -> float:
    """Share of the highest learning rate at a step: a linear rise, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def build_optimizer(name: str, net: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """lars and sgd with momentum 0.9, or adam; fused where the device has a fused one."""
    parameters = list(net.parameters())
    fused = parameters[0].device.type == "cuda"
    if name == "lars":
        return Lars(parameters, lr=lr, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay, fused=fused)
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=fused)


def project_batch(net: nn.Module, x: Tensor) -> Tensor:
    """Raw projections of images that are floats already."""
    return net(x.contiguous(memory_format=torch.channels_last))[0].float()


@torch.no_grad()
def project(net: nn.Module, x: Tensor, config: ElsaConfig) -> Tensor:
    """Raw projections [B, D], in batches of one size."""
    function = tuned(project_batch, x.device)
    with precision(config, x.device):
        return torch.cat([_padded(function, net, part) for part in x.split(PROJECTION_BATCH)])


def _padded(function: Callable[..., Tensor], net: nn.Module, part: Tensor) -> Tensor:
    missing = PROJECTION_BATCH - len(part)
    if not missing or part.device.type != "cuda":
        return function(net, part)
    # a compiled function has one shape: fill up with copies and cut them off again
    return function(net, torch.cat([part, part[:1].expand(missing, -1, -1, -1)]))[: len(part)]


class Pace:
    """Views per second since the last look."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def rate(self, views: int) -> float:
        """Views per second since the last call."""
        now = time.perf_counter()
        rate, self.start = views / (now - self.start), now
        return rate
