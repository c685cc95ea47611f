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
from elsa.distributed import num_processes, sum_gradients
from elsa.lars import Lars
from elsa.muon import Muon

EAGER_STEPS = 3  # before a step is recorded: cuDNN chooses its algorithms, the optimiser makes its state


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all training steps run: what autograd first met on another stream cannot be recorded."""
    return torch.cuda.Stream(device)


def tuned(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled for a GPU, once per process and shared by all experiments in it; as it is on a CPU."""
    return _compiled(function) if device.type == "cuda" else function


def precision(config: ElsaConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Automatic bf16 where asked for; matrix products otherwise in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_bf16(config, device))


def is_bf16(config: ElsaConfig, device: torch.device) -> bool:
    """Whether the network computes in bf16 there."""
    return config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")


class TrainStep:
    """Loss, gradients and update as one call; on a GPU compiled, then recorded once and replayed as one CUDA graph.

    A step of 512 views is some 400 launches, which take Python about as long as the card takes for the work.
    Inputs must keep their shapes. The loss comes back on the device and is overwritten by the next call.
    """

    def __init__(self, loss: Callable[..., Tensor], net: nn.Module, optimizer: torch.optim.Optimizer, *facts: Any):
        self.device = next(net.parameters()).device
        # exchanges between processes are neither compiled nor recorded
        self.recorded = self.device.type == "cuda" and num_processes() == 1
        self.loss = tuned(loss, self.device) if self.recorded else loss
        self.net, self.optimizer, self.facts = net, optimizer, facts
        self.calls = 0
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # the fastest algorithm of each convolution, found once per shape

    def __call__(self, *inputs: Tensor) -> Tensor:
        """One update on these inputs; the loss before it."""
        if not self.recorded:
            return self._update(*inputs)
        self.calls += 1
        if self.calls <= EAGER_STEPS:
            return self._beside(*inputs)
        if self.calls == EAGER_STEPS + 1:
            self._record(*inputs)
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.recorded_loss

    def _update(self, *inputs: Tensor) -> Tensor:
        loss = self.loss(self.net, *inputs, *self.facts)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        sum_gradients(self.net)
        self.optimizer.step()
        return loss.detach()

    def _beside(self, *inputs: Tensor) -> Tensor:
        stream, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = self._update(*inputs)
        current.wait_stream(stream)
        return loss

    def _record(self, *inputs: Tensor) -> None:
        self.inputs = [given.clone() for given in inputs]
        self.optimizer.zero_grad(set_to_none=True)  # the gradients must lie in the graph's own memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=_side_stream(self.device)):
            self.recorded_loss = self._update(*self.inputs)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next steps, in place where it lies on the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


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
    """lars, sgd (both with momentum 0.9), muon or adam; on a GPU the rate lies there, for TrainStep to record."""
    parameters = list(net.parameters())
    device = parameters[0].device
    on_gpu = device.type == "cuda"
    rate: Any = torch.tensor(lr, device=device) if on_gpu else lr
    if name == "lars":
        return Lars(parameters, lr=rate, weight_decay=weight_decay)
    if name == "muon":
        return Muon(parameters, lr=rate, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=weight_decay, fused=on_gpu)
    return torch.optim.Adam(parameters, lr=rate, weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu)


class Pace:
    """Views per second since the last look."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def rate(self, views: int) -> float:
        """Views per second since the last call."""
        now = time.perf_counter()
        rate, self.start = views / (now - self.start), now
        return rate
