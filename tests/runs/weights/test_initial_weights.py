"""A model begins from the weights of files, of all or of a part of them, and it is told what was taken; or it does not begin."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake, Weights
from shoestring.core.running import random_state
from shoestring.runs.weights.initial_weights import fill_weights, source
from tests.records import records
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import torch
from torch import nn
from shoestring import Job, Weights

def job(head: str = "2.*") -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), steps=2,
               weights=Weights("base.safetensors", remove_prefix="base.", new=head),
               data=lambda: [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))] * 4)
"""


class Model(nn.Module):
    """An encoder, and a head on top."""

    def __init__(self, classes: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.classifier = nn.Linear(4, classes)
        if tied:
            self.encoder[2].weight = self.encoder[0].weight


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def job(weights: object, model: Callable[[], nn.Module] = Model) -> Job:
    return Job(model=model, data=list, weights=weights)


def values(seed: int = 1) -> dict[str, Tensor]:
    random_state.seed(seed)
    return {name: torch.randn_like(value) for name, value in Model().state_dict().items()}


def loaded(weights: object, model: Callable[[], nn.Module] = Model) -> dict[str, Tensor]:
    made = job(weights, model)
    random_state.seed(0)
    return fill_weights(made.model(), made).state_dict()


def refused(weights: object, model: Callable[[], nn.Module] = Model) -> str:
    with pytest.raises(Mistake) as found:
        loaded(weights, model)
    return str(found.value)


def note(weights: object) -> str:
    made = job(weights)
    found = source(made.model(), made)
    assert found is not None
    return found.note


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save_file(values(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("model", [Model, on_meta])
def test_a_file_a_folder_several_files_and_an_index_give_the_same_weights(
    stored: Path, model: Callable[[], nn.Module]
) -> None:
    wanted = values()
    (stored / "parts").mkdir()
    names = list(wanted)
    save_file({name: wanted[name] for name in names[:3]}, stored / "parts" / "one.safetensors")
    save_file({name: wanted[name] for name in names[3:]}, stored / "parts" / "two.safetensors")
    several = [stored / "parts" / "one.safetensors", str(stored / "parts" / "two.safetensors")]
    index = stored / "parts" / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {"weight_map": {name: "one.safetensors" if name in names[:3] else "two.safetensors" for name in names}}
        )
    )
    whole = stored / "model.safetensors"
    for given in (whole, str(whole), stored, several, Weights(several), index, stored / "parts"):
        found = loaded(given, model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), given
        assert note(given) == "", "all was taken"


@pytest.mark.parametrize("model", [Model, on_meta])
def test_a_new_head_stays_as_it_was_made(stored: Path, model: Callable[[], nn.Module]) -> None:
    kept = {
        name: value
        for name, value in values().items()
        if name not in ("classifier.weight", "classifier.bias", "encoder.2.bias")
    }
    save_file(kept | {"pooler.weight": torch.ones(2)}, stored / "model.safetensors")
    given = Weights(stored / "model.safetensors", new=("classifier.*", "encoder.2.bias"))
    found = loaded(given, model)
    assert all(torch.equal(found[name], value) for name, value in kept.items()), (
        "also the weight beside a bias that is new"
    )
    assert all(value.isfinite().all() and not value.is_meta for value in found.values())
    if model is Model:
        random_state.seed(0)
        made = Model().state_dict()
        assert torch.equal(found["classifier.weight"], made["classifier.weight"])
    assert note(given) == (
        f"5 weights are those of {stored}/model.safetensors; new: encoder.2.bias, classifier.weight, classifier.bias; "
        f"left in the files: pooler.*"
    )


def test_what_is_missing_is_refused_with_what_to_write_and_that_works(stored: Path) -> None:
    kept = {name: value for name, value in values().items() if not name.startswith("classifier.")}
    cases = {
        "": kept,
        "bert.": {f"bert.{name}": value for name, value in kept.items()},
        "shorter": {name.removeprefix("encoder."): value for name, value in kept.items()},
    }
    for tensors in cases.values():
        save_file(tensors, stored / "model.safetensors")
        said = refused(str(stored / "model.safetensors"))
        assert "has no weights for" in said and "write weights=shoestring.Weights(" in said
        given = eval(said.partition("write weights=shoestring.")[2], {"Weights": Weights})
        found = loaded(given)
        assert all(torch.equal(found[name], value) for name, value in kept.items())
        assert given.new == ("classifier.*",)


def test_a_prefix_is_taken_away_and_another_is_put_there(stored: Path) -> None:
    wanted = values()
    old = {name.replace("encoder.", "bert.layers."): value for name, value in wanted.items()}
    save_file(old, stored / "model.safetensors")
    given = Weights(stored, remove_prefix="bert.layers.", add_prefix="encoder.")
    assert all(torch.equal(loaded(given)[name], value) for name, value in wanted.items())
    assert "bert.layers. there, encoder. in the model" in note(given)


def test_tied_weights_are_found_under_any_of_their_names(stored: Path) -> None:
    wanted = values()
    del wanted["encoder.0.weight"]
    save_file(wanted, stored / "model.safetensors")
    found = loaded(stored, lambda: Model(tied=True))
    assert torch.equal(found["encoder.0.weight"], wanted["encoder.2.weight"])
    assert "has no weights for encoder.0.weight; " in refused(stored)


def test_what_does_not_fit_is_refused(stored: Path) -> None:
    file = stored / "model.safetensors"
    said = refused(file, lambda: Model(classes=5))
    assert f"classifier.weight has the shape (3, 4) in {file} and (5, 4) in the model" in said
    again = eval(said.partition("write weights=shoestring.")[2], {"Weights": Weights})
    assert loaded(again, lambda: Model(classes=5))["classifier.weight"].shape == (5, 4)
    assert "is the name of no weight of the model" in refused(Weights(file, new="head.*"))
    save_file({"x": torch.ones(2)}, stored / "other.safetensors")
    assert "it is of another model" in refused(stored / "other.safetensors")
    save_file(values(), stored / "other.safetensors")
    assert f"is in {file} and in {stored / 'other.safetensors'}" in refused([file, stored / "other.safetensors"])
    save_file(values() | {"bert.classifier.bias": torch.ones(3)}, file)
    assert "are both classifier.bias in the model" in refused(Weights(file, remove_prefix="bert."))
    assert "can't be read" in refused(stored / "nowhere.safetensors")
    for wrong in ({"files": ()}, {"files": 3}, {"files": "a", "new": (1,)}):
        with pytest.raises(Mistake):
            Weights(**wrong)  # type: ignore[arg-type]


def test_an_index_that_does_not_fit_its_files_is_refused(stored: Path) -> None:
    index = stored / "model.safetensors.index.json"
    for text, said in (
        ("[]", "is not an index"),
        ("{}", "is not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is not beside it"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "is not beside it"),
        ('{"weight_map": {"a": "model.safetensors"}}', "says that a is in model.safetensors, and it is not there"),
    ):
        index.write_text(text)
        assert said in refused(stored), text


def test_a_pickle_is_refused_with_the_command_that_converts_it(stored: Path) -> None:
    torch.save(values(), stored / "pytorch_model.bin")
    torch.save(values(), stored / "hidden.safetensors")
    assert "is a pickle, which can run code" in refused(stored / "hidden.safetensors"), "whatever it is called"
    (stored / "model.safetensors").unlink()
    (stored / "hidden.safetensors").unlink()
    said = refused(stored)
    assert said == refused(stored / "pytorch_model.bin")
    command = said.partition("Convert it once: python ")[2].partition(" and give ")[0]
    subprocess.run([sys.executable, *shlex.split(command)], check=True)
    assert all(torch.equal(loaded(stored)[name], value) for name, value in values().items())


def test_a_script_is_warned_of_what_was_taken(stored: Path) -> None:
    made = replace(
        job(Weights(stored, new="classifier.*"), lambda: Model(classes=5)),
        steps=1,
        data=lambda: [torch.ones(2, 4)] * 2,
        forward=lambda model, batch: model.classifier(batch),
        loss=lambda output, batch: output.sum(),
    )
    with pytest.warns(
        UserWarning,
        match=r"6 weights are those of .*; new: classifier.weight, classifier.bias; left in the files: classif",
    ):
        list(shoestring.train(made))


def test_what_was_taken_is_an_event_of_the_run_and_a_line_of_the_plan(tmp_path: Path) -> None:
    save_file(
        {"base.0.weight": torch.ones(4, 4), "base.0.bias": torch.ones(4), "old": torch.ones(1)},
        tmp_path / "base.safetensors",
    )
    (tmp_path / "job.py").write_text(JOB)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoestring", *words], cwd=tmp_path, capture_output=True, text=True, timeout=HUNG
        )

    wanted = "2 weights are those of base.safetensors (base. there, no prefix in the model); new: 2.weight, 2.bias; left in the files: old"
    planned = command("plan", "job.py", "--use", "FusedOptimizer()", "--save", "plan.json")
    assert f"weights: {wanted}" in planned.stdout, planned.stderr
    assert command("train", "job.py", "--plan", "plan.json", "--run", "a").returncode == 0
    assert [event["text"] for event in records(tmp_path / "a") if event["event"] == "warning"] == [wanted]
    refused = command("plan", "job.py", "--use", "FusedOptimizer()", "--head", "nothing")
    assert refused.returncode == 2 and "write weights=shoestring.Weights(" in refused.stderr
