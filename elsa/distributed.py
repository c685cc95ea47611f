"""Several processes that train as one, started by torchrun: each takes its share of every batch.

All processes hold all images and draw the same randomness, a function of seed and step; each computes on its share of
the images, and embeddings, statistics of batch norm and gradients are exchanged, so that loss and gradient are those
of one process with the whole batch. Without torchrun every function here hands back what it was given.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from elsa.errors import UserError
from elsa.nets import ConvNorm, Net, Norm

PATIENCE = timedelta(hours=24)  # the first process may decode millions of images while the others wait


def join(device: str) -> str:
    """Join the processes that torchrun started; this process's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not dist.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
        # torchrun keeps its store through a restart, and the addresses of processes that are gone in it
        store = dist.PrefixStore(f"attempt {_restarts()}", store)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    return device


def leave() -> None:
    """Part from the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def num_processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process writes the files and talks to the user."""
    return not dist.is_initialized() or dist.get_rank() == 0


def was_restarted() -> bool:
    """Whether torchrun started this process in the place of one that died."""
    return _restarts() > 0


@contextmanager
def first_before_others() -> Iterator[None]:
    """The first process does the block before the others begin it, and leaves files for them to find."""
    if not is_first():
        dist.barrier()
    yield
    if num_processes() > 1 and is_first():
        dist.barrier()


def share_of_images(batch_B: Tensor) -> Tensor:
    """This process's part of a batch, which all can share evenly."""
    return batch_B.chunk(num_processes())[_rank()] if num_processes() > 1 else batch_B


def share_of_draws(draws_ND: Tensor, copies: int) -> Tensor:
    """The rows of this process's images among draws for `copies` views of every image, ordered by view, then image."""
    if num_processes() == 1:
        return draws_ND
    return draws_ND.unflatten(0, (copies, -1)).chunk(num_processes(), dim=1)[_rank()].flatten(0, 1)


def gather_views(outputs_ND: Tensor, copies: int) -> Tensor:
    """All processes' outputs in the order of one process: by view, then image. Gradients find their way back."""
    if num_processes() == 1:
        return outputs_ND
    parts = _Gather.apply(outputs_ND)
    return parts.unflatten(1, (copies, -1)).transpose(0, 1).flatten(0, 2)


def sum_gradients(net: nn.Module) -> None:
    """Give every process the gradient of the whole batch."""
    if num_processes() == 1:
        return
    grads = [w.grad for w in net.parameters() if w.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def shared_map(compute: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
    """compute(batch) for each batch, each computed by one process and known to all; results are matrices."""
    if num_processes() == 1:
        return [compute(batch) for batch in batches]
    mine = {n: compute(batch) for n, batch in enumerate(batches) if n % num_processes() == _rank()}
    results = []
    for number, batch in enumerate(batches):
        owner = number % num_processes()
        shape = [mine[number].shape if number in mine else torch.Size()]
        dist.broadcast_object_list(shape, src=owner)
        result = mine[number].contiguous() if number in mine else torch.empty(shape[0], device=batch.device)
        dist.broadcast(result, src=owner)
        results.append(result)
    return results


def as_the_first(value: Tensor) -> Tensor:
    """The first process's tensor, for all: machines of different kinds may round differently."""
    if num_processes() > 1:
        value = value.contiguous()
        dist.broadcast(value, src=0)
    return value


def number_of_the_first(value: float, device: torch.device) -> float:
    """The first process's number, for all."""
    return (
        as_the_first(torch.tensor(value, dtype=torch.float64, device=device)).item() if num_processes() > 1 else value
    )


def check_together(what: str, value: Any) -> None:
    """Refuse to go on where the processes would do different things, such as begin at different epochs."""
    if num_processes() == 1:
        return
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise UserError(
            f"the processes disagree on {what} ({', '.join(map(str, values))}): SOURCE and --out must lie on storage "
            f"that all machines share, with the same content"
        )


def check_batch(name: str, batch: int) -> None:
    """Refuse a batch that the processes cannot share evenly."""
    if batch % num_processes():
        raise UserError(
            f"{name}: batches of {batch} images cannot be shared evenly by {num_processes()} processes; "
            f"give a multiple of {num_processes()}, not above the number of images"
        )


def synchronise_norms(net: Net) -> Net:
    """Let batch norms take their statistics from the whole batch; weights and buffers are kept."""
    if num_processes() > 1:
        for layer in net.modules():
            if isinstance(layer, ConvNorm):
                layer.norm = SharedNorm.of(layer.norm)
    return net


class SharedNorm(Norm):
    """Batch norm over the images of all processes; torch's own SyncBatchNorm knows GPUs alone."""

    @classmethod
    def of(cls, norm: Norm) -> "SharedNorm":
        """The same layer, shared."""
        shared = cls(norm.num_features)
        shared.load_state_dict(norm.state_dict())
        return shared.to(norm.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """In training with the mean and variance of all processes' images, each of which has as many."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = num_processes() * x.numel() / x.shape[1]
        mean_C = _Sum.apply(wide.sum((0, 2, 3))) / count
        centred = wide - mean_C[:, None, None]
        variance_C = _Sum.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
            self.num_batches_tracked.add_(1)
        scale_C = self.weight * torch.rsqrt(variance_C + self.eps)
        return (centred * scale_C[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all processes; each term's gradient is the sum of what all processes' losses say of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total


class _Gather(torch.autograd.Function):
    """All processes' tensors stacked [P, ...]; all make the same loss of them, so each keeps its slice's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(num_processes())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[_rank()]


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
