"""Weights alone, with a job that makes their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoestring
from shoestring import Job
from shoestring.commands.main import run
from shoestring.core.errors import Mistake
from shoestring.core.model.weights import Weights


def job() -> Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)) for _ in range(12)]
    return Job(model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), data=lambda: data)


def test_a_safetensors_file_is_compressed_with_the_job_that_makes_its_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained = job().model()
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    for source in (tmp_path / "model.safetensors", tmp_path / "model.pt", tmp_path):
        small = shoestring.compress(source, tmp_path / f"small-{source.suffix}", use=["Half()"], job=job())
        x = torch.randn(5, 16)
        assert torch.allclose(small.model(x), trained(x), atol=1e-2) and not torch.allclose(
            small.model(x), job().model()(x), atol=1e-2
        )


def test_weights_that_do_not_fit_are_named_and_pickles_and_missing_jobs_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = job().model().state_dict()
    save_file(state | {"0.weight": torch.zeros(32, 15)}, tmp_path / "other.safetensors")
    with pytest.raises(Mistake, match=r"0\.weight"):
        shoestring.compress(tmp_path / "other.safetensors", tmp_path / "small", use=["Half()"], job=job())
    torch.save(job().model(), tmp_path / "model.pt")
    torch.save({name: one for name, one in state.items() if name != "2.bias"}, tmp_path / "short.pt")
    torch.save(state, tmp_path / "whole.pt")
    with ZipFile(tmp_path / "whole.pt") as whole, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    for name, said in (
        ("model.pt", "pickle, because it can run code"),
        ("short.pt", r"has no 2\.bias"),
        ("packed.pt", "has compressed parts"),
    ):
        with pytest.raises(Mistake, match=said):
            shoestring.compress(tmp_path / name, tmp_path / "small", use=["Half()"], job=job())
    with pytest.raises(Mistake, match="give job="):
        shoestring.compress(tmp_path / "other.safetensors", tmp_path / "small", use=["Half()"])
    assert (
        run(["compress", str(tmp_path / "other.safetensors"), "--size", "1MB"]) == 2
        and "--job FILE" in capsys.readouterr().err
    )


def test_a_model_that_is_given_takes_the_weights_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained, mine = job().model(), job().model()
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    x = torch.randn(5, 16)
    before = mine(x)
    for name in ("w.safetensors", "w.pt"):
        data_alone = Job(model=lambda: nn.Linear(2, 2), data=job().data)
        small = shoestring.compress(
            tmp_path / name, tmp_path / f"small-{name}", use=["Half()"], job=data_alone, model=mine
        )
        assert torch.allclose(small.model(x), trained(x), atol=1e-2) and torch.equal(mine(x), before), (
            "the user's own stays as it is"
        )
    with pytest.raises(Mistake, match=r"weight"):
        shoestring.compress(
            tmp_path / "w.safetensors", tmp_path / "other", use=["Half()"], job=job(), model=nn.Linear(16, 5)
        )


def test_names_are_changed_as_the_jobs_own_weights_say_and_what_is_left_or_new_is_told(tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained, x = job().model(), torch.randn(5, 16)
    stored = {f"body.{name}": one for name, one in trained.state_dict().items()}
    save_file(stored | {"other": torch.zeros(3)}, tmp_path / "w.safetensors")
    with pytest.raises(Mistake, match=r"remove_prefix='body\.'"):
        shoestring.compress(tmp_path / "w.safetensors", tmp_path / "small", use=["Half()"], job=job())
    renaming = Job(model=job().model, data=job().data, weights=Weights("elsewhere", remove_prefix="body."))
    small = shoestring.compress(tmp_path / "w.safetensors", tmp_path / "small", use=["Half()"], job=renaming)
    assert torch.allclose(small.model(x), trained(x), atol=1e-2)
    assert any("left in the files: other" in note for note in small.report["notes"])


JOB = """
import torch, shoestring
from transformers import AutoConfig, GPT2LMHeadModel

def job():
    config = AutoConfig.from_pretrained({folder!r}, local_files_only=True)
    draw = torch.Generator().manual_seed(0)
    data = [dict(input_ids=torch.randint(0, 60, (8, 12), generator=draw)) for _ in range(12)]
    return shoestring.Job(model=lambda: GPT2LMHeadModel(config), data=data)
"""


def test_a_sharded_hugging_face_folder_and_a_state_dict_are_compressed_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    ).eval()  # its head is tied
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    torch.save(model.state_dict(), tmp_path / "hf.pt")
    (tmp_path / "job.py").write_text(JOB.format(folder=str(tmp_path / "hf")))
    ids = torch.randint(0, 60, (2, 12))
    for number, source in enumerate(
        (tmp_path / "hf", tmp_path / "hf" / "model.safetensors.index.json", tmp_path / "hf.pt")
    ):
        out = tmp_path / f"small-{number}"
        assert (
            run(
                [
                    "compress",
                    str(source),
                    "--job",
                    str(tmp_path / "job.py"),
                    "--use",
                    "Half()",
                    "--out",
                    str(out),
                    "--json",
                ]
            )
            == 0
        )
        assert json.loads(capsys.readouterr().out)["fidelity"]["mean"]["measured"] > 0.999
        small = shoestring.load(out, job=tmp_path / "job.py")
        assert torch.allclose(small(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-2)
    assert run(["compress", str(tmp_path / "hf"), "--size", "1MB"]) == 2
    said = capsys.readouterr().err
    assert (
        f"AutoConfig.from_pretrained({str(tmp_path / 'hf')!r}" in said and "lambda: GPT2LMHeadModel(config)" in said
    ), "the job to write"


def test_a_config_can_put_no_code_into_the_job_that_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    for text in (
        '{"architectures": ["x; import os"]}',
        '{"architectures": "\\u001b[2J"}',
        "[" * 100_000,
        "{}",
        '{"architectures": []}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert run(["compress", str(tmp_path), "--size", "1MB"]) == 2
        said = capsys.readouterr().err
        assert "MyModel(...)" in said and "import os" not in said and "\x1b[2J" not in said


def test_a_folder_with_pickles_alone_is_told_to_name_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    torch.save(job().model().state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "job.py").write_text(JOB.format(folder=str(tmp_path / "hf")))
    assert run(["compress", str(tmp_path / "hf"), "--job", str(tmp_path / "job.py"), "--size", "1MB"]) == 2
    assert "pytorch_model.bin" in capsys.readouterr().err


PLAIN = """
import torch, shoestring
from torch import nn

def job(width: int = 32):
    data = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(12)]
    return shoestring.Job(model=lambda: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)), data=data)
"""


def test_the_command_names_what_does_not_fit_and_takes_flags_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(PLAIN)
    state = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4)).state_dict()
    other = {name.replace("2.", "head."): one for name, one in state.items()}
    for end, save in ((".safetensors", save_file), (".pt", torch.save)):
        save(state, tmp_path / f"w{end}")
        save(other, tmp_path / f"other{end}")
        words = ["--job", str(tmp_path / "job.py"), "--use", "Half()", "--out", str(tmp_path / f"small{end}")]
        for source, flag, said in (
            (f"w{end}", "32", "0."),
            (f"other{end}", "24", "2."),
            (f"lost{end}", "24", f"lost{end}"),
        ):
            assert run(["compress", str(tmp_path / source), *words, "--width", flag]) == 2
            error = capsys.readouterr().err
            assert said in error and "Traceback" not in error
        assert run(["compress", str(tmp_path / f"w{end}"), *words, "--width", "24"]) == 0
        assert capsys.readouterr().out


def test_python_is_told_the_same_of_whole_modules_as_the_command_line(tmp_path: Path) -> None:
    torch.save(job().model(), tmp_path / "model.pt")
    with pytest.raises(Mistake, match=r"UnpicklingError: [\w ]+\), and nothing else is read from a pickle") as told:
        shoestring.compress(tmp_path / "model.pt", tmp_path / "small", use=["Half()"], job=job())
    assert "\x1b" not in str(told.value), "torch's advice has parts in bold"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.body(self.words(x)).relu()))


def checkpoints(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """State dicts as people have them."""
    wrapped = {f"module._orig_mod.{name}": one for name, one in state.items()}
    return {
        "alone": state,
        "wrapped": wrapped,
        "untied": {name: one for name, one in state.items() if name != "head.weight"},
        "checkpoint": {
            "model": wrapped,
            "optimizer": {"state": {0: {"step": 3}}},
            "scaler": {"scale": state["body.bias"]},
        },
        "lightning": {
            "state_dict": {f"model.{name}": one for name, one in state.items()},
            "epoch": 3,
            "hyper_parameters": {"lr": 0.1},
        },
    }


@pytest.mark.parametrize("kind", ["alone", "wrapped", "untied", "checkpoint", "lightning"])
def test_state_dicts_are_found_in_checkpoints_and_without_the_prefix_of_wrappers(tmp_path: Path, kind: str) -> None:
    job = Job(
        model=Tied, data=[torch.randint(0, 9, (16, 5)) for _ in range(12)], forward=lambda model, batch: model(batch)
    )
    trained = Tied()
    torch.save(checkpoints(trained.state_dict())[kind], tmp_path / "a.pt")
    small = shoestring.compress(tmp_path / "a.pt", tmp_path / "small", job=job, use=["Half()"])
    said = small.model(torch.arange(9)[None])
    assert torch.allclose(said, trained(torch.arange(9)[None]), atol=1e-2)
    told = " ".join(small.report["notes"])
    assert ("under" in told) == (kind in ("checkpoint", "lightning")) and ("begin with" in told) == (
        kind not in ("alone", "untied")
    )


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"model": Tied().state_dict(), "ema": Tied().state_dict()}, "with model, ema in it"),
        ({"model": {"model.words.weight": torch.zeros(9, 6)}}, "has no body.bias"),
        ({"module.words.weight": torch.zeros(9, 6), "extra.words.weight": torch.zeros(9, 6)}, "has no body.bias"),
        ({}, "holds no state dict"),
        ([torch.zeros(3)], "holds no state dict, but a list"),
    ],
)
def test_state_dicts_that_are_not_clear_are_refused(tmp_path: Path, held: Any, said: str) -> None:
    torch.save(held, tmp_path / "a.pt")
    job = Job(
        model=Tied, data=[torch.randint(0, 9, (16, 5)) for _ in range(12)], forward=lambda model, batch: model(batch)
    )
    with pytest.raises(Mistake, match=said):
        shoestring.compress(tmp_path / "a.pt", tmp_path / "small", job=job, use=["Half()"])
