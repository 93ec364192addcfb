"""A job file: Fashion-MNIST among devices with unequal mixes of classes; the 10,000 test images judge the global model.

    shoestring federate benchmarks/federated/fashion.py --clients 100 --per-round 10 --rounds 100

Reads the idx files of Debian's package dataset-fashion-mnist (or any folder with the same four files, --folder).
Xiao, Rasul, Vollgraf 2017, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, arXiv 1708.07747.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoestring import Dirichlet, Job, Local, Mistake

FOLDER = "/usr/share/datasets/fashion-mnist"


def idx(file: Path) -> Tensor:
    """The array of an idx file: 0, 0, type (8: bytes), dimensions; their sizes, 4 bytes each, the largest byte first; the numbers."""
    if not file.exists():
        raise Mistake(
            f"{file} is not there: install Debian's dataset-fashion-mnist, or give the folder of the four files with --folder"
        )
    content = gzip.decompress(file.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise Mistake(f"{file} is no idx file of bytes: it begins with {content[:4].hex()}, not 000008")
    sizes = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
    return torch.frombuffer(bytearray(content[4 + 4 * content[3] :]), dtype=torch.uint8).view(sizes)


def fashion(folder: str, part: str) -> TensorDataset:
    """Images (n, 1, 28, 28) with mean 0 and deviation 1 over the training images, and their classes; `part`: train or t10k."""
    images = idx(Path(folder) / f"{part}-images-idx3-ubyte.gz")[:, None].float() / 255
    return TensorDataset((images - 0.2860) / 0.3530, idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz").long())


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(width: int) -> nn.Module:
    """Two convolutions and two linear layers, as McMahan et al. 2017 have for digits."""
    return nn.Sequential(
        nn.Conv2d(1, width // 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width // 8, width // 4, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width // 4 * 49, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


MODELS = {"mlp": mlp, "cnn": cnn}


def job(
    folder: str = FOLDER,
    net: str = "mlp",
    width: int = 128,
    alpha: float = 0.3,
    local_rate: float = 0.05,
    local_epochs: int = 1,
    local_batch: int = 20,
    seed: int = 0,
) -> Job:
    if net not in MODELS:
        raise Mistake(f"--net {net}: there are {', '.join(MODELS)}")
    return Job(
        model=lambda: MODELS[net](width),
        data=lambda: fashion(folder, "train"),
        held_out=lambda: fashion(folder, "t10k"),
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
        goal="max accuracy",
        clients=Dirichlet(alpha),
        local=Local(epochs=local_epochs, batch=local_batch, lr=local_rate, held_out=0.1),
        batch=200,
        epochs=1,
        seed=seed,
    )
