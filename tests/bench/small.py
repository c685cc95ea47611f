"""A CIFAR-10 of 300 images and settings that fit it in a second, for tests of the bench."""

import torch

QUICK = {
    "preset": "cpu",
    "num_prototypes": 8,
    "pretrain_epochs": 1,
    "finetune_epochs": 1,
    "finetune_batch": 32,
    "views": 1,
}


def small_cifar10(_folder):
    """Ten classes of 30 training and 10 test images of noise, each class a little brighter than the one before."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(10).repeat(30)
    noise = torch.randint(0, 150, (300, 3, 32, 32), generator=generator)
    images = (noise + 10 * classes[:, None, None, None]).to(torch.uint8)
    return images, classes, images[:100], classes[:100]
