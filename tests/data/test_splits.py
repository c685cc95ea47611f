"""The protocol's split: its sizes, what may not overlap, and what stays the same when a setting changes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elsa.data.splits import group_sizes, one_class_split
from elsa.errors import UserError

CLASSES = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 211))
gammas_l = st.sampled_from([0.01, 0.05, 0.1, 0.2])
gammas_p = st.sampled_from([0.0, 0.05, 0.1, 0.3])
class_pairs = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1])


def groups(split):
    """The positions of X_n, X_u's normals, X_u's hidden anomalies and X_a."""
    words, hidden = np.array(split.labels), split.hidden
    return [
        split.index[mask]
        for mask in (words == "normal", (words == "") & ~hidden, (words == "") & hidden, words == "anomaly")
    ]


def test_group_sizes_of_the_paper_setting():
    # 5,000 normals of CIFAR-10, by hand: 5000 / (.05 + .9 * .9) = 5813.95, of which 5% and 10% of 90%
    sizes = group_sizes(5000, 0.05, 0.1)
    assert (sizes.labelled_normals, sizes.labelled_anomalies, sizes.hidden_anomalies) == (291, 291, 523)


@given(gamma_l=gammas_l, gamma_p=gammas_p)
def test_group_sizes_meet_both_shares(gamma_l, gamma_p):
    normals = 5000
    sizes = group_sizes(normals, gamma_l, gamma_p)
    total = normals + sizes.hidden_anomalies + sizes.labelled_anomalies
    unlabelled = total - sizes.labelled_normals - sizes.labelled_anomalies
    assert sizes.labelled_normals / total == pytest.approx(gamma_l, abs=1.5 / total)
    assert sizes.labelled_anomalies / total == pytest.approx(gamma_l, abs=1.5 / total)
    assert sizes.hidden_anomalies / unlabelled == pytest.approx(gamma_p, abs=1.5 / unlabelled)


@settings(max_examples=40, deadline=None)
@given(pair=class_pairs, gamma_l=gammas_l, gamma_p=gammas_p, seed=st.integers(0, 99))
def test_groups_are_disjoint_and_of_their_class(pair, gamma_l, gamma_p, seed):
    normal, labelled = pair
    split = one_class_split(CLASSES, normal, labelled, gamma_l, gamma_p, seed)
    x_n, x_u, hidden, x_a = groups(split)
    assert len(np.unique(split.index)) == len(split.index) == len(split.labels) == len(split.hidden)
    assert set(np.concatenate([x_n, x_u])) == set(np.flatnonzero(normal == CLASSES))  # every normal image is used
    assert (CLASSES[hidden] != normal).all()
    assert (CLASSES[x_a] == labelled).all()
    sizes = group_sizes(211, gamma_l, gamma_p)
    assert (len(x_n), len(hidden), len(x_a)) == (
        sizes.labelled_normals,
        sizes.hidden_anomalies,
        sizes.labelled_anomalies,
    )
    assert split.hidden.sum() == len(hidden)  # nothing labelled counts as hidden


@settings(max_examples=40, deadline=None)
@given(pair=class_pairs, gamma_l=gammas_l, gamma_p=gammas_p, seed=st.integers(0, 99))
def test_one_pretraining_serves_every_labelled_class(pair, gamma_l, gamma_p, seed):
    normal, labelled = pair
    other = next(k for k in range(10) if k not in pair)
    unsupervised = one_class_split(CLASSES, normal, None, 0.0, gamma_p, seed)
    split = one_class_split(CLASSES, normal, labelled, gamma_l, gamma_p, seed)
    twin = one_class_split(CLASSES, normal, other, gamma_l, gamma_p, seed)
    x_n, x_u, hidden, x_a = groups(split)
    _, pretrained_u, pretrained_hidden, _ = groups(unsupervised)
    np.testing.assert_array_equal(hidden, pretrained_hidden[: len(hidden)])
    assert not set(x_a) & set(unsupervised.index)  # pre-training never sees X_a
    np.testing.assert_array_equal(np.concatenate([x_n, x_u]), pretrained_u)
    for mine, theirs in zip(groups(twin)[:3], (x_n, x_u, hidden), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_hidden_anomalies_come_from_all_nine_classes():
    split = one_class_split(CLASSES, 3, 4, 0.05, 0.3, seed=0)
    assert set(CLASSES[groups(split)[2]]) == set(range(10)) - {3}


def test_labelled_anomalies_hardly_change_with_pollution():
    clean = groups(one_class_split(CLASSES, 0, 1, 0.05, 0.0, seed=0))[3]
    polluted = groups(one_class_split(CLASSES, 0, 1, 0.05, 0.1, seed=0))[3]
    shared = min(len(clean), len(polluted))
    np.testing.assert_array_equal(clean[:shared], polluted[:shared])


def test_same_seed_same_split_and_other_seed_or_class_another():
    again = one_class_split(CLASSES, 0, 1, 0.05, 0.1, seed=7)
    np.testing.assert_array_equal(again.index, one_class_split(CLASSES.tolist(), 0, 1, 0.05, 0.1, seed=7).index)
    assert (again.index != one_class_split(CLASSES, 0, 1, 0.05, 0.1, seed=8).index).any()
    ranks = [one_class_split(CLASSES, k, 1, 0.05, 0.1, seed=7).index[:211].argsort() for k in (0, 2)]
    assert (ranks[0] != ranks[1]).any()  # each normal class has an order of its own


@pytest.mark.parametrize(
    ("normal", "labelled", "gamma_l", "gamma_p", "complaint"),
    [
        (0, 1, 0.5, 0.0, "gamma_l=0.5"),
        (0, 1, -0.1, 0.0, "gamma_l=-0.1"),
        (0, 1, float("nan"), 0.0, "gamma_l=nan"),
        (0, 1, 0.05, 1.0, "gamma_p=1.0"),
        (0, None, 0.05, 0.0, "labelled=None"),
        (0, 1, 0.0, 0.0, "labelled=1"),
        (2, 2, 0.05, 0.0, "is the normal class"),
        (10, 1, 0.05, 0.0, "normal=10 does not occur"),
        (0, 11, 0.05, 0.0, "labelled=11 does not occur"),
        (0, 1, 0.45, 0.6, "labelled anomalies of class 1"),
        (0, None, 0.0, 0.95, "hides 4009 anomalies"),
    ],
)
def test_impossible_splits_are_refused(normal, labelled, gamma_l, gamma_p, complaint):
    with pytest.raises(UserError, match=complaint):
        one_class_split(CLASSES, normal, labelled, gamma_l, gamma_p, seed=0)


def test_splits_need_only_numpy():
    code = (
        "import sys, elsa.data.splits; print(*[m for m in ('torch', 'PIL', 'sklearn', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
