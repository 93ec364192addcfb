"""Convolutions in int8: onnxruntime computes nearly the same from a quarter of the bytes, or they stay in float32 and that is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from shoestring.commands.main import run  # noqa: E402
from shoestring.compression.onnx.check import session  # noqa: E402
from shoestring.compression.onnx.convolutions import Convolutions  # noqa: E402
from shoestring.compression.onnx.export import ExportedFile, export_onnx  # noqa: E402


class SkippingBytes(nn.Module):
    """Convolutions with batch norms and a skip, one of them with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 48, 3, padding=1), nn.BatchNorm2d(48)
        self.one, self.two = nn.Conv2d(48, 48, 3, padding=1), nn.Conv2d(48, 48, 3, padding=1, bias=False)
        self.down, self.head = nn.Conv2d(48, 48, 3, stride=2, dilation=2, padding=2), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.two(torch.relu(self.one(x))))
        return self.head(torch.relu(self.down(x)).mean((2, 3)))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 128, 1),
        nn.Conv2d(128, 128, 3, padding=1, groups=128, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU6(),
        nn.Conv2d(128, 64, 1),
        nn.ConvTranspose2d(64, 16, 2, stride=2),
    )


def deep() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 24, 3), nn.ReLU(), nn.Conv3d(24, 24, 3, padding=1))


def lively(model: nn.Module) -> nn.Module:
    """With statistics of batch norms as training leaves them."""
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.running_mean, one.running_var = torch.randn(one.num_features) * 0.3, torch.rand(one.num_features) + 0.5
            nn.init.uniform_(one.weight, 0.5, 1.5)
    return model.eval()


def int8_file(model: nn.Module, batch: Tensor, folder: Path, **more: Any) -> tuple[ExportedFile, list[str]]:
    calibration = [torch.randn(batch.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    found = export_onnx(
        model,
        lambda model, batch: model(batch),
        batch,
        folder / "model.onnx",
        fast=True,
        calibration=calibration,
        **more,
    )
    return found, [node.op_type for node in onnx.load(found.path).graph.node]


@pytest.mark.parametrize(
    ("make", "shape", "computed", "stored"),
    [
        (SkippingBytes, (4, 3, 12, 12), 4, 0),
        (depthwise, (4, 3, 8, 8), 1, 2),
        (deep, (2, 2, 6, 6, 6), 2, 0),
        (
            lambda: nn.Sequential(nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 3, groups=2)),
            (4, 16, 20),
            1,
            1,
        ),
    ],
    ids=["skips", "depthwise", "three dimensions", "one dimension"],
)
def test_the_file_is_close_and_a_quarter_of_the_size(
    tmp_path: Path, make: Any, shape: tuple[int, ...], computed: int, stored: int
) -> None:
    torch.manual_seed(0)
    model = lively(make())
    found, kinds = int8_file(model, torch.randn(shape), tmp_path)
    assert (
        kinds.count("QLinearConv") == computed and kinds.count("Cast") == stored and "BatchNormalization" not in kinds
    )
    assert found.largest_difference < 0.04, (
        "of the output's norm, by onnxruntime, on samples that calibration has not seen"
    )
    convolved = sum(
        one.weight.nbytes
        for one in model.modules()
        if isinstance(one, nn.modules.conv._ConvNd) and one.weight.numel() >= 1024
    )
    total = sum(one.nbytes for one in model.state_dict().values())
    assert found.bytes < total - 0.7 * convolved + 6000
    assert any("convolutions computed in int8" in note for note in found.notes)


def test_padding_a_dead_channel_and_a_large_bias_are_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=2), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight[3] = 0
        model[0].bias[3] = 7.0
        model[0].bias[4] = -3.0
    found, kinds = int8_file(model, x := torch.rand(2, 16, 6, 6) + 1, tmp_path / "one")
    assert kinds.count("QLinearConv") == 1 and "Relu" not in kinds and found.largest_difference < 0.05
    result = session(found.path).run(None, {"input": x.numpy()})[0]
    assert abs(result[:, 3] - 7.0).max() < 0.1


def test_ranges_that_calibration_did_not_show_keep_products_in_float_and_that_is_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = lively(SkippingBytes())
    found, kinds = int8_file(model, 40 * torch.randn(4, 3, 12, 12), tmp_path)
    assert "QLinearConv" not in kinds and kinds.count("Cast") == 4 and found.largest_difference < 0.02
    assert "not kept" in found.notes[0] and "4 convolutions stored in int8 and computed in float32" in found.notes[1]


def test_versions_are_tried_until_one_is_enough_else_the_first_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, tried = lively(SkippingBytes()), torch.randn(4, 3, 12, 12), []

    def third(path: Path) -> bool:
        tried.append(path.stat().st_size)
        return len(tried) == 3

    found, kinds = int8_file(model, x, tmp_path / "third", enough=third)
    assert (
        len(tried) == len(Convolutions)
        and found.bytes == tried[2] > 3 * tried[0]
        and not {"QLinearConv", "Cast"} & set(kinds)
    )
    found, kinds = int8_file(model, x, tmp_path / "none", enough=lambda path: False)
    assert kinds.count("QLinearConv") == 4 and found.bytes == tried[0]


JOB = """
import torch, shoestring
from torch import nn

def job():
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(32, 3, 8, 8, generator=draw), torch.randint(0, 4, (32,), generator=draw)) for _ in range(20)]
    return shoestring.Job(model=lambda: nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.Flatten(),
                                                      nn.Linear(768, 4)), data=data)
"""


@pytest.mark.parametrize(("keep", "kind"), [("0.99", "QLinearConv"), ("0.9999995", "Cast")])
def test_the_command_measures_the_file_and_keeps_the_fidelity_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: str, kind: str
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    words = [
        "compress",
        str(tmp_path / "job.py"),
        "--keep",
        keep,
        "--use",
        "Half()",
        "--to",
        "onnx-int8",
        "--out",
        str(tmp_path / "small"),
        "--json",
    ]
    assert run(words) == 0
    report = json.loads(capsys.readouterr().out)
    kinds = [node.op_type for node in onnx.load(tmp_path / "small" / "model.onnx").graph.node]
    assert (
        report["onnx"]["fidelity"]["mean"] >= float(keep)
        and kind in kinds
        and ("QLinearConv" in kinds) == (kind == "QLinearConv")
    )
    assert kind == "QLinearConv" or any("as close as was asked for" in note for note in report["onnx"]["notes"])
