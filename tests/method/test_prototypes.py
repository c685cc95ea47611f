import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans

from elsa import prototypes as module
from elsa.errors import UserError
from elsa.prototypes import spherical_kmeans


def groups(num_groups=7, per_group=31, dimensions=13, spread=0.05, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(num_groups, dimensions, generator=generator), dim=1)
    noise = spread * torch.randn(num_groups, per_group, dimensions, generator=generator)
    return centres, F.normalize(centres[:, None] + noise, dim=2).flatten(0, 1)


def prototypes_of(z, count, seed=0, **options):
    return spherical_kmeans(z, count, torch.Generator().manual_seed(seed), **options)


def test_finds_well_separated_groups():
    centres, z = groups()
    found = prototypes_of(z, 7)
    assert ((found @ centres.T).max(dim=0).values > 0.99).all()


def test_prototypes_are_unit_vectors_in_the_right_number():
    _, z = groups()
    found = prototypes_of(z, 11)
    assert found.shape == (11, 13)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(11))


def test_as_good_as_scikit_learn_on_unstructured_data():
    z = F.normalize(torch.randn(503, 13, generator=torch.Generator().manual_seed(1)), dim=1)
    ours = (z @ prototypes_of(z, 19).T).max(dim=1).values.mean()
    centres = torch.from_numpy(KMeans(19, n_init=1, random_state=0).fit(z.numpy()).cluster_centers_)
    theirs = (z @ F.normalize(centres, dim=1).T).max(dim=1).values.mean()
    assert ours > theirs - 0.01


def test_is_a_fixed_point_each_prototype_is_the_direction_of_its_members():
    _, z = groups(spread=0.5)
    found = prototypes_of(z, 7, iterations=500)
    member = (z @ found.T).argmax(dim=1)
    means = torch.stack([F.normalize(z[member == k].sum(dim=0), dim=0) for k in range(7)])
    torch.testing.assert_close(found, means)


def test_more_iterations_never_serve_the_embeddings_worse():
    z = F.normalize(torch.randn(503, 13, generator=torch.Generator().manual_seed(1)), dim=1)
    quality = [(z @ prototypes_of(z, 19, iterations=n).T).max(dim=1).values.mean() for n in (0, 1, 3, 9, 27)]
    assert quality == sorted(quality)
    assert quality[-1] > quality[0]


def test_a_seed_decides_and_another_seed_decides_otherwise():
    z = F.normalize(torch.randn(503, 13, generator=torch.Generator().manual_seed(1)), dim=1)
    assert torch.equal(prototypes_of(z, 19), prototypes_of(z, 19))
    assert not torch.equal(prototypes_of(z, 19), prototypes_of(z, 19, seed=1))


def test_the_start_is_spread_over_all_groups():
    centres, z = groups(spread=0.001)  # 7 tight groups: each next start must come from a new one
    start = prototypes_of(z, 7, iterations=0)
    assert ((start @ centres.T).argmax(dim=1).sort().values == torch.arange(7)).all()


def test_identical_embeddings_are_no_reason_to_fail():
    z = F.normalize(torch.ones(17, 5), dim=1)
    assert prototypes_of(z, 11).isfinite().all()


def test_an_empty_cluster_takes_the_embedding_served_worst(monkeypatch):
    z = F.normalize(torch.tensor([[1.0, 0.1, 0], [1, -0.1, 0], [1, 0, 0.1], [0.5, 1, 0], [-1, 0.2, 0]]), dim=1)
    monkeypatch.setattr(module, "_spread_start", lambda *_: z[:1].expand(3, -1))  # two of three clusters are empty
    found = prototypes_of(z, 3, iterations=1)
    torch.testing.assert_close(found[1:], z[[4, 3]])
    torch.testing.assert_close(found[0], F.normalize(z.sum(dim=0), dim=0))


def test_a_draw_that_rounds_up_to_one_still_names_an_embedding(monkeypatch):
    _, z = groups()
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.ones(count, dtype=torch.float64))
    assert prototypes_of(z, 5).isfinite().all()


def test_more_prototypes_than_embeddings_are_refused():
    with pytest.raises(UserError, match="num_prototypes=8 exceeds the 7 embeddings"):
        prototypes_of(torch.eye(7), 8)
