"""Models of earlier versions, kept as what model.json said and as the shapes of their tensors.

The tensors themselves would be megabytes; they are drawn anew from their names, so that scores can be compared.
Run as a script it adds the models of this version: python tests/release/stored.py
"""

import hashlib
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from elsa.detectors import build
from elsa.model_file import read_model
from elsa.saved import load, save_model

HERE = Path(__file__).parent / "models"
PICTURES = torch.randint(0, 256, (5, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
VECTORS = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def tensor(name: str, shape: list[int], dtype: str) -> Tensor:
    """Numbers that follow from the name: small and positive, so that a variance or a scale may be made of them."""
    if dtype == "int64":
        return torch.ones(shape, dtype=torch.int64)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return (0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(
        getattr(torch, dtype)
    )


def detectors():
    """Fitted detectors of every kind of file, small."""
    images = torch.randint(0, 256, (60, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    vectors = torch.randn(80, 7, generator=torch.Generator().manual_seed(0))
    words = ["anomaly"] * 6 + ["normal"] * 6
    quick = {"preset": "cpu", "pretrain_epochs": 0, "finetune_epochs": 0, "num_prototypes": 13, "views": 2}
    yield "elsa", build("elsa", **quick).fit(images, words + [""] * 48), PICTURES
    yield "elsa-plus", build("elsa+", **quick).fit(images, words + [""] * 48), PICTURES
    yield "elsa-head", build("elsa-head", num_prototypes=13, rank=5).fit(vectors, words + [""] * 68), VECTORS


def main() -> None:
    """Write what this version's models look like, and how they score with tensors drawn from their names."""
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, fitted, new in detectors():
            place = Path(folder) / name
            save_model(fitted, place, {"preprocessing": {}, "versions": {"elsa": "0.1.0"}})
            tensors, about = read_model(place)
            shapes = {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()}
            rebuilt = rebuild(about, shapes, Path(folder) / f"{name}-rebuilt")
            kept = {"about": about, "shapes": shapes, "scores": load(rebuilt).anomaly_score(new).tolist()}
            (HERE / f"format-{about['format']}-{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def rebuild(about: dict, shapes: dict, folder: Path) -> Path:
    """A MODEL folder with these parts and drawn tensors, written byte for byte as the format says."""
    from safetensors.torch import save

    from elsa.model_file import digest_of

    payload = save({name: tensor(name, *shape) for name, shape in shapes.items()})
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(payload)
    about = {**about, "sha256": hashlib.sha256(payload).hexdigest()}
    about["sha256_json"] = digest_of(about)
    (folder / "model.json").write_text(json.dumps(about))
    return folder


if __name__ == "__main__":
    main()
