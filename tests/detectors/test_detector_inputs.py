import pytest
import torch

from elsa.detectors import inputs
from elsa.detectors.inputs import as_rows, checked, hold_out, kind_of, not_anomalies, scored, subsample
from elsa.errors import UserError


class Stored:
    """Images that are not one tensor: what elsa.data.shards.Shards offers, and no more."""

    def __init__(self, images):
        self.images, self.largest = images, 0

    @property
    def shape(self):
        return self.images.shape

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        batch = self.images[index]
        self.largest = max(self.largest, len(batch))
        return batch


def pixels(number=13):
    return torch.randint(0, 256, (number, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_pixels_become_rows_between_0_and_1_and_vectors_stay():
    images, index = pixels(), torch.tensor([11, 2, 3])
    rows = as_rows(images, index)
    assert rows.dtype == torch.float32
    assert rows[1, 5 * 7 * 2 + 7 * 4 + 6] == images[2, 2, 4, 6] / 255
    vectors = torch.randn(13, 5, dtype=torch.float64)
    assert torch.equal(as_rows(vectors, index), vectors[index].float())


def test_images_in_shards_are_read_a_batch_at_a_time(monkeypatch):
    monkeypatch.setattr(inputs, "BATCH", 5)
    stored = Stored(pixels())
    assert torch.equal(as_rows(stored, torch.arange(13)), as_rows(stored.images, torch.arange(13)))
    scores = scored(stored, 105, lambda rows: rows.sum(dim=1))
    torch.testing.assert_close(scores, stored.images.flatten(1).sum(dim=1).double() / 255)
    assert stored.largest == 5


@pytest.mark.parametrize(
    ("images", "given"),
    [
        (torch.zeros(5, 3, 4, 4), "torch.float32 of 4 dimensions"),
        (torch.zeros(5, 4, dtype=torch.uint8), "torch.uint8 of 2 dimensions"),
        (torch.zeros(5, 4, dtype=torch.int64), "torch.int64 of 2 dimensions"),
        (torch.zeros(5, 4).numpy(), "ndarray"),
        ([[0.0, 1.0]], "list"),
    ],
)
def test_what_is_neither_images_nor_vectors_is_refused(images, given):
    with pytest.raises(UserError, match=f"images are {given}: use a uint8 tensor"):
        kind_of(images)


def test_images_of_another_size_than_the_fitted_ones_are_refused():
    with pytest.raises(UserError, match=r"105 numbers each \(shape \(3, 5, 7\)\), the detector was fitted on 75"):
        scored(pixels(), 75, lambda rows: rows.sum(dim=1))


def test_vectors_that_are_not_numbers_are_refused():
    vectors = torch.zeros(3, 2)
    vectors[1, 1] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        as_rows(vectors, torch.arange(3))


def test_more_rows_than_memory_should_hold_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(inputs, "MOST_BYTES", 4 * 105 * 12)
    as_rows(pixels(), torch.arange(12))
    with pytest.raises(UserError, match="13 images of 105 numbers each"):
        as_rows(pixels(), torch.arange(13))


@pytest.mark.parametrize(("number", "held"), [(2, 1), (3, 1), (59, 29), (61, 30), (299, 30), (301, 30), (1000, 100)])
def test_a_tenth_is_held_out_at_least_30_at_most_half(number, held):
    candidates = torch.arange(number) * 7
    train, held_out = hold_out(candidates, seed=0)
    assert len(held_out) == held
    assert torch.equal(torch.cat([train, held_out]).sort().values, candidates)  # no overlap, none lost


def test_what_is_held_out_depends_on_the_seed():
    candidates = torch.arange(100)
    assert torch.equal(hold_out(candidates, 1)[1], hold_out(candidates, 1)[1])
    assert not torch.equal(hold_out(candidates, 1)[1], hold_out(candidates, 2)[1])


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_images_to_hold_one_out_are_refused(number):
    with pytest.raises(UserError, match=f"{number} normal or unlabelled images: at least 2 are needed"):
        hold_out(torch.arange(number), seed=0)


def test_a_subsample_is_in_order_and_as_large_as_asked():
    index = torch.arange(50) * 3
    some = subsample(index, 20, seed=0)
    assert len(some) == len(some.unique()) == 20
    assert torch.equal(some, some.sort().values)
    assert set(some.tolist()) <= set(index.tolist())
    assert torch.equal(subsample(index, 50, seed=0), index)


@pytest.mark.parametrize("number", [3, 5])
def test_another_number_of_labels_than_images_is_refused(number):
    with pytest.raises(UserError, match=f"4 images and {number} labels"):
        checked(pixels(4), [""] * number)


def test_labels_become_codes_and_labelled_anomalies_are_set_aside():
    codes = checked(pixels(4), ["normal", "anomaly", "", None])
    assert codes.tolist() == [1, -1, 0, 0]
    assert not_anomalies(codes).tolist() == [0, 2, 3]
