"""What the detectors that train a network of their own share: settings, checked images, epochs, scores in batches."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from elsa.config import ElsaConfig
from elsa.detectors.inputs import Images, checked, kind_of
from elsa.errors import UserError
from elsa.progress import Progress
from elsa.seeds import generator
from elsa.training import Pace, TrainStep, batches_per_epoch, epoch_batches, fetch, is_bf16, precision

LEAST_SIDE = 8  # three halvings leave one pixel
Config = TypeVar("Config")


def settings_of(config_class: type[Config], given: dict[str, Any]) -> Config:
    """The settings of a method with some changed by name; unknown names are refused."""
    known = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise UserError(f"there is no setting {unknown[0]!r}; settings are: {', '.join(known)}")
    return config_class(**given)


def refuse_below(config: Any, least: float, names: Iterable[str]) -> None:
    """Refuse settings that are not finite or lie below `least`."""
    for name in names:
        if not least <= getattr(config, name) < math.inf:
            raise UserError(f"{name}={getattr(config, name)}: must be finite and at least {least}")


def refuse_unless_positive(config: Any, names: Iterable[str]) -> None:
    """Refuse settings that are not finite or not above 0."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"{name}={getattr(config, name)}: must be finite and above 0")


def checked_pixels(method: str, images: Images, labels: Sequence[str | None]) -> Tensor:
    """The label codes of a training set of images; vectors and images of a few pixels are refused."""
    codes = checked(images, labels)
    if kind_of(images) != "images":
        raise UserError(f"vectors given: {method} learns from images, uint8 [N, C, H, W]; use knn for vectors")
    if min(images.shape[2:]) < LEAST_SIDE:
        height, width = images.shape[2:]
        raise UserError(f"images of {width}x{height} px given: {method} needs at least {LEAST_SIDE} px each way")
    return codes


def initialise(net: nn.Module, weights_of: torch.Generator) -> None:
    """Fresh weights that depend on the generator alone: PyTorch's default, U(+-1/sqrt(fan_in))."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                bound = module.weight[0].numel() ** -0.5
                module.weight.uniform_(-bound, bound, generator=weights_of)
                if module.bias is not None:
                    module.bias.uniform_(-bound, bound, generator=weights_of)


def in_bf16(name: str, device: torch.device) -> bool:
    """What the setting `precision` means there; a loss takes it as a plain flag, which can be compiled."""
    return is_bf16(ElsaConfig(precision=name), device)


def autocast(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 as the setting `precision` says."""
    return precision(ElsaConfig(precision=name), device)


def train_epochs(
    stage: str,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    facts: Sequence[Any],
    inputs_of: Callable[[Tensor, torch.Generator], Sequence[Tensor]],
    index_N: Tensor,
    *,
    epochs: int,
    batch: int,
    seed: int,
    progress: Progress,
    slower_from: int | None = None,
    norms_fixed_from: int | None = None,
    views: int = 1,
) -> None:
    """Train on loss(net, *inputs_of(places of a batch, randomness of the epoch), *facts).

    From epoch `slower_from` on at a tenth of the rate, from `norms_fixed_from` on with batch norm in eval mode.
    """
    device = index_N.device
    net.train()
    pace, update = Pace(), TrainStep(loss, net, optimizer, *facts)
    for epoch in range(epochs):
        if epoch == slower_from:
            for group in optimizer.param_groups:
                group["lr"] /= 10
        if epoch == norms_fixed_from:
            net.eval()
            update = TrainStep(loss, net, optimizer, *facts)  # a recorded step is one of the mode it was recorded in
        draws_of = generator(seed, f"{stage} draws", epoch, device=device)
        total = torch.zeros((), device=device)
        for index_B in epoch_batches(index_N, batch, generator(seed, f"{stage} order", epoch)):
            total += update(*inputs_of(index_B, draws_of))
        steps = batches_per_epoch(len(index_N), batch)
        rate = pace.rate(steps * min(batch, len(index_N)) * views)
        progress(stage, epoch + 1, epochs, {"loss": total.item() / steps, "views/s": rate})


@torch.no_grad()
def each_batch(
    images: Images, index_N: Tensor, batch: int, device: torch.device, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """function(batch of uint8 images) of images[index_N], one row each, on the device."""
    return torch.cat([_padded(function, fetch(images, part, device), batch) for part in index_N.split(batch)])


def score_batches(
    images: Images,
    shape: Sequence[int],
    batch: int,
    device: torch.device,
    function: Callable[[Tensor], Tensor],
    progress: Progress,
) -> Tensor:
    """The scores of all images, float64 on the CPU; images of another shape than the fitted ones are refused."""
    if kind_of(images) != "images" or tuple(images.shape[1:]) != tuple(shape):
        raise UserError(f"images of shape {list(images.shape[1:])} given, the model was fitted on {list(shape)}")
    scores = [torch.empty(0, dtype=torch.float64)]
    for start in range(0, len(images), batch):
        stop = min(len(images), start + batch)
        scores.append(each_batch(images, torch.arange(start, stop), batch, device, function).double().cpu())
        progress("score", stop, len(images), {})
    return torch.cat(scores)


def _padded(function: Callable[[Tensor], Tensor], images: Tensor, batch: int) -> Tensor:
    missing = batch - len(images)
    if not missing or images.device.type != "cuda":
        return function(images)
    # a compiled function has one shape: fill up with copies and cut them off again
    return function(torch.cat([images, images[:1].expand(missing, -1, -1, -1)]))[: len(images)]


def packed(net: nn.Module, **more: Tensor) -> dict[str, Tensor]:
    """The tensors of a saved detector: its network's under net/, and the others."""
    return {**{f"net/{name}": tensor for name, tensor in net.state_dict().items()}, **more}


def unpack(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load what packed() took from a network."""
    net.load_state_dict({name.removeprefix("net/"): t for name, t in tensors.items() if name.startswith("net/")})
    net.eval()
