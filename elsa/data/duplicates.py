"""Images that look the same, found without comparing every pair.

Two images are near duplicates when their 64-bit gradient hashes differ in at most 4 bits and their 16 x 16 thumbnails
nowhere by much. Hashes within 4 bits agree in one of 5 bands, so only images that share a band are compared.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

MAX_BITS = 4
BANDS = [(0, 13), (13, 13), (26, 13), (39, 13), (52, 12)]
# 99 of 100 copies of photos and solar cells saved as JPEG at quality 30 differ by at most 9, and by 1.7 on average;
# different cells of one make, which the hash cannot tell apart, by 1.5 to 5 on average.
MAX_DIFFERENCE, MAX_MEAN_DIFFERENCE = 12, 2.0
# Neighbours compared within a band: bounds the work when thousands of images share a band.
REACH = 64


def gradient_hash(image: Image.Image) -> int:
    """64 bits of a grey image: at 9 x 8 pixels, whether each is brighter than its right neighbour."""
    pixels = np.asarray(image.resize((9, 8), Image.Resampling.BOX), np.int16)
    return int.from_bytes(np.packbits(pixels[:, :-1] > pixels[:, 1:]).tobytes(), "big")


def fine_thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """256 values of a grey image, for what the hash confuses: it knows no brightness and little of flat areas."""
    return np.asarray(image.resize((16, 16), Image.Resampling.BOX)).reshape(-1)


def near_groups(gradients: NDArray[np.uint64], thumbnails: NDArray[np.uint8]) -> list[list[int]]:
    """Groups of two and more images that look the same, each in ascending order."""
    count = len(gradients)
    lefts: list[NDArray[np.int64]] = []
    rights: list[NDArray[np.int64]] = []
    bands = [gradients >> np.uint64(shift) & np.uint64((1 << width) - 1) for shift, width in BANDS]
    for number, band in enumerate(bands):
        order = np.lexsort((gradients, band))
        for distance in range(1, min(REACH, count - 1) + 1):
            left, right = order[:-distance], order[distance:]
            together = band[left] == band[right]
            if not together.any():
                break
            left, right = left[together], right[together]
            close = np.bitwise_count(gradients[left] ^ gradients[right]) <= MAX_BITS
            for earlier in bands[:number]:  # compared there already; copies share all bands
                close &= earlier[left] != earlier[right]
            left, right = left[close], right[close]
            # In pieces: a thousand pairs of thumbnails are 1 MB, all pairs of a large set might be gigabytes.
            for begin in range(0, len(left), 1000):
                a, b = left[begin : begin + 1000], right[begin : begin + 1000]
                difference = np.abs(thumbnails[a].astype(np.int16) - thumbnails[b])
                alike = (difference.max(axis=1) <= MAX_DIFFERENCE) & (difference.mean(axis=1) <= MAX_MEAN_DIFFERENCE)
                lefts.append(a[alike])
                rights.append(b[alike])
    if not lefts:
        return []
    left, right = np.concatenate(lefts), np.concatenate(rights)
    links = coo_array((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
    _, component = connected_components(links, directed=False)
    order = np.argsort(component, kind="stable")
    sizes = np.bincount(component)
    groups = np.split(order, np.cumsum(sizes)[:-1])
    return sorted(group.tolist() for group in groups if len(group) > 1)
