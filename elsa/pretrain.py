"""Contrastive pre-training on the unlabelled and normal images: SimCLR for Elsa, CSI for Elsa+."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa.augment import draw, two_views
from elsa.checkpoint import Checkpoint
from elsa.config import ElsaConfig
from elsa.distributed import check_batch, check_together, gather_views, is_first, share_of_draws, share_of_images
from elsa.losses import nt_xent
from elsa.nets import Net
from elsa.progress import Progress
from elsa.seeds import generator
from elsa.training import (
    Pace,
    TrainStep,
    batches_per_epoch,
    build_optimizer,
    epoch_batches,
    fetch,
    precision,
    set_rate,
    warm_cosine,
)


def contrastive_loss(net: Net, images: Tensor, draws: Tensor, config: ElsaConfig) -> Tensor:
    """NT-Xent over two views of every rotation, plus the cross-entropy of telling the rotations apart."""
    x = two_views(images, draws, config.shifts, config.crop_area_min, config.crop_area_max)
    with precision(config, images.device):
        raw, logits = net(x.contiguous(memory_format=torch.channels_last))
    raw, logits = gather_views(raw, 2 * config.shifts), gather_views(logits, 2 * config.shifts)
    loss = nt_xent(F.normalize(raw.float(), dim=1), config.pretrain_tau)
    if config.shifts > 1:
        num_images = len(raw) // (2 * config.shifts)
        rotation = torch.arange(config.shifts, device=images.device).repeat_interleave(num_images).repeat(2)
        loss = loss + F.cross_entropy(logits.float(), rotation)
    return loss


def pretrain(
    net: Net,
    images: Any,
    index_N: Tensor,
    config: ElsaConfig,
    seed: int,
    checkpoint: Checkpoint,
    progress: Progress,
) -> None:
    """Train the net on images[index_N] for config.pretrain_epochs epochs."""
    device = index_N.device
    check_batch("pretrain_batch", min(config.pretrain_batch, len(index_N)))
    optimizer = build_optimizer(config.pretrain_optimizer, net, config.pretrain_lr, config.pretrain_weight_decay)
    parts = {"net": net, "optimizer": optimizer}
    start, _, _ = checkpoint.restore("pretrain", parts)
    check_together("the epoch of pre-training to go on with", start)
    steps = batches_per_epoch(len(index_N), config.pretrain_batch)
    update = TrainStep(contrastive_loss, net, optimizer, config)
    net.train()
    pace = Pace()
    for epoch in range(start, config.pretrain_epochs):
        draws_of = generator(seed, "pretrain draws", epoch, device=device)
        total = torch.zeros((), device=device)
        batches = epoch_batches(index_N, config.pretrain_batch, generator(seed, "pretrain order", epoch))
        for step, index_B in enumerate(batches, start=epoch * steps):
            share = warm_cosine(step, steps * config.pretrain_epochs, steps * config.pretrain_warmup)
            set_rate(optimizer, config.pretrain_lr * share)
            draws = share_of_draws(draw(2 * config.shifts * len(index_B), draws_of), 2 * config.shifts)
            total += update(fetch(images, share_of_images(index_B), device), draws)
        views = steps * min(config.pretrain_batch, len(index_N)) * 2 * config.shifts
        figures = {"loss": total.item() / steps, "views/s": pace.rate(views)}
        progress("pretrain", epoch + 1, config.pretrain_epochs, figures)
        if is_first():
            checkpoint.save("pretrain", epoch + 1, parts, {}, {}, last=epoch + 1 == config.pretrain_epochs)
