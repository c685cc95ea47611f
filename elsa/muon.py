"""Muon: momentum whose matrices are orthogonalised, so that all directions of a layer learn at one pace."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# A quintic that drives singular values from anywhere in (0, 1] to about 1 in a few rounds (Jordan et al. 2024)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 4


def orthogonalised(matrices_LMN: Tensor) -> Tensor:
    """The matrices with singular values near 1 and their singular vectors kept: what U S V^T is to U V^T, roughly."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices_LMN.shape[1] > matrices_LMN.shape[2]
    x = matrices_LMN.mT if tall else matrices_LMN
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for matrices and filters, Adam at `vector_share` of the rate for the rest.

    The products are in bf16 on a GPU, in the weights' own numbers on a CPU.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        vector_share: float = 0.06,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "vector_share": vector_share}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            given = [w for w in group["params"] if w.grad is not None]
            self._step_matrices([w for w in given if w.ndim >= 2], group)
            self._step_vectors([w for w in given if w.ndim < 2], group)

    def _step_matrices(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        grads = [w.grad for w in weights if w.grad is not None]
        buffers = [self._state(w, "momentum_buffer") for w in weights]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        same_rows: dict[int, list[int]] = {}
        for number, w in enumerate(weights):
            same_rows.setdefault(w.shape[0], []).append(number)
        for numbers in same_rows.values():
            steps = orthogonalised(_stacked([updates[number] for number in numbers]))
            rate = torch.as_tensor(group["lr"], device=steps.device)
            for number, step in zip(numbers, steps, strict=True):
                w = weights[number]
                size = max(1.0, w.shape[0] / w[0].numel()) ** 0.5
                # in the weights' numbers, or the sum would be made in bf16 where the step is
                w.addcmul_(_shaped(step[:, : w[0].numel()], w).to(w.dtype), rate, value=-size)

    def _step_vectors(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        grads = [w.grad for w in weights if w.grad is not None]
        means = [self._state(w, "mean") for w in weights]
        squares = [self._state(w, "square") for w in weights]
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 0.01)
        # Adam without its correction of the first steps, which the warm-up keeps small anyway
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_add_(sizes, 1e-8)
        steps = torch._foreach_div(means, sizes)
        torch._foreach_mul_(steps, group["vector_share"] * group["lr"])
        torch._foreach_sub_(weights, steps)

    def _state(self, w: Tensor, name: str) -> Tensor:
        if name not in self.state[w]:
            self.state[w][name] = torch.zeros_like(w)
        return self.state[w][name]


def _stacked(updates: list[Tensor]) -> Tensor:
    """Updates with one number of rows as one batch; columns of zeros fill it up and stay zero in all that follows.

    A batch for each number of rows instead of each shape: 4 chains of products for ResNet-18 instead of 14.
    """
    first, columns = updates[0], max(update[0].numel() for update in updates)
    dtype = torch.bfloat16 if first.is_cuda else first.dtype
    stacked = torch.zeros(len(updates), len(first), columns, dtype=dtype, device=first.device)
    for place, update in zip(stacked, updates, strict=True):
        # in memory order: filters lie channels-last, and the order of columns does not matter to the result
        flat = update.permute(0, 2, 3, 1).flatten(1) if update.ndim == 4 else update.flatten(1)
        place[:, : flat.shape[1]] = flat
    return stacked


def _shaped(step_MN: Tensor, like: Tensor) -> Tensor:
    if like.ndim != 4:
        return step_MN.reshape(like.shape)
    outputs, inputs, height, width = like.shape
    return step_MN.reshape(outputs, height, width, inputs).permute(0, 3, 1, 2)
