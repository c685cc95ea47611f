"""Small images with a clear anomaly, for fits of a few seconds."""

import torch


def toy_images(count, anomalies, seed=0, channels=3, size=32):
    """Smooth blobs; the last `anomalies` images are stripes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, channels, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(noise, (size, size), mode="bilinear")
    stripes = torch.arange(size).div(3, rounding_mode="floor").remainder(2).float()
    images[count - anomalies :] = 0.5 * images[count - anomalies :] + 0.5 * stripes
    return (images * 255).to(torch.uint8)


TOY_SETTINGS = {
    "preset": "cpu",
    "num_prototypes": 8,
    "pretrain_epochs": 3,
    "finetune_epochs": 3,
    "finetune_batch": 32,
    "finetune_lr": 1e-3,
    "views": 2,
    "prototypes_every": 2,
}
