"""Embeddings: what reaches the network, and that nothing but the image decides its vector."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elsa.encoders import Encoder, embed, embed_batches, input_size, parse_encoder
from elsa.errors import UserError

N, SIZE = 7, 37


@pytest.fixture(scope="module")
def encoder(net):
    return Encoder("mobilenet_v2", net, "random.pth", "0" * 64)


def images(channels=3, height=23, width=53, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (N, channels, height, width), generator=generator, dtype=torch.uint8)


def by_hand(net, batch):
    """One view, one image at a time."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    vectors = []
    for image in batch:
        pixels = F.interpolate(image[None] / 255, (SIZE, SIZE), mode="bilinear", antialias=True)[0]
        vectors.append(net(((pixels.permute(1, 2, 0) - mean) / std).permute(2, 0, 1)[None])[0])
    return torch.stack(vectors)


def test_an_embedding_is_the_mean_of_the_image_and_its_mirror_image(encoder):
    straight, mirrored = by_hand(encoder.net, images()), by_hand(encoder.net, images().flip(3))
    assert (straight - mirrored).abs().max() > 1e-3  # or a wrong view would go unnoticed
    torch.testing.assert_close(embed(encoder, images(), size=SIZE), (straight + mirrored) / 2, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(embed(encoder, images(), size=SIZE, views="image"), straight, rtol=1e-3, atol=1e-5)


def test_grey_is_a_colour_image_with_three_equal_channels(encoder):
    grey = images(channels=1)
    torch.testing.assert_close(
        embed(encoder, grey, size=SIZE), embed(encoder, grey.expand(-1, 3, -1, -1), size=SIZE), rtol=0, atol=0
    )


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_a_vector_does_not_depend_on_the_batch_it_is_made_in(encoder, batch):
    together = embed(encoder, images(), size=SIZE)
    torch.testing.assert_close(embed(encoder, images(), size=SIZE, batch=batch), together, rtol=1e-4, atol=1e-6)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    shuffled = embed(encoder, images()[order], size=SIZE, batch=batch)
    torch.testing.assert_close(shuffled, together[order], rtol=1e-4, atol=1e-6)


def test_twice_the_same_to_the_bit(encoder):
    assert torch.equal(embed(encoder, images(), size=SIZE), embed(encoder, images(), size=SIZE))


class Streamed:
    """Images that are not a tensor and count how many are asked for at once."""

    def __init__(self, whole):
        self.whole, self.shape, self.asked = whole, whole.shape, []

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, index):
        self.asked.append(len(self.whole[index]))
        return self.whole[index]


def test_shards_are_read_a_batch_at_a_time_and_progress_is_reported(encoder):
    streamed, told = Streamed(images()), []
    vectors = list(embed_batches(encoder, streamed, size=SIZE, batch=3, progress=lambda *report: told.append(report)))
    assert streamed.asked == [3, 3, 1]
    assert [(stage, done, total) for stage, done, total, _ in told] == [
        ("embed", 3, 7),
        ("embed", 6, 7),
        ("embed", 7, 7),
    ]
    torch.testing.assert_close(torch.cat(vectors), embed(encoder, images(), size=SIZE), rtol=1e-4, atol=1e-6)


def test_no_images_make_no_vectors(encoder):
    assert embed(encoder, images()[:0]).shape == (0, 1280)


def test_the_input_images_are_left_alone(encoder):
    given = images()
    embed(encoder, given, size=SIZE)
    assert torch.equal(given, images())


@pytest.mark.parametrize(("side", "size"), [(28, 96), (32, 160), (64, 160), (65, 224), (512, 224)])
def test_small_images_are_embedded_at_a_smaller_size(side, size):
    assert input_size(side) == size


@pytest.mark.parametrize(
    ("settings", "said"), [({"views": "mirror"}, "views='mirror'"), ({"channels": 4}, "C 1 .grey. or 3 .colour.")]
)
def test_what_it_cannot_embed_is_refused(encoder, settings, said):
    given = images(channels=settings.pop("channels", 3))
    with pytest.raises(UserError, match=said):
        embed(encoder, given, **settings)


@pytest.mark.parametrize("text", ["resnet18", "mobilenet_v2", "mobilenet_v2:", ":file", "mobilenet_v3:file"])
def test_an_encoder_is_named_with_its_file(text):
    with pytest.raises(UserError, match="mobilenet_v2:FILE"):
        parse_encoder(text)


@pytest.mark.skipif("ELSA_MOBILENET_V2" not in os.environ, reason="needs torchvision's weight file")
def test_torchvisions_file_is_read_and_tells_pictures_apart():
    file = Path(os.environ["ELSA_MOBILENET_V2"])
    encoder = parse_encoder(f"mobilenet_v2:{file}")
    assert encoder.sha256.startswith("b0353104")
    assert encoder.file == file.name
    grid = torch.arange(96)
    stripes = (grid // 6 % 2).expand(96, 96)
    board = (stripes + stripes.T) % 2
    disc = ((grid[:, None] - 48) ** 2 + (grid - 48) ** 2 < 900).long()
    pictures = torch.stack([stripes, stripes.roll(3, dims=1), board, board.roll(3, dims=1), disc, disc.roll(3, dims=1)])
    unit = F.normalize(embed(encoder, (pictures * 255).to(torch.uint8)[:, None]), dim=1)
    nearest = (unit @ unit.T - 2 * torch.eye(6)).argmax(dim=1)
    assert nearest.tolist() == [1, 0, 3, 2, 5, 4]
