"""ResNets against a computation written out from the paper's table, and against files of other networks."""

import hashlib

import pytest
import torch
import torch.nn.functional as F

from elsa.encoders import Encoder, embed, parse_encoder, restore_encoder
from elsa.errors import UserError
from elsa.mobilenet import fused
from elsa.resnet import ResNet

# stages of (blocks, output channels), and the parameters of torchvision's network without its classifier
TABLE = {
    "resnet18": ([(2, 64), (2, 128), (2, 256), (2, 512)], 11_176_512, 120),
    "resnet50": ([(3, 256), (4, 512), (6, 1024), (3, 2048)], 23_508_032, 318),
}


@pytest.fixture(scope="module", params=list(TABLE))
def named_net(request):
    """Random weights through which an image makes a difference, and batch norms that do something."""
    generator = torch.Generator().manual_seed(0)
    net = ResNet(request.param).eval().requires_grad_(False)
    for name, value in net.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=generator)
        elif name.endswith(("running_mean", "bias")):
            value.normal_(0, 0.3, generator=generator)
        elif value.ndim == 1:
            value.uniform_(0.7, 1.4, generator=generator)
        elif value.ndim == 4:
            value.normal_(0, value[0].numel() ** -0.5, generator=generator)
    return request.param, net


def by_hand(name, weights, images):
    """The table, block by block, from the weights by their torchvision names; in float64."""
    weights = {key: value.double() for key, value in weights.items()}

    def conv_norm(x, conv, norm, stride=1):
        kernel = weights[f"{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
        return x * weights[f"{norm}.weight"][:, None, None] + weights[f"{norm}.bias"][:, None, None]

    x = F.max_pool2d(conv_norm(images.double(), "conv1", "bn1", stride=2).clamp(min=0), 3, 2, 1)
    for stage, (blocks, width) in enumerate(TABLE[name][0], start=1):
        for number in range(blocks):
            at, stride = f"layer{stage}.{number}", 2 if stage > 1 and number == 0 else 1
            shortcut = x
            if f"{at}.downsample.0.weight" in weights:
                shortcut = conv_norm(x, f"{at}.downsample.0", f"{at}.downsample.1", stride)
            if name == "resnet50":  # the stride is at the 3x3 convolution
                x = conv_norm(x, f"{at}.conv1", f"{at}.bn1").clamp(min=0)
                x = conv_norm(x, f"{at}.conv2", f"{at}.bn2", stride).clamp(min=0)
                x = conv_norm(x, f"{at}.conv3", f"{at}.bn3")
            else:
                x = conv_norm(x, f"{at}.conv1", f"{at}.bn1", stride).clamp(min=0)
                x = conv_norm(x, f"{at}.conv2", f"{at}.bn2")
            x = (x + shortcut).clamp(min=0)
            assert x.shape[1] == width
    return x.mean(dim=(2, 3))


def test_features_match_the_table_computed_by_hand_folded_or_not(named_net):
    name, net = named_net
    images = torch.randn(3, 3, 53, 53, generator=torch.Generator().manual_seed(1))
    expected = by_hand(name, net.state_dict(), images).float()
    assert expected.std(dim=0).mean() > 1e-3  # the images differ, so a constant would not do
    torch.testing.assert_close(net(images), expected, rtol=1e-3, atol=1e-4)
    folded = fused(net)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(images), expected, rtol=1e-3, atol=1e-4)


def test_as_many_parameters_as_torchvision_has_without_its_classifier(named_net):
    name, net = named_net
    _, parameters, entries = TABLE[name]
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert len(net.state_dict()) == entries
    assert {"conv1.weight", "bn1.running_var", "layer2.0.downsample.1.weight", "layer4.1.conv2.weight"} <= set(
        net.state_dict()
    )


@pytest.fixture(scope="module")
def file(named_net, tmp_path_factory):
    name, net = named_net
    path = tmp_path_factory.mktemp("weights") / f"{name}.pth"
    classifier = {"fc.weight": torch.zeros(7, net.features), "fc.bias": torch.zeros(7)}
    torch.save({**net.state_dict(), **classifier}, path)
    return path


def test_the_encoder_of_a_file_is_restored_from_its_weights(named_net, file):
    name, net = named_net
    encoder = parse_encoder(f"{name}:{file}")
    assert (encoder.name, encoder.file, encoder.features) == (name, file.name, net.features)
    assert encoder.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    about = {"name": encoder.name, "file": encoder.file, "sha256": encoder.sha256}
    again = restore_encoder(encoder.net.state_dict(), **about)
    images = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(embed(again, images, size=40), embed(encoder, images, size=40))
    assert embed(encoder, images, size=40).shape == (2, net.features)


def test_a_file_of_another_network_is_refused_in_one_line(named_net, file):
    other = "resnet50" if named_net[0] == "resnet18" else "resnet18"
    with pytest.raises(UserError, match=f"not those of torchvision's {other}|expected ") as refused:
        parse_encoder(f"{other}:{file}")
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="not those of torchvision's mobilenet_v2"):
        parse_encoder(f"mobilenet_v2:{file}")


def test_only_own_networks_are_folded():
    norm = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), torch.nn.BatchNorm2d(5))
    assert Encoder("other", norm, "", "").inference_net is norm


@pytest.mark.parametrize("text", ["resnet18", "resnet34:file", "timm:", "onnx:"])
def test_other_names_are_refused_with_those_there_are(text):
    with pytest.raises(UserError, match="timm:NAME=FILE, onnx:FILE, pt2:FILE"):
        parse_encoder(text)
