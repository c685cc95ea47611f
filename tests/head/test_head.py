"""The head from closed form to learning: energies, loss, map, suspects, calibration, saving."""

import dataclasses
import inspect
import json
import math

import pytest
import torch
from torch.nn.functional import normalize

import elsa.head
from elsa.encoders import Encoder
from elsa.energy import energy
from elsa.errors import UserError
from elsa.head import ElsaHead, HeadConfig, head_loss, learn_map, likeness, mean_similarity, moved
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.model_file import read_model, write_model
from elsa.trust.metrics import auroc

N, K, D, R = 23, 11, 7, 3  # distinct primes: no axis can stand in for another
CONFIG = HeadConfig(num_prototypes=K, tau=0.5, rank=R)
FEATURES = 61


def unit(count, features=D, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, features, generator=generator, dtype=dtype), dim=1)


def cloud(count, direction, generator, spread=1.0):
    """Vectors around a direction of the embedding space, so long that the direction is shared by all of them."""
    middle = torch.zeros(FEATURES)
    middle[0], middle[direction] = 3.0, 3.0
    return middle + spread * torch.randn(count, FEATURES, generator=generator)


def problem(seed=0, normals=20, anomalies=20, hidden=30, unlabelled=300, kinds=(3, 5, 7)):
    """Unlabelled vectors around direction 1 that hide others around `kinds`, labels of both sorts, and a test."""
    generator = torch.Generator().manual_seed(seed)

    def others(count):
        return torch.cat(
            [cloud(1, kinds[n % len(kinds)], generator) for n in range(count)] or [torch.empty(0, FEATURES)]
        )

    train = [cloud(normals, 1, generator), cloud(unlabelled - hidden, 1, generator), others(hidden), others(anomalies)]
    labels = ["normal"] * normals + [""] * unlabelled + ["anomaly"] * anomalies
    test = torch.cat([cloud(100, 1, generator), others(99)])
    return torch.cat(train), labels, test, torch.arange(199) >= 100


@pytest.fixture(scope="module")
def fitted():
    vectors, labels, _, _ = problem()
    return ElsaHead(seed=3).fit(vectors, labels)


# --- the map and its loss


def test_a_map_of_zero_leaves_every_unit_embedding_where_it_is():
    z = unit(N)
    down = torch.randn(D, R, dtype=torch.float64)
    torch.testing.assert_close(moved(z, down, torch.zeros(R, D, dtype=torch.float64)), z)


def test_the_map_matches_its_definition():
    z, down, up = unit(N), unit(D, R, seed=1), unit(R, D, seed=2)
    for row, result in zip(z.tolist(), moved(z, down, up).tolist(), strict=True):
        low = [sum(row[d] * down[d, r].item() for d in range(D)) for r in range(R)]
        out = [row[d] + sum(low[r] * up[r, d].item() for r in range(R)) for d in range(D)]
        norm = math.sqrt(sum(x * x for x in out))
        assert result == pytest.approx([x / norm for x in out])


def loss_by_hand(z, label, prototypes, down, up, config):
    """Each side's mean of 1 / (distance to the end of the energy range it must leave), normals and unlabelled apart."""
    bound = math.log(len(prototypes)) + 1 / config.tau
    paid = {ANOMALY: [], NORMAL: [], UNLABELLED: []}
    for row, code in zip(moved(z, down, up).tolist(), label.tolist(), strict=True):
        normality = math.log(
            sum(math.exp(sum(a * b for a, b in zip(row, p, strict=True)) / config.tau) for p in prototypes.tolist())
        )
        paid[code].append(1 / (bound - normality) if code == ANOMALY else 1 / normality)
    weight = {ANOMALY: 1.0, NORMAL: config.normal_share, UNLABELLED: 1 - config.normal_share}
    present = [code for code in paid if paid[code]]
    loss = sum(weight[c] * sum(paid[c]) / len(paid[c]) for c in present) / sum(weight[c] for c in present)
    return loss + config.penalty * (down @ up).square().sum().item()


@pytest.mark.parametrize("codes", [(-1, 0, 1), (-1, 0), (-1, 1), (-1,)])
def test_the_loss_matches_its_definition(codes):
    config = dataclasses.replace(CONFIG, normal_share=0.3, penalty=0.7)
    label = torch.tensor([codes[n % len(codes)] if n % 4 else codes[0] for n in range(N)], dtype=torch.int8)
    args = unit(N), label, unit(K, seed=1), unit(D, R, seed=2), 0.3 * unit(R, D, seed=3)
    assert head_loss(*args, config).item() == pytest.approx(loss_by_hand(*args, config))


def test_the_loss_hears_each_group_however_few_it_has():
    label = torch.tensor([-1] * 2 + [1] * 3 + [0] * 18, dtype=torch.int8)
    z, rest = unit(N), (unit(K, seed=1), unit(D, R, seed=2), 0.3 * unit(R, D, seed=3), CONFIG)
    once = head_loss(z, label, *rest)
    more = torch.cat([torch.arange(5), torch.arange(5, N).repeat(7)])
    torch.testing.assert_close(head_loss(z[more], label[more], *rest), once)


def test_the_gradient_of_the_loss_is_right():
    label = torch.tensor([-1, 0, 1, 0, -1], dtype=torch.int8)
    z, prototypes = unit(5), unit(K, seed=1)
    down, up = unit(D, R, seed=2).requires_grad_(), (0.3 * unit(R, D, seed=3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: head_loss(z, label, prototypes, a, b, CONFIG), (down, up))


def test_learning_lowers_the_loss_from_that_of_the_raw_embeddings():
    label = torch.tensor([-1, 0, 1] * 7 + [0, 0], dtype=torch.int8)
    z, prototypes = unit(N).float(), unit(K, seed=1).float()
    down, up = learn_map(z, label, prototypes, dataclasses.replace(CONFIG, iterations=0), 0)
    assert not up.any()
    before = head_loss(z, label, prototypes, down, up, CONFIG)
    after = head_loss(z, label, prototypes, *learn_map(z, label, prototypes, CONFIG, 0), CONFIG)
    assert after < 0.95 * before


def test_labelled_anomalies_leave_the_prototypes_and_a_higher_penalty_holds_them_back():
    vectors, labels, _, _ = problem(hidden=0)
    z = normalize(vectors, dim=1)
    label = torch.tensor([{"normal": 1, "": 0, "anomaly": -1}[word] for word in labels], dtype=torch.int8)
    prototypes = z[:20]
    gaps = []
    for penalty in (1e-3, 1e-1, 1e3):
        maps = learn_map(z, label, prototypes, dataclasses.replace(CONFIG, penalty=penalty), 0)
        energies = energy(moved(z, *maps), prototypes, CONFIG.tau)
        gaps.append((energies[label == ANOMALY].mean() - energies[label != ANOMALY].mean()).item())
    assert gaps[0] > gaps[1] > gaps[2] > 0


# --- how much of one kind the anomalies are


def test_the_mean_similarity_is_that_over_all_pairs():
    z = unit(N)
    pairs = [(z[a] @ z[b]).item() for a in range(N) for b in range(N) if a != b]
    assert mean_similarity(z) == pytest.approx(sum(pairs) / len(pairs))


def test_likeness_runs_from_many_kinds_to_one():
    generator = torch.Generator().manual_seed(0)
    normal = normalize(cloud(200, 1, generator, 0.4), dim=1)
    one = normalize(cloud(40, 3, generator, 0.4), dim=1)
    two = normalize(torch.cat([cloud(20, n, generator, 0.4) for n in (3, 5)]), dim=1)
    many = normalize(torch.cat([cloud(1, 2 + n, generator, 0.4) for n in range(40)]), dim=1)
    assert likeness(one, normal) > 0.9
    assert 0.3 < likeness(two, normal) < 0.7
    assert likeness(many, normal) < 0.1
    assert likeness(one[:1], normal) == 1
    assert likeness(one[:1].repeat(3, 1), normal) == 1
    assert likeness(-normal[:2] * torch.tensor([[1.0], [-1.0]]), normal) == 0


def test_neighbours_weigh_more_beside_labels_of_one_kind():
    weights = [
        ElsaHead().fit(*problem(kinds=kinds)[:2]).neighbour_weight_ for kinds in ((3,), (3, 5, 7), tuple(range(3, 23)))
    ]
    assert 3.0 >= weights[0] > weights[1] > weights[2] >= 0.5


# --- the score


def test_without_steps_and_neighbours_the_score_ranks_by_the_energy_of_the_raw_embeddings():
    vectors, labels, test, _ = problem()
    alone = {"neighbour_weight": 0.0, "neighbour_weight_one_kind": 0.0}
    head = ElsaHead(iterations=0, **alone).fit(vectors, labels)
    raw = energy(normalize(test, dim=1), head.prototypes_KD_, head.config.tau)
    torch.testing.assert_close(head.anomaly_score(test).argsort(), raw.double().argsort())


def test_without_labelled_anomalies_the_score_is_the_energy_towards_the_remembered_images():
    vectors, labels, test, is_anomaly = problem(anomalies=0)
    head = ElsaHead().fit(vectors, labels)
    z, memory = normalize(test, dim=1).double(), head.memory_MD_.double()
    by_hand = [-math.log(sum(math.exp(s / 0.03) for s in row)) for row in (z @ memory.T).tolist()]
    expected = (torch.tensor(by_hand, dtype=torch.float64) - head.centre_[1]) / head.scale_[1]
    torch.testing.assert_close(head.anomaly_score(test), expected)
    assert auroc(head.anomaly_score(test), is_anomaly.numpy()) > 0.9


def test_both_energies_count_in_their_own_standard_deviations(fitted):
    _, _, test, _ = problem()
    z = normalize(test, dim=1).double()
    learned = energy(
        moved(z, fitted.down_DR_.double(), fitted.up_RD_.double()), fitted.prototypes_KD_.double(), fitted.config.tau
    )
    neighbour = energy(z, fitted.memory_MD_.double(), fitted.config.neighbour_tau)
    expected = (learned - fitted.centre_[0]) / fitted.scale_[0]
    expected += fitted.neighbour_weight_ * (neighbour - fitted.centre_[1]) / fitted.scale_[1]
    torch.testing.assert_close(fitted.anomaly_score(test), expected)


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
    for share, low, high in ((0.15, 0, 3), (0.0, 20, 30)):
        head = ElsaHead(suspects=share).fit(vectors, labels)
        remembered = int(((hidden @ head.memory_MD_.T).max(dim=1).values > 0.9999).sum())
        assert low <= remembered <= high


def test_labelled_anomalies_are_never_remembered_nor_prototypes():
    vectors, labels, _, _ = problem(hidden=0)
    head = ElsaHead(num_prototypes=200, suspects=0.0).fit(vectors, labels)
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
        elsa.head, "learn_map", lambda z, label, *rest: seen.append(label) or learn_map(z, label, *rest)
    )
    head = ElsaHead().fit(vectors, labels)
    assert [sorted(label.tolist()) for label in seen] == [[-1] * 20 + [0] * 100 + [1] * 20] * 2
    assert len(head.memory_MD_) > 200
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
    z = moved(normalize(test, dim=1), fitted.down_DR_, fitted.up_RD_)
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
        (lambda: ElsaHead(num_prototypes=10, tau=0.4), "tau=0.4 with num_prototypes=10"),
        (lambda: ElsaHead(tau=math.nan), "tau=nan"),
        (lambda: ElsaHead(num_prototypes=0), "num_prototypes=0"),
        (lambda: ElsaHead(rank=0), "rank=0: must be finite and at least 1"),
        (lambda: ElsaHead(iterations=-1), "iterations=-1"),
        (lambda: ElsaHead(penalty=-1.0), "penalty=-1.0"),
        (lambda: ElsaHead(neighbour_weight=math.inf), "neighbour_weight=inf"),
        (lambda: ElsaHead(neighbour_weight_one_kind=math.nan), "neighbour_weight_one_kind=nan"),
        (lambda: ElsaHead(neighbour_tau=0.0), "neighbour_tau=0.0"),
        (lambda: ElsaHead(suspects=0.6), "suspects=0.6: must be between 0 and 0.5"),
        (lambda: ElsaHead(normal_share=1.1), "normal_share=1.1"),
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
