"""Packs the Parquet files of the development data for GPU hosts, which have numpy and Pillow but no pyarrow."""

from pathlib import Path

from elsa.data.benchmark_sets import PACKED, write_packed
from elsa.errors import UserError

# Folders that each stay below the 64 MiB that travel at once, beside the checkout itself.
CHUNKS = {
    "outliers": ("cifar100-test", "svhn-test-cropped-10k", "tinyimagenet-test-32"),
    "auxiliary": ("tinyimagenet-aux20k-32",),
    "imagenette64": ("imagenette64-train", "imagenette64-val"),
}


def pack(source: Path, out: Path) -> list[str]:
    """Write one .npz for each Parquet file of `source`, in folders that travel one by one; a line about each folder."""
    from pyarrow import ArrowInvalid, parquet

    assert sorted(PACKED) == sorted(name for names in CHUNKS.values() for name in names)
    lines = []
    for chunk, names in CHUNKS.items():
        for name in names:
            path = source / f"{name.replace('-', '_')}.parquet"
            try:
                table = parquet.read_table(path, columns=["image", "label"])
            except (OSError, ArrowInvalid) as error:
                raise UserError(f"SOURCE {path}: {error}; expected a Parquet file with image and label") from error
            encoded = [image["bytes"] for image in table["image"].to_pylist()]
            write_packed(out / chunk / f"{name}.npz", encoded, [str(word) for word in table["label"].to_pylist()])
        size = sum((out / chunk / f"{name}.npz").stat().st_size for name in names) / 2**20
        lines.append(f"{out / chunk}: {', '.join(names)}, {size:.1f} MiB")
    return lines
