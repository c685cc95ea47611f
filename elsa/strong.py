"""Strong augmentation: RandAugment with n = 12 of 13 operations and m = 5, and a cutout: early stopping's anomalies.

Images are uint8 [B, C, H, W] in and out. Each operation is a function of the images and of a level v in {1, 2, 3, 4}
per image; the arithmetic is Pillow's, so that Pillow can be the tests' oracle.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_OPERATIONS = 12  # of the 13, each used at most once per image
APPLY_PROBABILITY = 0.8
LEVELS = (1, 2, 3, 4)  # below m = 5
CUTOUT_PROBABILITY = 0.2
CUTOUT_SHARE = 0.5  # 16 px of CIFAR-10's 32
CUTOUT_GREY = 127


def strong(images: Tensor, generator: torch.Generator) -> Tensor:
    """Distort each image by its own random operations in its own random order; the generator lives on the CPU."""
    batch = len(images)
    order = torch.rand(batch, len(OPERATIONS), generator=generator).argsort(dim=1)[:, :NUM_OPERATIONS]
    applied = torch.rand(batch, NUM_OPERATIONS, generator=generator) < APPLY_PROBABILITY
    level = torch.randint(LEVELS[0], LEVELS[-1] + 1, (batch, NUM_OPERATIONS), generator=generator)
    sign = torch.randint(0, 2, (batch, NUM_OPERATIONS), generator=generator) * 2 - 1
    result = images.clone()
    for position in range(NUM_OPERATIONS):
        for number, operation in enumerate(OPERATIONS.values()):
            mine = (applied[:, position] & (order[:, position] == number)).nonzero().flatten()
            if len(mine):
                levels, signs = level[mine, position].to(images.device), sign[mine, position].to(images.device)
                mine = mine.to(images.device)
                result[mine] = operation(result[mine], levels, signs)
    return _cutout(result, generator)


def _cutout(images: Tensor, generator: torch.Generator) -> Tensor:
    """A grey square around a random point, cut off where it leaves the image."""
    batch, _, height, width = images.shape
    applied = torch.rand(batch, generator=generator) < CUTOUT_PROBABILITY
    centre = torch.rand(2, batch, generator=generator)
    half = CUTOUT_SHARE * min(height, width) / 2
    rows, columns = torch.arange(height)[None, :], torch.arange(width)[None, :]
    top, left = (centre[0, :, None] * height - half).floor(), (centre[1, :, None] * width - half).floor()
    in_rows, in_columns = (rows >= top) & (rows < top + 2 * half), (columns >= left) & (columns < left + 2 * half)
    covered = (applied[:, None, None] & in_rows[:, :, None] & in_columns[:, None, :]).to(images.device)
    return images.masked_fill(covered[:, None], CUTOUT_GREY)


def _grey(images: Tensor) -> Tensor:
    """Pillow's mode L: integer arithmetic with 16 fractional bits, [B, 1, H, W]."""
    if images.shape[1] != 3:
        return images.float().mean(dim=1, keepdim=True).round()
    red, green, blue = images.int().split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).float()


def _blend(start: Tensor, images: Tensor, level: Tensor) -> Tensor:
    """Start plus a factor of .01 + .99 v / 10 of the way to the image: below .41, so mostly the start remains."""
    factor = (0.01 + 0.99 * level / 10)[:, None, None, None]
    return (start + factor * (images.float() - start)).clamp(0, 255).to(torch.uint8)


def autocontrast(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Stretch every channel to the full range."""
    low = images.amin(dim=(2, 3), keepdim=True).double()
    high = images.amax(dim=(2, 3), keepdim=True).double()
    scale = 255 / (high - low).clamp(min=1)
    # Pillow truncates this very sum in double precision; any other order of operations is off by one now and then
    stretched = (images * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Flatten the histogram of every channel."""
    pixels = images.flatten(2).long()
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=images.device)
    histogram.scatter_add_(2, pixels, torch.ones_like(pixels))
    # Pillow's rule: one step holds the mean of all but the highest occupied bin
    last_bin = 255 - (histogram.flip(2) > 0).int().argmax(dim=2, keepdim=True)
    step = (pixels.shape[2] - histogram.gather(2, last_bin.long())) // 255
    before = histogram.cumsum(dim=2) - histogram
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    equalized = table.gather(2, pixels).to(torch.uint8).view_as(images)
    return torch.where(step[:, :, :, None] > 0, equalized, images)


def identity(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Nothing: one of the pool, so that some images are distorted less."""
    return images


def brightness(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Toward black."""
    return _blend(torch.zeros_like(images, dtype=torch.float32), images, level)


def colour(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Toward grey."""
    return _blend(_grey(images), images, level) if images.shape[1] == 3 else images


def contrast(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Toward the mean grey of the image."""
    mean = (_grey(images).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images, level)


def sharpness(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Toward a smoothed image; the border row has no neighbours and stays."""
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]], device=images.device) / 13
    channels = images.shape[1]
    smooth = images.float()
    inner = F.conv2d(smooth, kernel.expand(channels, 1, 3, 3), groups=channels)
    smooth = F.pad(inner.add(0.5).floor(), (1, 1, 1, 1), value=torch.nan)
    return _blend(torch.where(smooth.isnan(), images.float(), smooth), images, level)


def posterize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Keep 8 - .7 v bits, rounded: the paper's range of 8 to 1 over v = 0 to 10 (the official code keeps all 8)."""
    dropped = (0.7 * level + 0.5).floor().to(torch.uint8)[:, None, None, None]
    return (images >> dropped) << dropped


def solarize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Invert every value from 256 - int(25.6 v) on."""
    threshold = (256 - (25.6 * level).floor())[:, None, None, None]
    return torch.where(images < threshold, images, 255 - images)


def shear_x(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Shift each row by its distance from the top."""
    return _affine(images, shear_x=sign * _displacement(level))


def shear_y(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Shift each column by its distance from the left."""
    return _affine(images, shear_y=sign * _displacement(level))


def translate_x(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Shift sideways by .18 to .27 of the width."""
    return _affine(images, shift_x=sign * _displacement(level) * images.shape[3])


def translate_y(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Shift up or down by .18 to .27 of the height."""
    return _affine(images, shift_y=sign * _displacement(level) * images.shape[2])


def _displacement(level: Tensor) -> Tensor:
    return 0.3 - 0.03 * level


def _affine(
    images: Tensor,
    shear_x: Tensor | float = 0.0,
    shear_y: Tensor | float = 0.0,
    shift_x: Tensor | float = 0.0,
    shift_y: Tensor | float = 0.0,
) -> Tensor:
    """Nearest-pixel sampling, black outside, as Pillow's transform: the matrix maps output to input positions."""
    batch, channels, height, width = images.shape
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device) + 0.5, torch.arange(width, device=images.device) + 0.5, indexing="ij"
    )

    def each(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=images.device).expand(batch)[:, None, None]

    column = (x + each(shear_x) * y + each(shift_x)).floor().long()
    row = (y + each(shear_y) * x + each(shift_y)).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    position = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    sampled = images.flatten(2).gather(2, position[:, None].expand(-1, channels, -1)).view_as(images)
    return sampled * inside[:, None]


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "autocontrast": autocontrast,
    "equalize": equalize,
    "identity": identity,
    "brightness": brightness,
    "colour": colour,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
}
