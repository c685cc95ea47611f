"""ONNX files, torch.export archives and timm networks as encoders; what they take and give, and what is refused."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from elsa.encoders import IMAGENET_MEAN, IMAGENET_STD, Encoder, embed, parse_encoder, restore_encoder
from elsa.errors import UserError
from elsa.head import ElsaHead
from elsa.saved import load, save_model
from elsa.ship.export_graph import scoring_module

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

D = 7
WEIGHT = np.random.default_rng(0).normal(size=(D, 3, 5, 5)).astype(np.float32)


def write_onnx(file, batch="n", side="s", channels=3, kind=TensorProto.FLOAT, pooled=False, rank_three=False):
    """A strided convolution and ReLU: maps [N, D, h, w], pooled to [N, D] or not."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[3, 3]),
        helper.make_node("Relu", ["c"], ["y" if not pooled and not rank_three else "r"]),
    ]
    if pooled:
        nodes.append(helper.make_node("ReduceMean", ["r", "axes"], ["y"], keepdims=0))
    if rank_three:
        nodes.append(helper.make_node("ReduceMean", ["r", "last"], ["y"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", kind, [batch, channels, side, side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(WEIGHT[:, :channels], "w"),
            numpy_helper.from_array(np.array([2, 3]), "axes"),
            numpy_helper.from_array(np.array([3]), "last"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
    return file


class SameNet(nn.Module):
    """What the ONNX files compute."""

    def forward(self, x):
        return torch.relu(nn.functional.conv2d(x, torch.from_numpy(WEIGHT), stride=3)).mean(dim=(2, 3))


def images(count=11, seed=0):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [{}, {"pooled": True}, {"batch": 1}, {"batch": 4}])
def test_an_onnx_file_gives_the_vectors_of_its_network(tmp_path, settings):
    encoder = parse_encoder(f"onnx:{write_onnx(tmp_path / 'e.onnx', **settings)}")
    assert (encoder.name, encoder.features) == ("onnx", D)
    expected = embed(Encoder("same", SameNet(), "", "", D), images(), size=48)
    torch.testing.assert_close(embed(encoder, images(), size=48), expected, rtol=1e-4, atol=1e-5)


def test_a_file_of_one_size_gets_images_of_that_size(tmp_path):
    encoder = parse_encoder(f"onnx:{write_onnx(tmp_path / 'e.onnx', side=40)}")
    expected = embed(Encoder("same", SameNet(), "", "", D), images(), size=40)
    torch.testing.assert_close(embed(encoder, images(), size=40), expected, rtol=1e-4, atol=1e-5)
    assert embed(encoder, images(), size=64).shape == (11, D)


def test_a_model_carries_the_file_and_scores_without_it(tmp_path):
    file = write_onnx(tmp_path / "e.onnx")
    head = ElsaHead(encoder=f"onnx:{file}", num_prototypes=13, size=48).fit(images(60), [""] * 60)
    save_model(head, tmp_path / "model", {})
    file.unlink()
    with pytest.raises(UserError, match=r"itself an ONNX file, e\.onnx"):
        scoring_module(head, torch.float32)
    again = load(tmp_path / "model")
    assert again.encoder.file == "e.onnx"
    assert torch.equal(again.anomaly_score(images(seed=1)), head.anomaly_score(images(seed=1)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"channels": 1}, "must take one float tensor"),
        ({"kind": TensorProto.DOUBLE}, "ONNX"),
        ({"rank_three": True}, "must be float vectors"),
    ],
)
def test_files_of_other_shapes_are_refused(tmp_path, settings, said):
    with pytest.raises(UserError, match=said) as refused:
        parse_encoder(f"onnx:{write_onnx(tmp_path / 'e.onnx', **settings)}")
    assert "e.onnx" in str(refused.value)


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_rubbish_is_refused_in_one_line(tmp_path, kind):
    file = tmp_path / f"rubbish.{kind}"
    for content in (b"", b"not a network at all", bytes(range(256)) * 40):
        file.write_bytes(content)
        with pytest.raises(UserError, match="rubbish") as refused:
            parse_encoder(f"{kind}:{file}")
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="No such file"):
        parse_encoder(f"{kind}:{tmp_path / 'none'}")


@pytest.mark.slow
def test_a_torch_export_archive_becomes_onnx_so_that_no_model_is_unpickled(tmp_path):
    sample = torch.zeros(2, 3, 48, 48)
    program = torch.export.export(SameNet(), (sample,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "e.pt2")
    encoder = parse_encoder(f"pt2:{tmp_path / 'e.pt2'}")
    assert (encoder.name, encoder.file) == ("onnx", "e.pt2")
    expected = embed(Encoder("same", SameNet(), "", "", D), images(), size=48)
    torch.testing.assert_close(embed(encoder, images(), size=48), expected, rtol=1e-4, atol=1e-5)
    about = {"name": encoder.name, "file": encoder.file, "sha256": encoder.sha256}
    again = restore_encoder(encoder.net.state_dict(), **about)
    assert torch.equal(embed(again, images(), size=48), embed(encoder, images(), size=48))


class TimmLike(nn.Module):
    """As timm's networks look from outside."""

    num_features = D
    pretrained_cfg: dict = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.5, 0.5)}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, D, 5, 3)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))


@pytest.fixture
def timm(monkeypatch):
    def create_model(name, pretrained, num_classes):
        assert not pretrained
        assert num_classes == 0
        if name != "tiny_net":
            raise RuntimeError(f"Unknown model ({name})")
        return TimmLike()

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_timm_network_takes_a_local_checkpoint_and_its_own_normalisation(timm, tmp_path, suffix):
    from safetensors.torch import save_file

    weights = {**TimmLike().state_dict(), "head.weight": torch.zeros(3, D)}
    file = tmp_path / f"c.{suffix}"
    torch.save(weights, file) if suffix == "pth" else save_file(weights, file)
    encoder = parse_encoder(f"timm:tiny_net={file}")
    assert (encoder.name, encoder.features) == ("timm:tiny_net", D)
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def normalised(mean, std):
        return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)

    own = TimmLike()
    own.load_state_dict({name: weights[name] for name in own.state_dict()})
    torch.testing.assert_close(
        encoder.net(normalised(IMAGENET_MEAN, IMAGENET_STD)), own(normalised((0.5, 0.5, 0.5), (0.25, 0.5, 0.5)))
    )
    about = {"name": encoder.name, "file": encoder.file, "sha256": encoder.sha256}
    again = restore_encoder(encoder.net.state_dict(), **about)
    assert torch.equal(embed(again, images(), size=32), embed(encoder, images(), size=32))


def test_timm_refusals(timm, tmp_path):
    torch.save({"conv.weight": torch.zeros(2)}, tmp_path / "c.pth")
    (tmp_path / "bad.safetensors").write_bytes(b"x")
    for text, said in [
        ("timm:tiny_net", "nothing is downloaded"),
        (f"timm:tiny_net={tmp_path / 'c.pth'}", "2 of 2 parameters are missing or of another shape"),
        (f"timm:huge_net={tmp_path / 'c.pth'}", "Unknown model"),
        (f"timm:tiny_net={tmp_path / 'bad.safetensors'}", "no safetensors file"),
    ]:
        with pytest.raises(UserError, match=said):
            parse_encoder(text)


def test_missing_extras_are_named(tmp_path, monkeypatch):
    write_onnx(tmp_path / "e.onnx")
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install elsa\[timm\]"):
        parse_encoder("timm:tiny_net=c.pth")
    with pytest.raises(UserError, match=r"pip install elsa\[onnx\]"):
        parse_encoder(f"onnx:{tmp_path / 'e.onnx'}")
