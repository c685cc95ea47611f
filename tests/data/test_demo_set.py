"""The embedded images, and the task the demo poses with them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elsa.data.audit import audit
from elsa.data.benchmarks import FASHION_MNIST_CLASSES
from elsa.data.demo import DEMO_FILE, demo_split, load_demo
from elsa.data.sources import open_source
from elsa.errors import UserError

CLASSES = np.random.default_rng(1).permutation(np.repeat(np.arange(10), [90, 40, 40, 40, 40, 40, 40, 40, 40, 40]))
SMALL = {"normals": 61, "hidden": 23, "labelled_normals": 7, "labelled_anomalies": 19, "test": 45}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999))
def test_groups_have_their_sizes_and_share_no_image(seed):
    split = demo_split(CLASSES, 0, seed, **SMALL)
    everything = np.concatenate([split.train_index, split.test_index])
    assert len(np.unique(everything)) == len(everything)
    labels, anomaly = np.array(split.labels), CLASSES[split.train_index] != 0
    assert (~anomaly).sum() == 61
    assert ((labels == "normal") & ~anomaly).sum() == (labels == "normal").sum() == 7
    assert ((labels == "anomaly") & anomaly).sum() == (labels == "anomaly").sum() == 19
    np.testing.assert_array_equal(split.hidden, (labels == "") & anomaly)
    assert split.hidden.sum() == 23
    np.testing.assert_array_equal(split.test_anomaly, CLASSES[split.test_index] != 0)
    assert (len(split.test_index), split.test_anomaly.sum()) == (45, 22)


def test_every_group_of_anomalies_holds_all_kinds_evenly():
    split = demo_split(CLASSES, 0, 3, **SMALL)
    labels = np.array(split.labels)
    for chosen in (
        split.train_index[split.hidden],
        split.train_index[labels == "anomaly"],
        split.test_index[split.test_anomaly],
    ):
        counts = np.bincount(CLASSES[chosen], minlength=10)[1:]
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 2


def test_too_small_a_set_is_refused():
    with pytest.raises(UserError, match="needs 112 normal images, the set has 90"):
        demo_split(CLASSES, 0, 0, **{**SMALL, "normals": 89})
    with pytest.raises(UserError, match="needs 364 other images, the set has 360"):
        demo_split(CLASSES, 0, 0, **{**SMALL, "hidden": 323})


def test_demo_is_as_the_issue_asks():
    demo = load_demo(0)
    assert demo.images.shape == (1530, 1, 28, 28)
    assert demo.images.dtype == torch.uint8
    assert demo.test_images.shape == (1000, 1, 28, 28)
    assert [demo.labels.count(word) for word in ("normal", "anomaly", "")] == [30, 30, 1470]
    assert demo.hidden.sum() == 150
    assert demo.test_anomaly.sum() == 500
    kinds = {g for g, label in zip(demo.garments, demo.labels, strict=True) if label == "anomaly"}
    assert kinds == {g for g, h in zip(demo.garments, demo.hidden.tolist(), strict=True) if h}
    assert kinds == set(FASHION_MNIST_CLASSES) - {"bag"}
    assert [g != "bag" for g in demo.test_garments] == demo.test_anomaly.tolist()


def test_seeds_draw_different_demos_and_each_the_same_again():
    first, again, other = load_demo(1), load_demo(1), load_demo(2)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_embedded_file_fits_the_package_and_states_its_origin():
    assert DEMO_FILE.stat().st_size <= 3_000_000
    assert "Zalando" in (DEMO_FILE.parent / "LICENSE").read_text()
    assert "tools/make_demo_set.py" in (DEMO_FILE.parent / "ORIGIN.md").read_text()


def test_embedded_file_is_a_source_without_faults():
    source = open_source(DEMO_FILE)
    assert (source.kind, len(source)) == ("npz", 5500)
    found = audit(source)
    assert found.findings == []
