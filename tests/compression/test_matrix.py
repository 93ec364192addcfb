"""Every technique on every kind of model, and all allowed pairs: the size is predicted to the byte, what is written loads back to the same
bits and answers as was measured, or it is refused with the reason."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch

from shoestring.compression.calibration.calibration import same
from shoestring.compression.calibration.model_outputs import named_tensors
from shoestring.compression.catalogue import CATALOGUE, clash
from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.loading.source import CalibrationSamples, ModelSource, prepare_model, samples_of
from shoestring.compression.onnx.export import export_onnx
from shoestring.compression.room import compressed_model, plain_cost, plan_compression
from shoestring.compression.session import CompressOptions, CompressSession, loaded_model
from shoestring.compression.technique import CompressTechnique, ModelCost
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.technique import in_order, parse_technique
from tests.compression.models import MODELS, called, job_of
from tests.compression.techniques.test_early_exit import counted

# A setting or two of every technique, which all models are tried with
SETTINGS: dict[str, tuple[str, ...]] = {
    "Prune": ("Prune(neurons=0.5)", "Prune(heads=0.5)", "Prune(channels=0.25)", "Prune(layers=0.5)"),
    "Factorize": (
        "Factorize(share=0.6)",
        "Factorize(kind='convolution', share=0.6)",
        "Factorize(kind='embedding', share=0.9)",
    ),
    "EarlyExit": ("EarlyExit(loss=1.0, steps=5)",),
    "Cascade": ("Cascade(small='nowhere')",),  # tests/compression/techniques/test_cascade.py
    "Sparsify": ("Sparsify()", "Sparsify(by='random', share=0.9)"),
    "Codebook": ("Codebook()", "Codebook(bits=3, fit='percentile')"),
    "ProductQuantize": (
        "ProductQuantize(length=2, bits=4)",
        "ProductQuantize(kind='pq', length=2, bits=3)",
        "ProductQuantize(kind='residual', length=2, bits=3)",
        "ProductQuantize(kind='opq', length=2, bits=3)",
    ),
    "Half": ("Half()",),
    "Quantize": ("Quantize()", "Quantize(bits=4)", "Quantize(bits=3, group=16)"),
    "Decode": ("Decode()",),
    "Int8": ("Int8()", "Int8(inputs='calibrated')"),
}
# Models that have nothing of what a setting is about: there it is refused, and nowhere else
LACKING: dict[str, set[str]] = {
    "Prune(neurons=0.5)": {"cnn with skips"},
    "Prune(heads=0.5)": {"mlp", "cnn with skips", "lstm", "tied embeddings"},
    "Prune(channels=0.25)": {"mlp", "lstm", "bert", "llama", "tied embeddings"},
    "Prune(layers=0.5)": {"mlp", "cnn with skips", "lstm", "tied embeddings"},
    "Factorize(kind='convolution', share=0.6)": {"mlp", "lstm", "bert", "llama", "tied embeddings"},
    "Factorize(kind='embedding', share=0.9)": {"mlp", "cnn with skips", "tied embeddings"},
    "EarlyExit(loss=1.0, steps=5)": {"cnn with skips", "lstm", "bert", "llama", "tied embeddings"},
    "Cascade(small='nowhere')": set(MODELS),
    "Int8()": {"cnn with skips"},
    "Int8(inputs='calibrated')": {"cnn with skips"},
}
NOTHING = (
    r"can't be used for this job: (the model has no|no layer can be factorized|it can store no weight|no chain of like blocks|"
    r"the job's forward makes|the model gives a tensor of shape|'nowhere' is neither)"
)
STRUCTURES = ("Prune", "Factorize")
WIDER = 8  # models of which they make smaller folders
ALL = [one for some in SETTINGS.values() for one in some]
FIRST = [some[0] for some in SETTINGS.values()]


@pytest.fixture(autouse=True)
def costs_of_exits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.techniques.leave_early.seconds_by_part", counted)


@cache
def studied(name: str, times: int = 1) -> tuple[ModelSource, CalibrationSamples, ModelCost]:
    job = job_of(name, times)
    source = ModelSource(job, prepare_model(job.model()), {"job": None, "edits": [], "decoded": 0}, (), name)
    given = samples_of(job, 64)
    return source, given, plain_cost(source, given, Budget(), "cosine")


def tried(name: str, use: tuple[str, ...], folder: Path) -> None:
    """Compress, write, load, compare; a refusal says why."""
    source, given, cost = studied(name, WIDER if any(one.startswith(STRUCTURES) for one in use) else 1)
    before = {key: value.clone() for key, value in source.model.state_dict().items()}
    if any(name in LACKING.get(one, ()) for one in use):
        with pytest.raises(Mistake, match=NOTHING):
            plan_compression(cost, source.model, given.checked, use)
        return
    try:
        outcome = plan_compression(cost, source.model, given.checked, use)
    except Mistake as error:  # what is left after a cut may be too small for the other one
        assert len(use) > 1 and any(one.startswith(STRUCTURES) for one in use) and re.search(NOTHING, str(error)), use
        return
    session = CompressSession(source, CompressOptions(Budget(), use=use), given, outcome, cost.clock.plain)
    measured = session.write_and_measure(folder)
    assert (
        measured.size
        == session.plan.details.cost.known_figures["size_bytes"]
        == sum((folder / one).stat().st_size for one in ("model.safetensors", "manifest.json"))
    )
    assert measured.memory == session.plan.details.cost.known_figures["memory_bytes"] + sum(
        one.nbytes for one in unsaved_buffers(session)
    )
    first, again = compressed_model(outcome.chosen).model, loaded_model(session.source, folder)
    for batch in given.unseen[:2]:
        with torch.no_grad():
            assert same(*(dict(named_tensors(called(one, batch))) for one in (first, again)))
    assert all(torch.equal(value, before[key]) for key, value in source.model.state_dict().items()), (
        "the original stays as it is"
    )
    assert PackedModel(folder).stored.keys() == outcome.chosen.details.allocation.keys()


def unsaved_buffers(session: CompressSession) -> list[torch.Tensor]:
    """What a model keeps beside its weights."""
    from shoestring.compression.formats.format import WeightFormat

    model = compressed_model(session.plan).model
    packed = {id(one) for module in model.modules() if isinstance(module, WeightFormat) for one in module.buffers()}
    return [one for one in model.buffers() if id(one) not in packed]


def test_every_technique_has_a_setting_here() -> None:
    assert set(SETTINGS) == {one.__name__ for one in CATALOGUE}


@pytest.mark.parametrize("name", MODELS)
def test_every_technique_works_or_says_why_not(name: str, tmp_path: Path) -> None:
    for number, use in enumerate(FIRST):
        tried(name, (use,), tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_setting_works_or_says_why_not(name: str, tmp_path: Path) -> None:
    for number, use in enumerate(one for one in ALL if one not in FIRST):
        tried(name, (use,), tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_setting_exports_to_onnx_or_says_why_not(name: str, tmp_path: Path) -> None:
    source, given, cost = studied(name)
    written = 0
    for number, use in enumerate(ALL):
        try:
            made = compressed_model(plan_compression(cost, source.model, given.checked, (use,)).chosen)
            told = export_onnx(made.model, called, given.unseen[0], tmp_path / f"{number}.onnx")
        except Mistake as error:
            assert name in LACKING.get(use, ()) or "onnx" in str(error).lower(), f"a refusal says why: {error}"
            assert not (tmp_path / f"{number}.onnx").exists()
            continue
        assert (
            told.largest_difference <= told.tolerance == 1e-4
            and told.bytes == (tmp_path / f"{number}.onnx").stat().st_size
        )
        written += 1
    assert written >= 8, "most are written"


@pytest.mark.parametrize(
    "name", [name if name == "mlp" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_all_allowed_pairs_work_or_say_why_not(name: str, tmp_path: Path) -> None:
    for number, pair in enumerate(combinations(FIRST if name == "mlp" else ALL, 2)):
        made: list[CompressTechnique] = [parse_technique(one, CATALOGUE) for one in pair]
        if not clash(*in_order(made)):
            tried(name, pair, tmp_path / str(number))
