"""Energy-based fine-tuning: prototypes, L_e and L_s, and the best epoch by the early-stop score."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa.augment import draw, plain, rotations, two_views
from elsa.checkpoint import Checkpoint
from elsa.config import ElsaConfig
from elsa.distributed import (
    as_the_first,
    check_batch,
    check_together,
    gather_views,
    is_first,
    number_of_the_first,
    share_of_draws,
    share_of_images,
    shared_map,
)
from elsa.early_stop import early_stop_copies, early_stop_score, looked_at
from elsa.energy import energy
from elsa.inference import PROJECTION_BATCH, fold_norms, project
from elsa.labels import ANOMALY
from elsa.losses import energy_loss, rotation_loss
from elsa.nets import Net
from elsa.progress import Progress
from elsa.prototypes import spherical_kmeans
from elsa.seeds import generator
from elsa.training import (
    Pace,
    TrainStep,
    batches_per_epoch,
    build_optimizer,
    epoch_batches,
    fetch,
    precision,
)


def finetune_loss(
    net: Net, prototypes_KD: Tensor, images: Tensor, label_B: Tensor, draws: Tensor, config: ElsaConfig
) -> Tensor:
    """L_e over two views of every rotation, plus L_s where there are rotations to tell apart."""
    x = two_views(images, draws, config.shifts, config.crop_area_min, config.crop_area_max)
    with precision(config, images.device):
        raw, logits = net(x.contiguous(memory_format=torch.channels_last))
    raw, logits = gather_views(raw, 2 * config.shifts), gather_views(logits, 2 * config.shifts)
    label_N = label_B.repeat(2 * config.shifts)
    energy_N = energy(F.normalize(raw.float(), dim=1), prototypes_KD, config.tau)
    loss = energy_loss(energy_N, label_N, len(prototypes_KD), config.tau)
    if config.shifts > 1:
        rotation = torch.arange(config.shifts, device=images.device).repeat_interleave(len(label_B)).repeat(2)
        loss = loss + rotation_loss(logits.float(), rotation, label_N)
    return loss


def embed(net: Net, images: Any, index_N: Tensor, config: ElsaConfig) -> Tensor:
    """Unit embeddings of the images as they are, all rotations: [shifts * N, D]."""
    folded = fold_norms(net, config)
    batches = index_N.split(PROJECTION_BATCH // config.shifts)

    def projections(index_B: Tensor) -> Tensor:
        return project(folded, rotations(plain(fetch(images, index_B, index_N.device)), config.shifts), config)

    return F.normalize(torch.cat(shared_map(projections, batches)), dim=1)


def find_prototypes(net: Net, images: Any, index_N: Tensor, config: ElsaConfig, seed: int, epoch: int) -> Tensor:
    """The prototypes of the images as the net sees them now."""
    z_ND = embed(net, images, index_N, config)
    return as_the_first(spherical_kmeans(z_ND, config.num_prototypes, generator(seed, "prototypes", epoch)))


def finetune(
    net: Net,
    images: Any,
    label_N: Tensor,
    held_back: Tensor,
    config: ElsaConfig,
    seed: int,
    checkpoint: Checkpoint,
    progress: Progress,
) -> tuple[Tensor, list[dict[str, float]]]:
    """Fine-tune the net; it ends with the weights of its best epoch. That epoch's prototypes and the history."""
    device = label_N.device
    normal_side = (label_N != ANOMALY).nonzero().flatten()
    is_held_back = torch.zeros(len(label_N), dtype=torch.bool, device=device)
    is_held_back[held_back] = True
    trained_on = (~is_held_back).nonzero().flatten()
    check_batch("finetune_batch", min(config.finetune_batch, len(trained_on)))
    copies = early_stop_copies(fetch(images, looked_at(held_back), device), config, seed)

    optimizer = build_optimizer("adam", net, config.finetune_lr, 0.0)
    parts = {"net": net, "optimizer": optimizer}
    start, facts, loose = checkpoint.restore("finetune", parts)
    check_together("the epoch of fine-tuning to go on with", start)
    history: list[dict[str, float]] = facts.get("history", [])
    best = {name: tensor.to(device) for name, tensor in loose.items()}
    prototypes_KD = best.pop("current prototypes", torch.empty(0))

    update = TrainStep(finetune_loss, net, optimizer, config)
    pace = Pace()
    for epoch in range(start, config.finetune_epochs):
        if epoch % config.prototypes_every == 0:
            prototypes_KD = find_prototypes(net, images, normal_side, config, seed, epoch)
        net.train(config.finetune_batchnorm == "train")
        draws_of = generator(seed, "finetune draws", epoch, device=device)
        total, steps = torch.zeros((), device=device), batches_per_epoch(len(trained_on), config.finetune_batch)
        for index_B in epoch_batches(trained_on, config.finetune_batch, generator(seed, "finetune order", epoch)):
            draws = share_of_draws(draw(2 * config.shifts * len(index_B), draws_of), 2 * config.shifts)
            total += update(prototypes_KD, fetch(images, share_of_images(index_B), device), label_N[index_B], draws)
        score = number_of_the_first(early_stop_score(net, prototypes_KD, copies, config), device)
        if not history or score > max(entry["early_stop"] for entry in history):
            best = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            best["prototypes"] = prototypes_KD
        views = steps * min(config.finetune_batch, len(trained_on)) * 2 * config.shifts
        history.append({"loss": total.item() / steps, "early_stop": score})
        progress("finetune", epoch + 1, config.finetune_epochs, {**history[-1], "views/s": pace.rate(views)})
        kept = {**best, "current prototypes": prototypes_KD}
        last = epoch + 1 == config.finetune_epochs
        if is_first():
            checkpoint.save("finetune", epoch + 1, parts, {"history": history}, kept, last)

    if not best:  # no epoch was asked for: the prototypes of the pre-trained net
        return find_prototypes(net, images, normal_side, config, seed, 0), history
    prototypes_KD = best.pop("prototypes")
    net.load_state_dict(best)
    return prototypes_KD, history
