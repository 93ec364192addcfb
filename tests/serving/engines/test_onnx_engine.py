"""The model in onnxruntime answers as the model does, in int8 within what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.serving.engines.onnx_engine import MARGIN, OnnxEngine
from shoestring.serving.engines.signature import find_interface
from shoestring.serving.engines.together import Together
from tests.serving.engines.contract import Case, check_contract
from tests.serving.engines.models import Reader, ids_alone, whole

pytest.importorskip("onnxruntime")


def wide() -> nn.Module:
    torch.manual_seed(5)
    return Reader("all", width=64, layers=1).eval()


def engine_of(model: nn.Module, file: Path, fast: bool) -> OnnxEngine:
    return OnnxEngine(model, whole, find_interface(model, whole, values=ids_alone((5, 24, 11))), file, fast=fast)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["int8", "float32"])
def test_every_answer_is_the_models_to_the_sample_alone(fast: bool, tmp_path: Path) -> None:
    """Exporting takes seconds, so the quick suite has the longer of the two ways."""
    model = wide()
    engine = engine_of(model, tmp_path / "one.onnx", fast)
    check_contract(Case(engine, model, whole), False, Together.EQUAL)
    assert engine.exported.path.read_bytes(), "replicas read it later"
    if fast:
        assert 1e-4 < engine.tolerance / MARGIN < 0.1, "bytes are coarser than rounding"


def test_a_model_that_answers_by_chance_is_refused_before_it_is_exported(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="differently each time"):
        engine_of(Reader("all", drop=0.1, layers=1).eval(), tmp_path / "one.onnx", False)
    assert not list(tmp_path.iterdir())
