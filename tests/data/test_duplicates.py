import io

import numpy as np
from PIL import Image

from elsa.data.duplicates import BANDS, MAX_BITS, fine_thumbnail, gradient_hash, near_groups


def photo(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11), np.uint8)
    return Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC)


def look(images):
    hashes = np.array([gradient_hash(image) for image in images], np.uint64)
    return hashes, np.stack([fine_thumbnail(image) for image in images])


def recompressed(image):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=50)
    return Image.open(file).convert("L")


def brute_force(hashes, thumbnails):
    pairs = set()
    for i in range(len(hashes)):
        for j in range(i + 1, len(hashes)):
            difference = np.abs(thumbnails[i].astype(int) - thumbnails[j])
            if (
                bin(int(hashes[i]) ^ int(hashes[j])).count("1") <= 4
                and difference.max() <= 12
                and difference.mean() <= 2
            ):
                pairs.add((i, j))
    return pairs


def test_hash_is_the_sign_of_the_gradient():
    rising = Image.fromarray(np.tile(np.arange(0, 252, 4, dtype=np.uint8), (63, 1)).repeat(1, 0))
    assert gradient_hash(rising) == 0
    assert gradient_hash(rising.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) == 2**64 - 1
    left_half = np.zeros((8, 9), np.uint8)
    left_half[0, 0] = 255
    assert gradient_hash(Image.fromarray(left_half)) == 1 << 63


def test_bands_cover_all_bits_once_and_outnumber_the_tolerated_ones():
    bits = [bit for shift, width in BANDS for bit in range(shift, shift + width)]
    assert bits == list(range(64))
    assert len(BANDS) == MAX_BITS + 1


def test_copies_are_found_among_strangers():
    images = [photo(seed) for seed in range(60)]
    copies = [recompressed(images[7]), images[31].resize((40, 40)).resize((64, 64)), recompressed(images[7].rotate(0))]
    assert near_groups(*look(images + copies)) == [[7, 60, 62], [31, 61]]


def test_same_hash_with_other_brightness_is_no_copy():
    image = photo(0)
    darker = image.point(lambda value: value * 3 // 4)
    hashes, thumbnails = look([image, darker])
    assert bin(int(hashes[0]) ^ int(hashes[1])).count("1") <= 4
    assert near_groups(hashes, thumbnails) == []


def test_a_spot_or_a_shade_makes_another_image():
    flat = np.full((2, 256), 100, np.uint8)
    same = np.zeros(2, np.uint64)
    assert near_groups(same, flat) == [[0, 1]]
    for changed, groups in ((112, [[0, 1]]), (113, [])):
        spot = flat.copy()
        spot[1, 40] = changed  # by 12 of 255 in one place, and by 13
        assert near_groups(same, spot) == groups
    for changed, groups in ((102, [[0, 1]]), (103, [])):
        shade = flat.copy()
        shade[1] = changed  # by 2 of 255 everywhere, and by 3
        assert near_groups(same, shade) == groups


def test_copies_need_not_be_neighbours_in_their_band():
    first = 0
    last = 1 << 13 | 1 << 26 | 1 << 39 | 1 << 52  # 4 bits away, and alike in the lowest band alone
    between = (1 << 52) - (1 << 13)
    thumbnails = np.full((3, 256), 100, np.uint8)
    assert near_groups(np.array([first, between, last], np.uint64), thumbnails) == [[0, 2]]


def test_every_pair_a_full_comparison_finds_is_in_one_group():
    rng = np.random.default_rng(0)
    hashes, thumbnails = look([photo(seed) for seed in range(40)])
    flips = [
        [int(bit) for bit in rng.choice(64, size=count, replace=False)] for count in (1, 2, 3, 4, 4, 4, 4, 5, 5, 6)
    ]
    changed = [int(hashes[k]) ^ sum(1 << bit for bit in bits) for k, bits in enumerate(flips)]
    hashes = np.concatenate([hashes, np.array(changed, np.uint64)])
    thumbnails = np.concatenate([thumbnails, thumbnails[: len(flips)]])
    found = near_groups(hashes, thumbnails)
    assert brute_force(hashes, thumbnails) == {tuple(group) for group in found} == {(k, 40 + k) for k in range(7)}


def test_thousands_of_images_of_one_scene_take_no_quadratic_time():
    rng = np.random.default_rng(0)
    thumbnails = (100 + rng.integers(0, 2, (20_000, 256))).astype(np.uint8)
    groups = near_groups(np.zeros(20_000, np.uint64), thumbnails)
    assert len(groups) == 1
    assert len(groups[0]) == 20_000


def test_no_images_and_one_image():
    assert near_groups(np.zeros(0, np.uint64), np.zeros((0, 256), np.uint8)) == []
    assert near_groups(np.zeros(1, np.uint64), np.zeros((1, 256), np.uint8)) == []
