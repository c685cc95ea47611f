"""Elsa that hands a checkpoint of our choice what its loops hand their own: to look at the network, or to keep it."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from elsa.checkpoint import Checkpoint
from elsa.elsa import Elsa
from elsa.finetune import finetune
from elsa.pretrain import pretrain
from elsa.training import fetch, reside


class SteeredElsa(Elsa):
    """Learns what Elsa learns, to the bit; `steered_by` is called at the end of every epoch of both stages."""

    steered_by: Checkpoint

    def fit(self, images: Any, labels: Sequence[str | None], pretrained: dict[str, Tensor] | None = None) -> Self:
        """Fine-tune `pretrained` weights."""
        assert pretrained is not None
        label_N = self._checked(images, labels).to(self.device)
        images = reside(images, self.device)
        net = self._new_net(images.shape)
        net.load_state_dict(pretrained)
        held_back = self._held_back(label_N)
        self.prototypes_, self.history_ = finetune(
            net, images, label_N, held_back, self.config, self.seed, self.steered_by, self.progress
        )
        self.net_ = net.eval()
        self.calibration_ = self.anomaly_score(fetch(images, held_back, self.device))
        return self

    def pretrain(self, images: Any, labels: Sequence[str | None]) -> dict[str, Tensor]:
        """Contrastive pre-training of images that are all unlabelled."""
        label_N = self._checked(images, labels).to(self.device)
        images = reside(images, self.device)
        net = self._new_net(images.shape)
        everything = torch.arange(len(label_N), device=self.device)
        pretrain(net, images, everything, self.config, self.seed, self.steered_by, self.progress)
        return net.state_dict()
