"""`elsa explain` and `elsa report` as a user calls them: on a model from scratch, on a head, on a workspace."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elsa.cli import run
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.encoders import Encoder
from elsa.head import ElsaHead
from elsa.jobs import hash_data
from elsa.mobilenet import MobileNetV2
from elsa.report.explained import draw, fitting, wrapped
from elsa.saved import save_model
from elsa.trust.explain import Explanation

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from tiny_folder import QUICK, make_photos

ATTACK = "<img src=x onerror=alert(1)>.png"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = make_photos(tmp_path_factory.mktemp("report") / "photos", count=96)
    (folder / ATTACK).write_bytes(b"no image")
    words = {"normal": range(1, 24, 2), "anomaly": range(0, 80, 8)}
    lines = ["path,label,kind"]
    for word, numbers in words.items():
        kind = "scratch" if word == "anomaly" else ""
        lines += [f"{number:03}.png,{word},{kind}" for number in numbers]
    (folder.parent / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def labels(photos):
    return photos.parent / "labels.csv"


@pytest.fixture(scope="module")
def scratch(photos, labels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch") / "model"
    quick = [word.replace("finetune_epochs=1", "finetune_epochs=2") for word in QUICK]
    assert run(["fit", str(photos), "--labels", str(labels), "--out", str(folder), *quick]) == 0
    return folder


@pytest.fixture(scope="module")
def encoder():
    """A MobileNetV2 whose random weights let an image make a difference."""
    net, weights = MobileNetV2().eval().requires_grad_(False), torch.Generator().manual_seed(0)
    for value in net.state_dict().values():
        if value.ndim == 4:
            value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=weights)
    return Encoder("mobilenet_v2", net, "random.pth", "0" * 64)


@pytest.fixture(scope="module")
def head(photos, labels, encoder, tmp_path_factory):
    """What `elsa fit --encoder mobilenet_v2` writes, less the weights that it needs."""
    folder = tmp_path_factory.mktemp("head") / "model"
    loaded = load_images(open_source(photos, labels=labels))
    fitted = ElsaHead(encoder=encoder, size=32, num_prototypes=13, iterations=5).fit(loaded.images, loaded.labels)
    data = {"sha256": hash_data(loaded), "images": len(loaded), "labels": {"normal": 12, "anomaly": 10}}
    about = {"command": "elsa fit", "seed": 0, "preprocessing": asdict(loaded.decoding), "data": data}
    save_model(fitted, folder, about)
    return folder


def told(capsys):
    return capsys.readouterr().out


# --- explain


@pytest.mark.parametrize("kind", ["scratch", "head"])
def test_explain_draws_a_picture_and_says_what_is_in_it(kind, photos, labels, tmp_path, capsys, request):
    model = request.getfixturevalue(kind)
    out = tmp_path / "new" / "why.png"
    source = ["--source", str(photos), "--labels", str(labels)]
    assert run(["explain", str(model), str(photos / "080.png"), "--out", str(out), *source]) == 0
    text = told(capsys)
    assert "080.png: score " in text
    assert "p-value" in text
    assert "nearest prototype: " in text
    assert "nearest labelled anomalies: 0" in text
    with Image.open(out) as picture:
        assert picture.width > 800
        assert picture.height > 900


def test_explain_without_the_training_images_says_what_would_show_more(head, photos, tmp_path, capsys):
    out = tmp_path / "why.png"
    assert run(["explain", str(head), str(photos / "080.png"), "--out", str(out)]) == 0
    assert "--source" in told(capsys)
    with Image.open(out) as picture:
        assert picture.height < 500


@pytest.mark.parametrize(
    ("image", "options", "words"),
    [
        ("080.png", ["--out", "why.jpg"], "--out why.jpg"),
        ("080.png", ["--out", "why.png", "--labels", "LABELS"], "--source"),
        ("broken.png", ["--out", "why.png"], "broken.png"),
    ],
)
def test_explain_refuses_in_one_line(image, options, words, head, photos, labels, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"no image")
    path = tmp_path / image if image == "broken.png" else photos / image
    options = [str(labels) if word == "LABELS" else word for word in options]
    assert run(["explain", str(head), str(path), *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Error: ")
    assert words in line
    assert [one.name for one in tmp_path.iterdir()] == ["broken.png"]


def test_a_detector_without_prototypes_is_explained_by_its_heat_alone(photos, tmp_path, capsys):
    quick = ["--method", "deep-svdd", "--set", "autoencoder_epochs=1", "--set", "epochs=1", "--device", "cpu"]
    assert run(["fit", str(photos), "--out", str(tmp_path / "model"), *quick]) == 0
    assert run(["explain", str(tmp_path / "model"), str(photos / "080.png"), "--out", str(tmp_path / "w.png")]) == 0
    assert "no prototypes" in told(capsys)
    assert run(["report", str(tmp_path / "model"), "--out", str(tmp_path / "r.html"), "--source", str(photos)]) == 0
    assert "What is normal: the prototypes" not in (tmp_path / "r.html").read_text()


def test_long_names_keep_their_end_and_words_wrap():
    from PIL import ImageFont

    font = ImageFont.load_default(15)
    cut = fitting("a/very/long/path/to/an/image-0042.png", font, 120)
    assert cut.startswith("...")
    assert cut.endswith("0042.png")
    assert font.getlength(cut) <= 120
    assert fitting("short", font, 120) == "short"
    assert fitting("\udcff.png", font, 500) == "\\udcff.png"
    lines = wrapped("one two three four five six", font, 80)
    assert " ".join(lines) == "one two three four five six"
    assert all(font.getlength(line) <= 80 for line in lines)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_shows_image_and_heat_side_by_side(channels):
    image = torch.full((channels, 40, 40), 200, dtype=torch.uint8)
    heat = torch.zeros(40, 40)
    heat[10:30, 10:30] = 1
    page = draw(Explanation(image, heat, 1.0), "n", ["words"], "", strength=1.0)
    pixels = np.asarray(page)
    assert (pixels[72 + 150, 28 + 150] == 200).all()
    red, green, _ = pixels[72 + 150, 28 + 316 + 150].tolist()
    assert red > green + 80


# --- report


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scratch", "head"])
def test_a_report_on_a_model_and_its_source_has_every_part(kind, photos, labels, tmp_path, capsys, request):
    model, out = request.getfixturevalue(kind), tmp_path / "r.html"
    source = ["--source", str(photos), "--labels", str(labels), "--plots", str(tmp_path / "plots")]
    assert run(["report", str(model), "--out", str(out), *source]) == 0
    page = out.read_text()
    parts = ["Anomaly scores", "Suspects", "Most anomalous", "Thresholds", "Kinds of anomalies", "What the audit found"]
    parts += ["How well the scores separate", "What is normal: the prototypes", "Where this comes from"]
    parts += ["Will more labels help?"] if kind == "head" else ["Early-stop score"]
    assert [part for part in parts if f"<h2>{part}</h2>" not in page] == []
    assert "scratch" in page  # the kind that the table of labels names
    assert "&lt;img src=x onerror" in page
    assert "<img src=x" not in page
    flatters = "flatter" in told(capsys)
    assert flatters == (kind == "scratch")  # a head is judged by heads that have not seen the images
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"scores.png", "scores.svg", "metrics.png", "metrics.svg"} <= plots
    assert len(plots) % 2 == 0
    with Image.open(tmp_path / "plots" / "scores.png") as plot:
        assert plot.width > 1000


@pytest.mark.slow
def test_the_scores_of_a_heads_own_images_are_those_without_themselves(head, photos, labels):
    from elsa.report.gather import model_facts
    from elsa.saved import load

    own = model_facts(head, photos, labels, Path("unused"), "cpu", lambda *news: None)
    assert own.learned_from
    np.testing.assert_allclose(own.scores, load(head).train_scores_.numpy())
    others = model_facts(head, photos, None, Path("unused"), "cpu", lambda *news: None)
    assert not others.learned_from
    assert any("not the images and labels" in note for note in others.notes)


def test_a_report_on_a_model_alone_says_how_to_get_more(scratch, tmp_path, capsys):
    assert run(["report", str(scratch), "--out", str(tmp_path / "r.html")]) == 0
    assert "--source" in told(capsys)
    page = (tmp_path / "r.html").read_text()
    assert "Early-stop score" in page
    assert "<h2>Suspects</h2>" not in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "r.pdf"], "--out r.pdf"),
        (["--out", "r.html", "--labels", "LABELS"], "--source"),
        (["--out", "/proc/r.html"], "cannot write --out"),
        (["--out", "r.html", "--source", "nowhere"], "nowhere"),
    ],
)
def test_report_refuses_in_one_line(options, words, head, labels, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(head), *[str(labels) if word == "LABELS" else word for word in options]]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Error: ")
    assert words in line
    assert list(tmp_path.iterdir()) == []


# --- a workspace


@pytest.fixture(scope="module")
def workspace(photos, labels, encoder, tmp_path_factory):
    """What `elsa label` leaves behind after some labels, made by the functions that make it there."""
    from elsa.workspace.events import LabelEvent
    from elsa.workspace.prepare import prepare
    from elsa.workspace.refit import fit
    from elsa.workspace.store import open_store

    folder = tmp_path_factory.mktemp("workspace") / "ws"
    (folder / "models").mkdir(parents=True)
    prepared = prepare(folder, open_source(photos), encoder)
    about = {"format": 1, "source": str(photos), "labels": str(labels), "encoder": {}, "store": ""}
    (folder / "workspace.json").write_text(json.dumps(about))
    rows = {name: row for row, name in enumerate(prepared.names)}
    said = {"normal": [f"{n:03}.png" for n in range(25, 41, 2)], "anomaly": ["088.png"]}
    given = {
        "normal": [f"{n:03}.png" for n in range(1, 24, 2)],
        "anomaly": [f"{n:03}.png" for n in range(0, 80, 8)],
    }
    events = [LabelEvent("ann", name, word, f"{word}{name}") for word, names in said.items() for name in names]
    events += [LabelEvent("ann", "050.png", "normal", "x"), LabelEvent("bob", "050.png", "anomaly", "y")]
    with open_store(folder) as store:
        last = store.add(events)[-1]
        job = {"number": 1, "after": last, "command": "elsa label"}
        job |= {word: [rows[name] for name in (*said[word], *given[word])] for word in said}
        fit(folder, prepared, encoder, job, lambda *news: None)
        store.use_model(store.add_model("models/0001", last, {}).id)
    return folder


@pytest.mark.slow
def test_a_report_on_a_workspace_knows_its_labels_and_scores(workspace, tmp_path, capsys):
    out = tmp_path / "r.html"
    assert run(["report", str(workspace), "--out", str(out)]) == 0
    text, page = told(capsys), out.read_text()
    assert "1 images are labelled differently" in text
    assert "asked for, not drawn" in text
    assert "11 events by ann, bob" in page
    assert "96</strong><span>images; 20 labelled normal, 11 anomaly" in page
    assert "<h2>Suspects</h2>" in page
    assert "<h2>What the audit found</h2>" in page


@pytest.mark.slow
def test_a_workspace_whose_source_has_moved_still_has_a_report(workspace, tmp_path, capsys):
    copy = tmp_path / "ws"
    shutil.copytree(workspace, copy)
    about = json.loads((copy / "workspace.json").read_text())
    (copy / "workspace.json").write_text(json.dumps(about | {"source": str(tmp_path / "gone")}))
    assert run(["report", str(copy), "--out", str(tmp_path / "r.html")]) == 0
    assert "No audit" in told(capsys)
    assert "<h2>Suspects</h2>" in (tmp_path / "r.html").read_text()


def test_a_workspace_takes_no_source_and_needs_a_model(workspace, photos, tmp_path, capsys):
    assert run(["report", str(workspace), "--out", str(tmp_path / "r.html"), "--source", str(photos)]) == 2
    assert "leave out --source" in capsys.readouterr().err
    copy = tmp_path / "ws"
    shutil.copytree(workspace, copy)
    for file in copy.glob("elsa.db*"):
        file.unlink()
    assert run(["report", str(copy), "--out", str(tmp_path / "r.html")]) == 2
    assert "no model yet" in capsys.readouterr().err
    (copy / "images.json").unlink()
    assert run(["report", str(copy), "--out", str(tmp_path / "r.html")]) == 2
    assert "images.json" in capsys.readouterr().err
