"""The head from closed form to learning: energies, loss, map, suspects, calibration, saving."""

import dataclasses
import inspect
import json
import math

import pytest
import torch
from clouds import FEATURES, D, problem, unit
from torch.nn.functional import normalize

import elsa.head
from elsa.encoders import Encoder
from elsa.energy import energy
from elsa.errors import UserError
from elsa.head import (
    ElsaHead,
    HeadConfig,
    alikeness,
    likeness,
    moved,
    parts_of,
    principal_directions,
    separating_direction,
    spread_of,
    suspicion,
    usefulness,
)
from elsa.model_file import read_model, write_model
from elsa.trust.metrics import auroc

N, M, R, K = 23, 11, 3, 5  # distinct primes: no axis can stand in for another


@pytest.fixture(scope="module")
def fitted():
    vectors, labels, _, _ = problem()
    return ElsaHead(seed=3).fit(vectors, labels)


# --- the parts


def shares(count=N, seed=5):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_parts_match_their_definition():
    z, basis, memory = unit(N), unit(D, R, seed=1), unit(M, R, seed=2)
    log_weight, middle, whitening = shares(M).log(), unit(1, R, seed=3)[0], unit(R, R, seed=4)
    direction, down, up, prototypes = unit(1, R, seed=6)[0], unit(R, 2, seed=7), unit(2, R, seed=8), unit(K, R, seed=9)
    parts = parts_of(z, 0.1, 0.7, basis, memory, log_weight, middle, whitening, direction, down, up, prototypes)
    assert parts.shape == (N, 4)
    for row, found in zip(z.tolist(), parts.tolist(), strict=True):
        y = [sum(row[d] * basis[d, r].item() for d in range(D)) for r in range(R)]
        learned = sum(y[r] * direction[r].item() for r in range(R))
        near = sum(
            math.exp(log_weight[m].item() + (sum(y[r] * memory[m, r].item() for r in range(R)) - 1) / 0.1)
            for m in range(M)
        )
        off = [y[r] - middle[r].item() for r in range(R)]
        spread = sum(sum(off[r] * whitening[r, s].item() for r in range(R)) ** 2 for s in range(R))
        to = [
            y[r] + sum(y[q] * down[q, s].item() * up[s, r].item() for q in range(R) for s in range(2)) for r in range(R)
        ]
        length = math.sqrt(sum(part**2 for part in to))
        alike = [sum(to[r] * prototypes[k, r].item() for r in range(R)) / length for k in range(K)]
        bent = -math.log(sum(math.exp(cosine / 0.7) for cosine in alike))
        assert found == pytest.approx([learned, -math.log(near), spread, bent])


def test_the_basis_is_orthonormal_and_holds_what_both_sides_share_unequally():
    normals = torch.zeros(90, D, dtype=torch.float64)
    normals[:, 0], normals[:45, 1] = 3.0, 1.0
    anomalies = torch.zeros(2, D, dtype=torch.float64)
    anomalies[:, 4] = 1.0
    z = normalize(torch.cat([normals, anomalies]), dim=1)
    label = torch.tensor([0] * 90 + [-1] * 2, dtype=torch.int8)
    basis = principal_directions(z, label, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    assert basis[4].norm() > 0.99, "two anomalies weigh as much as ninety normals"
    assert principal_directions(z, label, 100).shape == (D, D)
    assert principal_directions(z[:3], label[:3], 100).shape == (D, 3)


def test_no_image_is_alike_itself():
    y = unit(N)
    alike = alikeness(y, 0.2)
    assert not alike.diagonal().any()
    assert alike[2, 5].item() == pytest.approx(math.exp(((y[2] @ y[5]).item() - 1) / 0.2))


def direction_by_hand(y, anomalous, penalty):
    """Weighted least squares of both targets for every image, instead of one mean target."""
    a, b = anomalous / anomalous.sum(), (1 - anomalous) / (1 - anomalous).sum()
    square = sum((a[i] + b[i]) * torch.outer(y[i], y[i]) for i in range(len(y)))
    pull = sum((a[i] - b[i]) * y[i] for i in range(len(y)))
    return torch.linalg.solve(square + penalty * square.trace() / R * torch.eye(R, dtype=y.dtype), pull)


@pytest.mark.parametrize("soft", [True, False])
def test_the_direction_matches_its_definition(soft):
    anomalous = shares() if soft else (shares() > 0.6).double()
    y = unit(N, R)
    torch.testing.assert_close(separating_direction(y, anomalous, 0.7)[0], direction_by_hand(y, anomalous, 0.7))


def test_the_direction_is_where_the_loss_is_least():
    y, anomalous = unit(N, R), shares()
    a, b = anomalous / anomalous.sum(), (1 - anomalous) / (1 - anomalous).sum()
    price = 0.7 * ((a + b) @ y.square()).mean()

    def loss(direction):
        f = y @ direction
        return a @ (f - 1).square() + b @ (f + 1).square() + price * direction.square().sum()

    direction = separating_direction(y, anomalous, 0.7)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(loss(direction), direction)
    torch.testing.assert_close(gradient, torch.zeros(R, dtype=torch.float64))


def test_what_an_image_gets_is_learned_without_it():
    """The same fit with one image's square and pull taken out, everything else as it was."""
    y, anomalous = unit(N, R), shares()
    _, without = separating_direction(y, anomalous, 0.7)
    a, b = anomalous / anomalous.sum(), (1 - anomalous) / (1 - anomalous).sum()
    price = 0.7 * ((a + b) @ y.square()).mean() * torch.eye(R, dtype=torch.float64)
    for out in range(N):
        rest = torch.arange(N) != out
        square = (y[rest] * (a + b)[rest, None]).T @ y[rest] + price
        direction = torch.linalg.solve(square, (a - b)[rest] @ y[rest])
        assert without[out].item() == pytest.approx((y[out] @ direction).item())


def test_the_spread_is_the_distance_in_the_measure_of_the_normals():
    y, normal = unit(N, R), shares()
    middle, whitening, _ = spread_of(y, normal, 0.3)
    by_hand = sum(normal[i] * y[i] for i in range(N)) / normal.sum()
    torch.testing.assert_close(middle, by_hand)
    square = sum(normal[i] * torch.outer(y[i] - by_hand, y[i] - by_hand) for i in range(N)) / normal.sum()
    square = square + 0.3 * square.trace() / R * torch.eye(R, dtype=torch.float64)
    new = unit(1, R, seed=9)[0] - middle
    assert (new @ whitening).square().sum().item() == pytest.approx((new @ torch.linalg.inv(square) @ new).item())


def test_an_image_does_not_widen_its_own_spread():
    y, normal = unit(N, R), shares()
    middle, whitening, without = spread_of(y, normal, 0.3)
    off = y - middle
    total = normal.sum()
    measure = torch.linalg.inv(whitening @ whitening.T) * total
    for out in range(N):
        alone = measure - normal[out] * torch.outer(off[out], off[out])
        assert without[out].item() == pytest.approx((off[out] @ torch.linalg.inv(alone) @ off[out] * total).item())


# --- suspects


def bells(normals, hidden, known, seed=0):
    generator = torch.Generator().manual_seed(seed)
    unlabelled = torch.cat([torch.randn(normals, generator=generator), 4 + torch.randn(hidden, generator=generator)])
    return unlabelled.double(), torch.randn(known, generator=generator).double()


@pytest.mark.parametrize("hidden", [0, 50, 100, 200])
def test_as_many_suspects_are_seen_as_hide(hidden):
    scores, known = bells(1000 - hidden, hidden, 100)
    suspects = suspicion(scores, known)
    assert suspects.sum().item() == pytest.approx(hidden, abs=20 + 0.25 * hidden)
    assert suspects.min() >= 0
    assert suspects.max() <= 1
    if hidden:
        assert suspects[1000 - hidden :].mean() > 0.6
        assert suspects[: 1000 - hidden].mean() < 0.04


def test_labelled_normals_that_score_as_high_take_the_suspicion_away():
    scores, _ = bells(900, 100, 0)
    skewed = torch.cat([scores[:180], scores[-20:]])  # a tenth of the normal ones themselves score so high
    assert suspicion(scores, skewed).sum() < 0.4 * suspicion(scores, scores[:180]).sum()


def test_equal_scores_raise_no_suspicion():
    assert not suspicion(torch.ones(50).double(), torch.ones(5).double()).any()
    assert not suspicion(torch.ones(1).double(), torch.ones(0).double()).any()


# --- how much of one kind the anomalies are


def test_likeness_runs_from_many_kinds_to_one():
    y = torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0.8, 0, 0.6]])
    is_anomaly = torch.tensor([False, True, True])
    # among: .64; across: .8, so 1 + 2.5 * (.64 - .8) / .2 is below 0
    assert likeness(y, is_anomaly) == 0
    y[0] = torch.tensor([0.84, 0, 0])  # across .672
    assert likeness(y, is_anomaly) == pytest.approx(1 + 2.5 * (0.64 - 0.672) / (1 - 0.672))
    assert likeness(y[[0, 1, 1]], is_anomaly) == 1
    assert likeness(y[:2], is_anomaly[:2]) == 1


def test_a_part_is_useful_as_far_as_it_tells_labelled_anomalies():
    part = torch.arange(10.0)
    where = [torch.tensor([n == place for n in range(10)]) for place in (9, 6, 5, 0)]
    assert usefulness(part, where[0]) == 1
    assert usefulness(part, where[1]) == pytest.approx((6 / 9 - 0.6) / 0.2)
    assert usefulness(part, where[2]) == 0
    assert usefulness(part, where[3]) == 0
    assert usefulness(torch.ones(10), where[0]) == 0, "equal scores count half"


def test_neighbours_weigh_more_beside_labels_of_one_kind():
    weights = [
        ElsaHead().fit(*problem(kinds=kinds)[:2]).weight_[1].item() for kinds in ((3,), (3, 5, 7), tuple(range(3, 23)))
    ]
    assert 0.6 >= min(weights[:2]) > weights[2] >= 0


# --- the score


def test_without_labelled_anomalies_there_is_no_learned_part():
    vectors, labels, test, is_anomaly = problem(anomalies=0)
    head = ElsaHead().fit(vectors, labels)
    assert head.weight_.tolist() == [0, 0.6, 0.6, 0]
    assert not head.direction_R_.any()
    assert not head.up_MR_.any()
    assert auroc(head.anomaly_score(test), is_anomaly.numpy()) > 0.9


def test_each_part_counts_in_standard_deviations_of_the_normals(fitted):
    _, _, test, _ = problem()
    z = normalize(test, dim=1).double()
    basis, memory = fitted.basis_DR_.double(), fitted.memory_MD_.double()
    y = z @ basis
    near = ((y @ (memory @ basis).T - 1) / 0.03).exp() @ fitted.log_weight_M_.double().exp()
    off = (y - fitted.middle_R_.double()) @ fitted.whitening_RR_.double()
    bent = energy(moved(y, fitted.down_RM_.double(), fitted.up_MR_.double()), fitted.prototypes_KR_.double(), 0.4)
    parts = torch.stack([y @ fitted.direction_R_.double(), -near.log(), off.square().sum(dim=1), bent], dim=1)
    expected = sum(fitted.weight_[k] * (parts[:, k] - fitted.centre_[k]) / fitted.scale_[k] for k in range(4))
    torch.testing.assert_close(fitted.anomaly_score(test), expected)
    normals = parts[:100]
    torch.testing.assert_close(normals.mean(dim=0) / fitted.scale_, fitted.centre_ / fitted.scale_, rtol=0, atol=0.5)


def nearest(train, labels, test):
    """5 neighbours by cosine among everything but labelled anomalies."""
    rest = normalize(train[[label != "anomaly" for label in labels]], dim=1)
    return -(normalize(test, dim=1) @ rest.T).topk(5).values.mean(dim=1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("normals", "anomalies"), [(20, 20), (20, 0), (0, 20), (0, 0), (0, 1), (1, 1)])
def test_it_is_no_worse_than_neighbours_whatever_labels_there_are(normals, anomalies, seed):
    vectors, labels, test, is_anomaly = problem(seed, normals, anomalies)
    score = auroc(ElsaHead(seed=seed).fit(vectors, labels).anomaly_score(test), is_anomaly.numpy())
    assert score > auroc(nearest(vectors, labels, test), is_anomaly.numpy()) - 0.02


def test_labels_teach_it_what_neighbours_cannot_see():
    """Anomalies that differ in one direction alone, in which nothing else varies much less than elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def draw(count, shift):
        vectors = torch.randn(count, FEATURES, generator=generator)
        vectors[:, 0] += 8
        vectors[:, 3] += shift
        return vectors

    train = torch.cat([draw(30, 0), draw(300, 0), draw(30, 2.5)])
    labels = ["normal"] * 30 + [""] * 300 + ["anomaly"] * 30
    test, is_anomaly = torch.cat([draw(200, 0), draw(200, 2.5)]), torch.arange(400) >= 200
    by_neighbours = auroc(nearest(train, labels, test), is_anomaly.numpy())
    with_labels = auroc(ElsaHead().fit(train, labels).anomaly_score(test), is_anomaly.numpy())
    assert by_neighbours < 0.7
    assert with_labels > by_neighbours + 0.15


def test_the_direction_that_all_embeddings_share_is_not_thrown_away():
    """Anomalies lack what all normals have in common: subtract the mean and nothing is left to see."""
    generator = torch.Generator().manual_seed(0)

    def draw(count, common):
        vectors = torch.randn(count, FEATURES, generator=generator)
        vectors[:, 0] += common
        return vectors

    train, test = draw(300, 8), torch.cat([draw(100, 8), draw(100, 4)])
    is_anomaly = (torch.arange(200) >= 100).numpy()
    assert auroc(ElsaHead().fit(train, [""] * 300).anomaly_score(test), is_anomaly) > 0.95


# --- what it does with the training set


def test_hidden_anomalies_are_the_suspects_of_the_training_set(fitted):
    vectors, _, _, _ = problem()
    assert fitted.train_scores_.shape == (len(vectors),)
    unlabelled = fitted.train_scores_[20:320]
    hidden = (torch.arange(300) >= 270).numpy()
    assert auroc(unlabelled, hidden) > 0.97


def test_an_image_is_not_its_own_neighbour():
    """A lone odd image among the remembered must look odd, though it finds itself at distance zero."""
    vectors, labels, _, _ = problem(normals=1, anomalies=0, hidden=0)
    vectors[0] = -vectors[0]  # labelled normal, so it is never held out nor a suspect
    head = ElsaHead().fit(vectors, labels)
    assert (normalize(vectors[:1], dim=1) @ head.memory_MD_.T).max() > 0.999
    assert head.train_scores_.argmax() == 0
    assert head.train_scores_[0] > head.anomaly_score(vectors[:1])[0] + 1


def test_calibration_images_are_unlabelled_and_in_neither_memory_nor_prototypes():
    vectors, labels, _, _ = problem()
    head = ElsaHead(seed=3).fit(vectors, labels)
    scores = head.anomaly_score(vectors)
    held_out = [n for n in range(len(vectors)) if (scores[n] - head.calibration_).abs().min() < 1e-9]
    assert len(head.calibration_) == 30
    assert sorted(head.calibration_.tolist()) == pytest.approx(sorted(scores[held_out].tolist()))
    assert all(labels[n] == "" for n in held_out)
    similar = normalize(vectors[held_out], dim=1) @ head.memory_MD_.T
    assert similar.max() < 0.9999


def test_scores_of_calibration_images_are_like_those_of_new_normal_images():
    vectors, labels, test, is_anomaly = problem(hidden=0, unlabelled=1000)
    head = ElsaHead().fit(vectors, labels)
    below = (head.anomaly_score(test[~is_anomaly])[:, None] > head.calibration_).double().mean()
    assert 0.4 < below < 0.6


def test_suspects_are_kept_out_of_the_memory():
    vectors, labels, _, _ = problem()
    hidden = normalize(vectors[290:320], dim=1)
    for searches, low, high in ((2, 0, 9), (0, 20, 30)):
        head = ElsaHead(iterations=searches).fit(vectors, labels)
        remembered = int(((hidden @ head.memory_MD_.T).max(dim=1).values > 0.9999).sum())
        assert low <= remembered <= high


def test_labelled_anomalies_are_never_remembered_nor_prototypes():
    vectors, labels, _, _ = problem(hidden=0)
    head = ElsaHead(num_prototypes=200, iterations=0).fit(vectors, labels)
    similar = normalize(vectors[-20:], dim=1) @ torch.cat([head.memory_MD_, head.prototypes_KD_]).T
    assert similar.max() < 0.99


def test_the_memory_is_bounded():
    vectors, labels, test, _ = problem()
    head = ElsaHead(memory=50).fit(vectors, labels)
    assert head.memory_MD_.shape == (50, FEATURES)
    assert head.anomaly_score(test).isfinite().all()
    assert head.train_scores_.isfinite().all()


def test_a_huge_set_is_learned_from_in_part_with_all_its_labels(monkeypatch):
    vectors, labels, test, is_anomaly = problem()
    seen = []
    monkeypatch.setattr(elsa.head, "LEARNED_FROM", 100)
    monkeypatch.setattr(
        elsa.head,
        "principal_directions",
        lambda z, label, rank: seen.append(label.tolist()) or principal_directions(z, label, rank),
    )
    head = ElsaHead().fit(vectors, labels)
    assert [sorted(label) for label in seen] == [[-1] * 20 + [0] * 100 + [1] * 20]
    assert auroc(head.anomaly_score(test), is_anomaly.numpy()) > 0.95


def test_the_order_of_the_training_set_hardly_matters():
    """Not to the bit: what is held out and where k-means starts depend on places."""
    vectors, labels, test, is_anomaly = problem()
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = ElsaHead().fit(vectors[order], [labels[n] for n in order]).anomaly_score(test)
    straight = ElsaHead().fit(vectors, labels).anomaly_score(test)
    assert torch.corrcoef(torch.stack([straight, shuffled]))[0, 1] > 0.97
    assert abs(auroc(shuffled, is_anomaly.numpy()) - auroc(straight, is_anomaly.numpy())) < 0.01


def test_scale_of_the_vectors_does_not_matter():
    vectors, labels, test, _ = problem()
    scores = ElsaHead().fit(4 * vectors, labels).anomaly_score(0.5 * test)
    assert torch.equal(scores, ElsaHead().fit(vectors, labels).anomaly_score(test))


def test_same_seed_same_scores_to_the_bit_and_another_seed_others():
    vectors, labels, test, _ = problem()
    first, again, other = (ElsaHead(seed=seed).fit(vectors, labels).anomaly_score(test) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_second_fit_forgets_the_first():
    vectors, labels, test, _ = problem()
    head = ElsaHead().fit(vectors[:, :31], labels).fit(vectors, labels)
    assert torch.equal(head.anomaly_score(test), ElsaHead().fit(vectors, labels).anomaly_score(test))


def test_each_image_is_told_its_nearest_prototype(fitted):
    _, _, test, _ = problem()
    z = normalize(test, dim=1)
    by_hand = [max(range(20), key=lambda k: (row @ fitted.prototypes_KD_[k]).item()) for row in z]
    assert fitted.prototype_of(test).tolist() == by_hand
    assert fitted.prototype_of(test[:0]).shape == (0,)


# --- images, saving


@pytest.fixture(scope="module")
def encoder(net):
    return Encoder("mobilenet_v2", net, "random.pth", "0" * 64)


def pictures(seed, count=90):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images[count // 2 :, :, ::2] = 0
    return images


LABELS = ["normal", "", ""] * 15 + ["anomaly"] * 10 + [""] * 35


def test_images_are_scored_as_their_embeddings_are(encoder):
    from elsa.encoders import embed

    by_images = ElsaHead(encoder=encoder).fit(pictures(0), LABELS).anomaly_score(pictures(1, 8))
    head = ElsaHead().fit(embed(encoder, pictures(0)), LABELS)
    torch.testing.assert_close(by_images, head.anomaly_score(embed(encoder, pictures(1, 8))), rtol=1e-3, atol=1e-3)


def test_a_saved_head_scores_images_to_the_bit_without_the_weight_file(encoder, tmp_path):
    told = []
    head = ElsaHead(seed=7, encoder=encoder, size=40, progress=lambda *report: told.append(report[0]))
    head.fit(pictures(0), LABELS)
    assert set(told) == {"embed", "head"}
    tensors, about = head.state()
    write_model(tmp_path / "model", tensors, {"detector": about})
    tensors, about = read_model(tmp_path / "model")
    assert about["detector"]["encoder"] == {"name": "mobilenet_v2", "file": "random.pth", "sha256": "0" * 64}
    back = ElsaHead.from_state(tensors, about["detector"])
    assert torch.equal(back.anomaly_score(pictures(1, 8)), head.anomaly_score(pictures(1, 8)))
    assert torch.equal(back.prototype_of(pictures(1, 8)), head.prototype_of(pictures(1, 8)))
    assert torch.equal(back.calibration_, head.calibration_)
    assert torch.equal(back.train_scores_, head.train_scores_)
    assert (back.config, back.seed) == (head.config, head.seed)


def test_images_of_another_size_are_seen_at_the_size_of_the_training_images(encoder):
    head = ElsaHead(encoder=encoder).fit(pictures(0), LABELS)
    large = torch.nn.functional.interpolate(pictures(1, 8).float(), scale_factor=4).to(torch.uint8)
    asked = ElsaHead.from_state(*head.state())
    expected = ElsaHead(encoder=encoder, size=96).fit(pictures(0), LABELS).anomaly_score(large)
    torch.testing.assert_close(asked.anomaly_score(large), expected)


def test_a_head_fitted_on_vectors_is_saved_without_an_encoder(fitted):
    _, _, test, _ = problem()
    tensors, about = fitted.state()
    assert not any(name.startswith("encoder/") for name in tensors)
    back = ElsaHead.from_state(tensors, json.loads(json.dumps(about)))
    assert torch.equal(back.anomaly_score(test), fitted.anomaly_score(test))


# --- what is refused


def test_what_a_user_can_put_right_is_said(encoder):
    vectors, labels, test, _ = problem()
    fitted = ElsaHead().fit(vectors, labels)
    cases = [
        (lambda: ElsaHead(tua=0.4), "no setting 'tua'; settings are: num_prototypes, tau"),
        (lambda: ElsaHead(tau=0.3), "tau=0.3 with num_prototypes=20 lets the energy reach zero"),
        (lambda: ElsaHead(tau=math.nan), "tau=nan"),
        (lambda: ElsaHead(map_rank=0), "map_rank=0"),
        (lambda: ElsaHead(map_iterations=-1), "map_iterations=-1"),
        (lambda: ElsaHead(map_penalty=-1.0), "map_penalty=-1.0"),
        (lambda: ElsaHead(normal_share=1.5), "normal_share=1.5"),
        (lambda: ElsaHead(penalty=math.nan), "penalty=nan"),
        (lambda: ElsaHead(floor=0.0), "floor=0.0: must be finite and above 0"),
        (lambda: ElsaHead(num_prototypes=0), "num_prototypes=0"),
        (lambda: ElsaHead(rank=0), "rank=0: must be finite and at least 1"),
        (lambda: ElsaHead(iterations=-1), "iterations=-1"),
        (lambda: ElsaHead(penalty=-1.0), "penalty=-1.0"),
        (lambda: ElsaHead(neighbour_weight=math.inf), "neighbour_weight=inf"),
        (lambda: ElsaHead(neighbour_weight_one_kind=math.nan), "neighbour_weight_one_kind=nan"),
        (lambda: ElsaHead(neighbour_tau=0.0), "neighbour_tau=0.0"),
        (lambda: ElsaHead(views="mirror"), "views='mirror'"),
        (lambda: ElsaHead(num_prototypes=400).fit(vectors, labels), "num_prototypes=400 exceeds the"),
        (lambda: ElsaHead().fit(pictures(0), LABELS), "has no encoder: pass encoder="),
        (lambda: ElsaHead().fit(vectors, labels[1:]), "340 images and 339 labels"),
        (lambda: ElsaHead().fit(vectors, [1] * 340), "use the words"),
        (lambda: ElsaHead().fit(vectors, ["anomaly"] * 340), "0 normal or unlabelled images"),
        (lambda: ElsaHead().fit(vectors * math.nan, labels), "NaN or infinite"),
        (lambda: fitted.anomaly_score(test[:, :31]), "vectors of 31 numbers, the head was fitted on 61"),
        (lambda: fitted.prototype_of(test[:, :31]), "vectors of 31 numbers"),
        (lambda: fitted.anomaly_score(pictures(0)), "has no encoder"),
    ]
    for call, said in cases:
        with pytest.raises(UserError) as refused:
            call()
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


def test_every_setting_is_read_and_documented():
    source = inspect.getsource(elsa.head)
    body = source[source.index("class ElsaHead") :]
    for field in dataclasses.fields(HeadConfig):
        assert f"config.{field.name}" in body, f"{field.name} is never read"
        assert isinstance(field.default, (int, float, str))
