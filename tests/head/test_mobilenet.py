"""MobileNetV2 against a computation written out from its table, and the weight files it refuses."""

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elsa.errors import UserError
from elsa.mobilenet import FEATURES, MobileNetV2, fused, read_mobilenet_v2


def by_hand(weights, images):
    """The paper's table, block by block, from the weights by their torchvision names; in float64."""
    weights = {name: value.double() for name, value in weights.items()}

    def conv_norm(x, conv, norm, stride=1, groups=1, relu=True):
        kernel = weights[f"{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
        mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
        x = x * weights[f"{norm}.weight"][:, None, None] + weights[f"{norm}.bias"][:, None, None]
        return x.clamp(0, 6) if relu else x

    # one (output channels, stride) for each of the 17 blocks
    blocks = [(16, 1), (24, 2), (24, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1), (64, 1)]
    blocks += [(96, 1), (96, 1), (96, 1), (160, 2), (160, 1), (160, 1), (320, 1)]
    x = conv_norm(images.double(), "features.0.0", "features.0.1", stride=2)
    for number, (width, stride) in enumerate(blocks, start=1):
        before, at = x, f"features.{number}.conv"
        if number == 1:  # this one does not widen
            depthwise = 0
        else:
            x = conv_norm(x, f"{at}.0.0", f"{at}.0.1")
            depthwise = 1
        x = conv_norm(x, f"{at}.{depthwise}.0", f"{at}.{depthwise}.1", stride=stride, groups=x.shape[1])
        x = conv_norm(x, f"{at}.{depthwise + 1}", f"{at}.{depthwise + 2}", relu=False)
        if stride == 1 and before.shape[1] == width:
            x = x + before
    return conv_norm(x, "features.18.0", "features.18.1").mean(dim=(2, 3))


@pytest.mark.parametrize("size", [32, 53])
def test_features_match_the_table_computed_by_hand(net, size):
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected = by_hand(net.state_dict(), images)
    assert expected.std(dim=0).mean() > 1e-3  # the images differ, so a constant would not do
    torch.testing.assert_close(net(images), expected.float(), rtol=1e-3, atol=1e-4)


def test_as_many_parameters_as_torchvision_has_without_its_classifier():
    assert sum(parameter.numel() for parameter in MobileNetV2().parameters()) == 2_223_872
    assert len(MobileNetV2().state_dict()) == 314 - 2


def test_folded_batch_norms_compute_the_same_and_leave_the_original_alone(net):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    folded = fused(net)
    torch.testing.assert_close(folded(images), net(images), rtol=1e-3, atol=1e-4)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_weight_file_is_read_with_its_classifier_left_out(net, tmp_path):
    file = tmp_path / "weights.pth"
    torch.save({**net.state_dict(), "classifier.1.weight": torch.zeros(7, FEATURES)}, file)
    read, sha256 = read_mobilenet_v2(file)
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert not read.training
    for name, value in read.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=0)


class Evil:
    """What a pickle can do to its reader."""

    def __reduce__(self):
        return os.mkdir, ("evil was here",)


def rubbish(net, kind, file):
    weights = dict(net.state_dict())
    if kind == "missing":
        del weights["features.3.conv.2.weight"]
    elif kind == "unknown":
        weights["features.19.0.weight"] = torch.zeros(1)
    elif kind == "misshapen":
        weights["features.0.0.weight"] = torch.zeros(16, 3, 3, 3)
    elif kind == "not a tensor":
        weights["features.0.0.weight"] = "text"
    elif kind == "not finite":
        weights["features.0.0.weight"] = torch.full((32, 3, 3, 3), torch.nan)
    torch.save([1, 2] if kind == "a list" else weights, file)
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "text":
        file.write_text("Not Found")
    elif kind == "evil":
        file.write_bytes(pickle.dumps(Evil()))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "1 parameters are missing (first: features.3.conv.2.weight), 0 unknown"),
        ("unknown", "0 parameters are missing, 1 unknown (first: features.19.0.weight)"),
        ("misshapen", "features.0.0.weight is [16, 3, 3, 3], expected [32, 3, 3, 3]"),
        ("not a tensor", "features.0.0.weight is str"),
        ("not finite", "features.0.0.weight holds values that are not finite"),
        ("a list", "hold a list"),
        ("cut", "cannot be read"),
        ("empty", "cannot be read"),
        ("text", "cannot be read"),
        ("evil", "cannot be read"),
    ],
)
def test_rubbish_is_refused_in_one_line_that_names_the_file(net, tmp_path, monkeypatch, kind, said):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pth"
    rubbish(net, kind, file)
    with pytest.raises(UserError) as refused:
        read_mobilenet_v2(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path("evil was here").exists()


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"no-such\.pth: No such file"):
        read_mobilenet_v2(Path("no-such.pth"))


def test_a_file_must_be_the_one_its_name_or_the_caller_promises(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    digest = hashlib.sha256((tmp_path / "weights.pth").read_bytes()).hexdigest()
    right, wrong = tmp_path / f"net-{digest[:8]}.pth", tmp_path / "net-b0353104.pth"
    for file in (right, wrong):
        file.write_bytes((tmp_path / "weights.pth").read_bytes())
    assert read_mobilenet_v2(right)[1] == digest
    assert read_mobilenet_v2(right, sha256=digest)[1] == digest
    with pytest.raises(UserError, match="expected b0353104"):
        read_mobilenet_v2(wrong)
    with pytest.raises(UserError, match="expected 0000"):
        read_mobilenet_v2(right, sha256="0" * 64)
