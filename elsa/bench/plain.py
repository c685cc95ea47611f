"""The loop people usually write, to measure ours against: Pillow in a data loader, fp32, eager, one image at a time.

It computes the same steps on the same network: two weak views of every rotation, NT-Xent and rotation loss, Adam.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class WeakViews(Dataset):
    """`views` weak augmentations of every rotation of an image, as float tensors."""

    def __init__(self, images: NDArray[np.uint8], views: int, shifts: int, area: float):
        self.images = [Image.fromarray(image.squeeze()) for image in images.transpose(0, 2, 3, 1)]
        self.views, self.shifts, self.area = views, shifts, area

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Tensor:
        image, rng = self.images[number], np.random.default_rng()
        return torch.stack(
            [
                torch.rot90(to_tensor(weak_view(image, self.area, rng)), turn, (1, 2))
                for _ in range(self.views)
                for turn in range(self.shifts)
            ]
        )


def weak_view(image: Image.Image, area: float, rng: np.random.Generator) -> Image.Image:
    """Random resized crop, flip, colour jitter and grey, with Pillow."""
    width, height = image.size
    ratio = math.exp(rng.uniform(-1, 1) * math.log(4 / 3))
    w, h = min(width, width * math.sqrt(area * ratio)), min(height, height * math.sqrt(area / ratio))
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.8:
        image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.6, 1.4))
        image = ImageEnhance.Contrast(image).enhance(rng.uniform(0.6, 1.4))
        if image.mode == "RGB":
            image = ImageEnhance.Color(image).enhance(rng.uniform(0.6, 1.4))
            hue, saturation, value = image.convert("HSV").split()
            turned = (np.asarray(hue, np.int16) + int(rng.uniform(-0.1, 0.1) * 255)).astype(np.uint8)
            image = Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
    if image.mode == "RGB" and rng.random() < 0.2:
        image = image.convert("L").convert("RGB")
    return image


def to_tensor(image: Image.Image) -> Tensor:
    """Floats in [0, 1], [C, H, W]."""
    array = np.array(image, np.float32) / 255
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def loader(images: NDArray[np.uint8], views: int, shifts: int, area: float, batch: int, workers: int) -> DataLoader:
    """Batches [B, views * shifts, C, H, W] from worker processes."""
    return DataLoader(WeakViews(images, views, shifts, area), batch, shuffle=True, drop_last=True, num_workers=workers)


class LabelledViews(WeakViews):
    """The same with the label code of each image."""

    def __init__(self, images: NDArray[np.uint8], labels: Tensor, views: int, shifts: int, area: float):
        super().__init__(images, views, shifts, area)
        self.labels = labels.tolist()

    def __getitem__(self, number: int) -> tuple[Tensor, int]:  # type: ignore[override]  # a pair instead of the views
        return super().__getitem__(number), self.labels[number]


def labelled_loader(
    images: NDArray[np.uint8], labels: Tensor, views: int, shifts: int, area: float, batch: int, workers: int
) -> DataLoader:
    """Batches ([B, views * shifts, C, H, W], [B]) from worker processes."""
    return DataLoader(
        LabelledViews(images, labels, views, shifts, area), batch, shuffle=True, drop_last=True, num_workers=workers
    )


def train_step(net: nn.Module, views: Tensor, shifts: int, tau: float, optimizer: torch.optim.Optimizer) -> Tensor:
    """NT-Xent and rotation loss of one batch [B, 2 * shifts, C, H, W], as a readable loop writes them."""
    x = views.transpose(0, 1).flatten(0, 1)
    raw, logits = net(x)
    z = F.normalize(raw, dim=1)
    similarity = z @ z.T / tau
    similarity.fill_diagonal_(-1e9)
    half = len(z) // 2
    partner = torch.cat([torch.arange(half, 2 * half), torch.arange(half)]).to(z.device)
    rotation = torch.arange(shifts, device=z.device).repeat_interleave(len(views)).repeat(2)
    loss = F.cross_entropy(similarity, partner) + F.cross_entropy(logits, rotation)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def finetune_step(
    net: nn.Module,
    views: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    shifts: int,
    tau: float,
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    """L_e and L_s of one batch [B, 2 * shifts, C, H, W], as a readable loop writes them."""
    raw, logits = net(views.transpose(0, 1).flatten(0, 1))
    score = torch.logsumexp(F.normalize(raw, dim=1) @ prototypes.T / tau, dim=1)
    anomalous = labels.repeat(2 * shifts) == -1
    highest = math.log(len(prototypes)) + 1 / tau
    loss = torch.where(anomalous, 1 / (highest - score), 1 / score).mean()
    if shifts > 1:
        rotation = torch.arange(shifts, device=views.device).repeat_interleave(len(views)).repeat(2)
        loss = loss + F.cross_entropy(logits[~anomalous], rotation[~anomalous])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def score_batch(net: nn.Module, views: Tensor, prototypes: Tensor, shifts: int, tau: float) -> Tensor:
    """Ensembled energy of a batch [B, views * shifts, C, H, W]."""
    count, copies = views.shape[:2]
    raw = net(views.flatten(0, 1))[0].view(count, copies // shifts, shifts, -1).mean(dim=1)
    z: Any = F.normalize(raw, dim=-1)
    return -torch.logsumexp(z @ prototypes.T / tau, dim=-1).sum(dim=1)
