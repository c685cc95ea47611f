"""Weak augmentation T_a and the rotations T_s: batched, each image with its own randomness, a function of its draws.

Images come in as uint8 [B, C, H, W] and leave as floats in [0, 1]; nowhere else do images become floats. All
randomness is one tensor of uniform draws, so that the same code runs compiled, in a CUDA graph and on a CPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# columns of the draws; each image has its own row
JITTER, ORDER, BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY, AREA, RATIO, LEFT, TOP, FLIP = range(12)
NUM_DRAWS = 12
CACHED = 64  # images at once on a CPU: at 32 px what they need stays in its cache, a third faster
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's mode L


def draw(num_images: int, generator: torch.Generator) -> Tensor:
    """Uniform draws for as many weak augmentations, on the generator's device."""
    return torch.rand(num_images, NUM_DRAWS, generator=generator, device=generator.device)


def weak(images: Tensor, draws: Tensor, area_min: float, area_max: float) -> Tensor:
    """Random resized crop and flip, then colour jitter (0.4, 0.4, 0.4, 0.1) with p 0.8, then grey with p 0.2."""
    if images.device.type == "cpu" and images.shape[0] > CACHED:  # not len(), which an export would take for fixed
        parts = zip(images.split(CACHED), draws.split(CACHED), strict=True)
        return torch.cat([weak(*part, area_min, area_max) for part in parts])
    x = _crop_and_flip(images, draws, area_min, area_max)
    jittered = _jitter(x, draws)
    x = torch.where(_column(draws, JITTER) < 0.8, jittered, x)
    if x.shape[1] == 3:
        x = torch.where(_column(draws, GREY) < 0.2, _luminance(x).expand_as(x), x)
    return x


def rotations(x: Tensor, shifts: int) -> Tensor:
    """All images turned by 0, then all by 90 degrees, and so on: [shifts * B, C, H, W]."""
    return torch.cat([torch.rot90(x, quarter, (2, 3)) for quarter in range(shifts)]) if shifts > 1 else x


def two_views(images: Tensor, draws: Tensor, shifts: int, area_min: float, area_max: float) -> Tensor:
    """Two weak views of every rotation of each image, ordered by view, rotation, image; draws has a row for each."""
    x = weak(images.repeat(2 * shifts, 1, 1, 1), draws, area_min, area_max)
    # turned after the flip: a flip after a quarter turn would swap the labels 90 and 270
    return torch.cat([torch.rot90(block, i % shifts, (2, 3)) for i, block in enumerate(x.chunk(2 * shifts))])


def one_view(images: Tensor, draws: Tensor, shifts: int, area_min: float, area_max: float) -> Tensor:
    """The same weak view of all images in all rotations, ordered by rotation: draws is one row."""
    return rotations(weak(images, draws.expand(images.shape[0], -1), area_min, area_max), shifts)


def plain(images: Tensor) -> Tensor:
    """Floats in [0, 1], not augmented."""
    return images.float() / 255


def _column(draws: Tensor, column: int) -> Tensor:
    return draws[:, column, None, None, None]


def _crop_and_flip(images: Tensor, draws: Tensor, area_min: float, area_max: float) -> Tensor:
    """Bilinear crop of a share of the area, aspect ratio log-uniform in [3/4, 4/3], back to full size."""
    height, width = images.shape[2:]
    area = area_min + (area_max - area_min) * draws[:, AREA]
    ratio = torch.exp((2 * draws[:, RATIO] - 1) * math.log(4 / 3))
    scale_x = (area * ratio).sqrt().clamp(max=1)
    scale_y = (area / ratio).sqrt().clamp(max=1)
    # the crop's corner is uniform over all places where the crop fits, in units of the image
    x_of = _sample_positions(width, scale_x, draws[:, LEFT] * (1 - scale_x), draws[:, FLIP] < 0.5)
    y_of = _sample_positions(height, scale_y, draws[:, TOP] * (1 - scale_y), None)
    return _interpolate_rows(_interpolate_rows(plain(images), y_of).transpose(2, 3), x_of).transpose(2, 3)


def _sample_positions(size: int, scale_B: Tensor, offset_B: Tensor, flip_B: Tensor | None) -> Tensor:
    """Where in the input, in pixels, each output pixel's centre lies: [B, size]."""
    centre = (torch.arange(size, device=scale_B.device) + 0.5) / size
    centre_BS = centre.expand(scale_B.shape[0], size)
    if flip_B is not None:
        centre_BS = torch.where(flip_B[:, None], 1 - centre_BS, centre_BS)
    return (offset_B[:, None] + centre_BS * scale_B[:, None]) * size - 0.5


def _interpolate_rows(x: Tensor, position_BS: Tensor) -> Tensor:
    """Linear interpolation along axis 2 as a product with a two-banded matrix: a crop is separable."""
    size = x.shape[2]
    position_BS = position_BS.clamp(0, size - 1)
    grid = torch.arange(size, device=x.device, dtype=position_BS.dtype)
    weight_BSS = (1 - (position_BS[:, :, None] - grid).abs()).clamp(min=0)
    return weight_BSS[:, None] @ x


def _jitter(x: Tensor, draws: Tensor) -> Tensor:
    """Contrast before or after the changes of hue, saturation and brightness, as a coin says."""
    contrast = 0.6 + 0.8 * _column(draws, CONTRAST)
    first = _column(draws, ORDER) < 0.5
    x = _scale_contrast(x, torch.where(first, contrast, 1))
    x = _jitter_hsv(x, draws) if x.shape[1] == 3 else (x * (0.6 + 0.8 * _column(draws, BRIGHTNESS))).clamp(0, 1)
    return _scale_contrast(x, torch.where(first, 1, contrast))


def _scale_contrast(x: Tensor, factor: Tensor) -> Tensor:
    each_BC = x.mean(dim=(2, 3))
    mean = (each_BC @ x.new_tensor(LUMINANCE) if x.shape[1] == 3 else each_BC.mean(dim=1))[:, None, None, None]
    return torch.lerp(mean, x, factor).clamp(0, 1)


def _luminance(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    red, green, blue = LUMINANCE
    return red * x[:, 0:1] + green * x[:, 1:2] + blue * x[:, 2:3]


def _jitter_hsv(x: Tensor, draws: Tensor) -> Tensor:
    """Shift the hue by up to 0.1 of the circle, scale saturation and value by 0.6 to 1.4.

    Written for few passes over memory, which are a CPU's time: one division for the hue, one wrap around the circle.
    """
    red, green, blue = x.unbind(dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    is_red, is_green = value == red, value == green
    difference = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    sixth = torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0)) + 6 * (0.2 * draws[:, HUE, None, None] - 0.1)
    hue = (difference / chroma.clamp(min=1e-8) + sixth) % 6

    saturation = chroma / value.clamp(min=1e-8) * (0.6 + 0.8 * draws[:, SATURATION, None, None])
    value = (value * (0.6 + 0.8 * draws[:, BRIGHTNESS, None, None])).clamp(max=1)
    chroma = value * saturation.clamp(max=1)
    # how far each channel lies below the value: zero over a third of the circle, all of the chroma over another
    below = (2 - (hue - 3).abs(), (hue - 2).abs() - 1, (hue - 4).abs() - 1)
    return torch.stack([torch.addcmul(value, chroma, part.clamp(0, 1), value=-1) for part in below], dim=1)


def resize(images: Tensor, size: int) -> Tensor:
    """Whole images at another size, antialiased, still uint8."""
    if images.shape[2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)
