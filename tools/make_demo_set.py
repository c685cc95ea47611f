"""Make the embedded demo set, elsa/data/fashion_mnist/demo.npz, from Fashion-MNIST's own files.

Run: python tools/make_demo_set.py FOLDER
FOLDER holds the four .gz files, e.g. /usr/share/datasets/fashion-mnist after `apt install dataset-fashion-mnist`.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch

from elsa.data.benchmarks import FASHION_MNIST_CLASSES, load_fashion_mnist
from elsa.data.demo import BAG, DEMO_FILE

# A draw of the demo takes 1,850 bags and 680 others; the rest makes the draws of several seeds differ.
BAGS, OTHERS_OF_EACH_KIND = 2800, 300
LARGEST = 3_000_000
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # a fixed date in the archive: the same input gives the same file to the byte


def main(folder: Path) -> None:
    images, classes, _, _ = load_fashion_mnist(folder)
    # The first of each class, in the publisher's order: nobody chose them.
    chosen = [torch.nonzero(classes == k)[: BAGS if k == BAG else OTHERS_OF_EACH_KIND, 0] for k in range(10)]
    index = torch.cat(chosen).sort().values
    names = np.array([FASHION_MNIST_CLASSES[k] for k in classes[index].tolist()])
    arrays = {"images": images[index, 0].numpy(), "garment": names, "fashion_mnist_index": index.numpy()}
    with zipfile.ZipFile(DEMO_FILE, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            about = zipfile.ZipInfo(f"{name}.npy", LONG_AGO)
            archive.writestr(about, member.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)
    size = DEMO_FILE.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{DEMO_FILE.name} has {size} bytes, more than {LARGEST}: take fewer images")
    print(f"{DEMO_FILE}: {len(index)} images, {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
