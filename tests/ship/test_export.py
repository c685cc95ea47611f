"""An exported file scores as the model does, alone: parity, metadata, threshold, refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from elsa.cli import run
from elsa.data.images import Decoding, decode
from elsa.encoders import Encoder
from elsa.errors import UserError
from elsa.head import ElsaHead
from elsa.saved import save_model
from elsa.ship import export_parity
from elsa.ship.export_graph import Graph
from elsa.ship.export_parity import answers, compare, generated_images, generated_vectors
from elsa.trust.calibrate import p_values, score_threshold

onnxruntime = pytest.importorskip("onnxruntime")

FEATURES, N = 37, 160
PIXELS = {"size": 32, "channels": 3, "resize": "stretch", "pixel_limit": 10**6}


def vectors(seed=0, count=N):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    x[:, 0] += 4
    x[: count // 8, 1] += 6
    return x, ["anomaly"] * (count // 16) + [""] * (count - count // 16)


@pytest.fixture(scope="module")
def head():
    return ElsaHead(seed=0).fit(*vectors())


@pytest.fixture(scope="module")
def model(head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors") / "model"
    save_model(head, folder, {"command": "elsa fit v.npz", "preprocessing": {}, "data": {"images": N}, "seed": 0})
    return folder


@pytest.fixture(scope="module")
def onnx_file(model):
    file = model.parent / "model.onnx"
    assert run(["export", str(model), "--out", str(file), "--false-alarms", "0.1"]) == 0
    return file


def session(file):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options)


def test_the_file_gives_scores_p_values_and_verdicts_of_the_trained_model(head, onnx_file):
    new, _ = vectors(seed=1, count=53)
    score, p_value, verdict = session(onnx_file).run(None, {"vectors": new.numpy()})
    expected = head.anomaly_score(new)
    np.testing.assert_allclose(score, expected.numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(p_value, p_values(torch.from_numpy(score), head.calibration_).numpy())
    limit = score_threshold(head.calibration_, 0.1)
    np.testing.assert_array_equal(verdict, expected.numpy() > limit)
    assert 0 < verdict.sum() < len(verdict)


@pytest.mark.parametrize("count", [1, 2, 7, 53])
def test_a_batch_may_have_any_length(onnx_file, count):
    new, _ = vectors(seed=1, count=53)
    whole = session(onnx_file).run(["score"], {"vectors": new.numpy()})[0]
    np.testing.assert_allclose(
        session(onnx_file).run(["score"], {"vectors": new.numpy()[:count]})[0], whole[:count], atol=1e-9
    )


def test_the_threshold_is_an_input_with_a_default(onnx_file):
    opened, (new, _) = session(onnx_file), vectors(seed=1)
    assert [one.name for one in opened.get_inputs()] == ["vectors"]
    assert [one.name for one in opened.get_overridable_initializers()] == ["threshold"]
    score, _, verdict = opened.run(None, {"vectors": new.numpy(), "threshold": np.array(np.float64(0.5))})
    np.testing.assert_array_equal(verdict, score > 0.5)


def test_the_file_tells_what_it_is(model, onnx_file):
    told = session(onnx_file).get_modelmeta().custom_metadata_map
    about = json.loads((model / "model.json").read_text())
    assert told["higher_is"] == "anomalous"
    assert told["detector"] == "ElsaHead"
    assert float(told["false_alarms"]) == 0.1
    assert told["model_sha256"] == about["sha256"]
    assert json.loads(told["provenance"])["command"] == "elsa fit v.npz"
    assert [one.shape for one in session(onnx_file).get_inputs()] == [["batch", FEATURES]]


def test_torch_export_is_a_second_format(head, model, tmp_path):
    file = tmp_path / "model.pt2"
    assert run(["export", str(model), "--out", str(file)]) == 0
    extra = {"elsa.json": ""}
    module = torch.export.load(file, extra_files=extra).module()
    told = json.loads(extra["elsa.json"])
    new, _ = vectors(seed=1, count=11)
    score, _, verdict = module(new, torch.tensor(float(told["threshold"]), dtype=torch.float64))
    torch.testing.assert_close(score, head.anomaly_score(new), rtol=0, atol=1e-9)
    assert torch.equal(verdict, score > float(told["threshold"]))


class TinyNet(nn.Module):
    """Small enough to be traced in a second, with convolutions to quantise."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, 4), nn.Conv2d(8, 11, 3, 2)
        for parameter in self.parameters():
            parameter.requires_grad_(False).normal_(0, 0.3, generator=generator)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x)))).mean(dim=(2, 3))


def pictures(count=90, seed=0):
    """Clouds, a tenth of them with a white corner."""
    images = generated_images(3, 32, count + seed)[seed:].clone()
    images[: count // 10, :, :16, :16] = 255
    return images, ["anomaly"] * (count // 20) + [""] * (count - count // 20)


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    encoder = Encoder("tiny", TinyNet(), "tiny.pth", "0" * 64, features=11)
    head = ElsaHead(encoder=encoder, size=48, num_prototypes=13).fit(*pictures())
    return head, {"preprocessing": PIXELS, "class": "ElsaHead", "higher_is": "anomalous", "sha256": "0"}


@pytest.fixture(scope="module")
def export_images(image_model):
    """Exports the model of images, whose encoder no MODEL folder knows, and opens the file."""

    def export(file, *options):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("elsa.ship.export.open_model", lambda *_, **__: image_model)
            assert run(["export", str(file.parent), "--out", str(file), *options]) == 0
        return session(file)

    return export


@pytest.fixture(scope="module")
def image_file(export_images, tmp_path_factory):
    file = tmp_path_factory.mktemp("images") / "model.onnx"
    export_images(file)
    return file


def test_images_are_prepared_inside(image_file, image_model):
    opened, (images, _) = session(image_file), pictures(20, seed=40)
    [given] = opened.get_inputs()
    assert (given.type, given.shape) == ("tensor(uint8)", ["batch", 3, "height", "width"])
    score = opened.run(["score"], {"images": images.numpy()})[0]
    np.testing.assert_allclose(score, image_model[0].anomaly_score(images).numpy(), rtol=0, atol=1e-4)


def test_images_of_another_size_are_resized_as_elsa_decodes_them(image_file, image_model):
    large = generated_images(3, 61, 3)[:, :, :, :47].permute(0, 2, 3, 1).contiguous().numpy()
    small = torch.from_numpy(np.stack([decode(picture, Decoding(**PIXELS)) for picture in large]))
    score = session(image_file).run(["score"], {"images": np.ascontiguousarray(large.transpose(0, 3, 1, 2))})[0]
    # a pixel in some thousands is rounded to its other neighbour
    np.testing.assert_allclose(score, image_model[0].anomaly_score(small).numpy(), rtol=0, atol=0.01)


def source(folder, count=60):
    images, words = pictures(count, seed=20)
    np.savez(folder / "images.npz", images=images.permute(0, 2, 3, 1).numpy(), labels=np.array(words, dtype="U7"))
    return folder / "images.npz"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_smaller_numbers_rank_alike_and_their_cost_is_told(export_images, image_model, tmp_path, capsys, precision):
    calibrate = ["--calibrate", str(source(tmp_path))]
    opened = export_images(tmp_path / "m.onnx", "--precision", precision, *calibrate)
    told = capsys.readouterr().out
    assert "60 real images" in told
    images, _ = pictures(30, seed=50)
    score, p_value, _ = opened.run(None, {"images": images.numpy()})
    trained = image_model[0].anomaly_score(images)
    assert np.corrcoef(score, trained.numpy())[0, 1] > 0.95
    assert (score != trained.numpy()).any()
    expected = p_values(trained, image_model[0].calibration_).numpy()
    assert np.abs(p_value - expected).mean() < 0.1


def test_int8_without_images_to_calibrate_on_is_refused(image_model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("elsa.ship.export.open_model", lambda *_, **__: image_model)
    assert run(["export", str(tmp_path), "--out", str(tmp_path / "m.onnx"), "--precision", "int8"]) == 2
    assert "--calibrate" in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


def test_a_file_that_does_not_score_alike_is_refused_and_not_written(model, tmp_path, monkeypatch, capsys):
    whole = Graph.forward

    def wrong(self, images, threshold):
        score, p_value, verdict = whole(self, images, threshold)
        return score + 2e-4, p_value, verdict

    monkeypatch.setattr(Graph, "forward", wrong)
    assert run(["export", str(model), "--out", str(tmp_path / "m.onnx")]) == 2
    assert "does not score as MODEL does, nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def answered(score, threshold=0.0):
    return np.array(score), np.zeros(len(score)), np.array(score) > threshold


def test_the_comparison_counts_differences_and_verdicts():
    trained = np.array([-1.0, 0.5, 2.0])
    same = compare(answered(trained + 5e-5), trained, 0.0, "real", "fp32")
    assert same.largest_difference == pytest.approx(5e-5)
    assert (same.verdicts_changed, same.images) == (0, 3)
    score, p_value, verdict = answered(trained)
    for unlike in (answered(trained + 2e-4), (score, p_value, ~verdict), answered(trained * np.nan)):
        with pytest.raises(UserError, match="nothing was written"):
            compare(unlike, trained, 0.0, "real", "fp32")
    with pytest.raises(UserError, match="nothing was written"):
        compare(answered(-trained), trained, 0.0, "real", "int8")
    # a score within the tolerance of the threshold may fall on either side
    near = np.array([-1.0, 5e-5, 2.0])
    assert compare(answered(near - 8e-5), near, 0.0, "real", "fp32").verdicts_changed == 1


def test_p_values_that_are_not_those_of_the_scores_are_refused():
    calibration = torch.linspace(0, 1, 11)
    score = np.array([0.05, 0.55])
    p_value = p_values(torch.from_numpy(score), calibration).numpy()
    export_parity.check_consistent((score, p_value, score > 0.5), calibration, 0.5)
    for wrong in ((score, p_value[::-1], score > 0.5), (score, p_value, score > 0.6)):
        with pytest.raises(UserError, match="p-values"):
            export_parity.check_consistent(wrong, calibration, 0.5)


def test_the_first_image_is_sent_alone():
    lengths = []

    def runner(images):
        lengths.append(len(images))
        return images[:, 0], images[:, 0], images[:, 0] > 0

    score, _, _ = answers(runner, np.arange(40.0)[:, None])
    assert lengths == [1, 16, 16, 7]
    np.testing.assert_array_equal(score, np.arange(40.0))


def test_generated_images_and_vectors_are_the_same_every_time_and_varied():
    assert torch.equal(generated_images(1, 40), generated_images(1, 40))
    assert generated_images(3, 40).float().std(dim=0).min() > 10
    memory, _ = vectors()
    made = generated_vectors(memory)
    assert torch.equal(made, generated_vectors(memory))
    distance = torch.cdist(made, memory).min(dim=1).values
    assert distance[0] < 1e-3 < distance[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "m.bin"], "name it .onnx"),
        (["--out", "m.pt2", "--format", "onnx"], "name it .onnx"),
        (["--out", "m.pt2", "--precision", "int8"], "--format onnx"),
        (["--out", "m.onnx", "--views", "3"], "--views"),
        (["--out", "m.onnx", "--false-alarms", "0.001"], "--false-alarms 0.001 takes at least"),
        (["--out", "m.onnx", "--precision", "int8", "--calibrate", "v.npz"], "MODEL was fitted on vectors: use fp32"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(model, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    np.savez("v.npz", vectors=vectors()[0].numpy())
    assert run(["export", str(model), *options]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["v.npz"]


def test_other_detectors_are_named_in_the_refusal(tmp_path, capsys):
    from elsa.detectors.ssad import SSADDetector

    save_model(SSADDetector().fit(*vectors()), tmp_path / "model", {"preprocessing": {}})
    (tmp_path / "v.npz").write_bytes(b"")
    np.savez(tmp_path / "v.npz", vectors=vectors()[0].numpy())
    options = ["--out", str(tmp_path / "m.onnx"), "--calibrate", str(tmp_path / "v.npz")]
    assert run(["export", str(tmp_path / "model"), *options]) == 2
    assert "holds a SSADDetector: only elsa-head, elsa+ and elsa can be exported" in capsys.readouterr().err


def test_a_missing_extra_is_named(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert run(["export", str(model), "--out", str(tmp_path / "m.onnx")]) == 2
    assert "pip install elsa[onnx]" in capsys.readouterr().err


EXAMPLE = Path(__file__).parent.parent.parent / "docs" / "export.md"


def test_the_example_of_the_docs_runs_where_neither_torch_nor_elsa_can_be_imported(image_file, image_model, tmp_path):
    [code] = re.findall(r"^```python\n(# score.py.*?)^```", EXAMPLE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "model.onnx").write_bytes(image_file.read_bytes())
    images, _ = pictures(3)
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    blocked = "import sys\nfor name in ('torch', 'elsa'): sys.modules[name] = None\n"
    (tmp_path / "score.py").write_text(blocked + code)
    done = subprocess.run(
        [sys.executable, "score.py", "model.onnx", "0.png", "1.png", "2.png"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["0.png", "1.png", "2.png"]
    expected = image_model[0].anomaly_score(images)
    np.testing.assert_allclose([float(line[1]) for line in lines], expected.numpy(), atol=1e-3)
