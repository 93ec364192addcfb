"""LowRank trains what PEFT's LoRA trains, leaves nothing behind, and is exact in everything else: memory, restarts, other techniques."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import shoestring
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import bring_home, digest_state, weights
from shoestring.core.technique import parse_technique, text
from shoestring.core.user_code.blame import blame_for
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.runs.checkpoints.checkpoints import draft, publish
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import WeightsExport, checkpoint_of
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.execution.snapshot import restore, snapshot_of
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.adapter_folder import export_adapter
from shoestring.training.memory.adapters.adapters import Adapters
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.plan import training_plan
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import job, seeded
from tests.records import records
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")


def adapters(run: Run) -> Adapters:
    found = run.state["low rank"]
    assert isinstance(found, Adapters)
    return found


def values(one: Any) -> Tensor:
    return one if isinstance(one, Tensor) else torch.cat(list(one.pieces())).view(one.shape)


# The same as PEFT


def calm(name: str) -> Job:
    """A job of these models without dropout, which PEFT's steps and ours would have to draw in the same order."""

    def model() -> nn.Module:
        made = job(name).model()
        for part in made.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return made

    return replace(job(name), model=model, clip=1.0, optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2))


@pytest.mark.parametrize(("name", "where"), [("llama", "*.q_proj|*.v_proj"), ("gpt2", "*.c_attn|*.c_fc")])
def test_the_updates_are_those_of_peft(name: str, where: str) -> None:
    made = calm(name)
    run = build_run(made, (LowRank(rank=4, where=where, alpha=8),), seeded(made))
    ours = adapters(run)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ours.updates), fan_in_fan_out=name == "gpt2")
    theirs = peft.get_peft_model(seeded(made), config)  # type: ignore[arg-type]
    named = {
        path.removeprefix("base_model.model.").replace(".default", ""): one
        for path, one in theirs.named_parameters()
        if one.requires_grad
    }
    for path, update in ours.updates.items():
        named[f"{path}.lora_A.weight"].data.copy_(update.a)
        named[f"{path}.lora_B.weight"].data.copy_(update.b)
    assert len(named) == 2 * len(ours.updates)
    optimizer, theirs_losses = made.optimizer(list(named.values())), []
    theirs.train()
    for batch in islice(Feed(made), 4):
        optimizer.zero_grad()
        loss = theirs(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(list(named.values()), 1.0)
        optimizer.step()
        theirs_losses.append(loss.item())
    assert [float(loss) for loss in steps(run, islice(Feed(made), 4))] == pytest.approx(theirs_losses, rel=1e-6)
    for path, update in ours.updates.items():
        torch.testing.assert_close(update.a, named[f"{path}.lora_A.weight"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(update.b, named[f"{path}.lora_B.weight"], rtol=1e-4, atol=1e-6)
        assert update.b.abs().max() > 0
    whole = theirs.merge_and_unload().state_dict()
    for key, value in weights(run).items():
        torch.testing.assert_close(values(value), whole[key], rtol=1e-4, atol=1e-6)


# Beside other techniques

PLANS: list[tuple[Technique, ...]] = [
    (),
    (Accumulate(2),),
    (Checkpoint(every=1),),
    (Checkpoint(every=2), FusedOptimizer()),
    (OffloadActivations(),),
    (OffloadOptimizer(),),
    (Checkpoint(every=1), StepInBackward()),
    (OffloadModel(),),
    (Precision("bf16"),),
    (Precision("fp16"), Checkpoint(every=1)),
    (Precision("bf16", "bf16"), FusedOptimizer()),
]


def after(techniques: tuple[Technique, ...], made: Job) -> dict[str, Tensor]:
    model = seeded(made)
    run = build_run(made, techniques, model)
    for _ in steps(run, islice(Feed(made), 4)):
        pass
    bring_home(run)
    return {name: value.float() for name, value in model.state_dict().items()}


@cache
def alone() -> dict[str, Tensor]:
    return after((LOW,), calm("llama"))


LOW = LowRank(rank=2, also="lm_head")


@pytest.mark.parametrize("others", PLANS, ids=lambda plan: " ".join(map(text, plan)) or "alone")
def test_beside_others_it_trains_the_same_in_the_bytes_that_were_rehearsed(others: tuple[Technique, ...]) -> None:
    made, plan = calm("llama"), (LOW, *others)
    if any(type(one) in (StepInBackward, OffloadModel) for one in others):  # as ever, these can't clip
        made = replace(made, clip=0.0)
    predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
    assert peak(predicted).bytes == peak(measured).bytes and predicted.moved == measured.moved
    assert predicted.flops.total() == measured.flops.total()
    found, wanted = after(plan, made), alone() if made.clip else after((LOW,), made)
    inexact = any(isinstance(one, Precision) for one in others)
    rounded = any(type(one) in (Accumulate, FusedOptimizer) for one in others)
    for name, value in wanted.items():
        most = float((found[name] - value).abs().max())
        assert most <= (0.05 if inexact else 1e-4 if rounded else 0.0), name


def test_a_weight_that_stream_brings_by_rows_gets_its_update_and_frozen_ones_are_read_and_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that is larger than all blocks, in ranges of 64 rows."""
    monkeypatch.setattr("shoestring.training.memory.offload.row_split.CHUNK", 64 * 128)
    batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    made = Job(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)), nn.Linear(128, 400)
        ),
        data=lambda: [batch] * 9,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    )
    plan = (LowRank(rank=2), OffloadModel())
    model = seeded(made)
    run = build_run(made, plan, model)
    streaming: Any = run.state["stream"]
    assert len(next(iter(streaming.row_splits.values())).spans) > 1
    written = {name: region.version for name, region in streaming.store.regions.items()}
    for _ in steps(run, islice(Feed(made), 5)):
        pass
    assert {name: region.version for name, region in streaming.store.regions.items()} == written
    with torch.no_grad(), run.outside.usable():
        used = model(batch[0])
    bring_home(run)
    torch.testing.assert_close(model(batch[0]), used, rtol=1e-4, atol=1e-6)
    wanted: Any = seeded(made)
    alone = build_run(made, plan[:1], wanted)
    for _ in steps(alone, islice(Feed(made), 5)):
        pass
    bring_home(alone)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(wanted[6].weight, seeded(made).state_dict()["6.weight"], atol=1e-3)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert 0 < rehearse(made, plan).moved[-1] <= 2.1 * size and rehearse(made, plan[1:]).moved[-1] >= 6 * size, (
        "8 bytes a weight, not 28"
    )


def test_clipping_is_by_the_norm_of_what_is_trained() -> None:
    made = replace(calm("llama"), clip=1e-3, optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0))
    run = build_run(made, (LowRank(rank=2),), seeded(made))
    before = [one.detach().clone() for one in adapters(run).trainable]
    for _ in steps(run, islice(Feed(made), 1)):
        pass
    moved = torch.cat(
        [(one - old).detach().reshape(-1) for one, old in zip(adapters(run).trainable, before, strict=True)]
    )
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


# What it leaves behind, and what it refuses


def test_nothing_is_left_behind_on_the_model() -> None:
    made = calm("llama")
    model = seeded(made)
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    *_, last = shoestring.train(replace(made, steps=3), [LowRank(rank=2, where="*.q_proj")], model)
    assert last.number == 3
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, begun[name])]
    assert changed and all(name.endswith("q_proj.weight") for name in changed), "the updates are in the weights"
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_a_is_the_same_for_a_seed_and_a_name_whoever_else_has_one_and_draws_nothing_from_the_job() -> None:
    made = calm("llama")

    def first(technique: LowRank, seed: int = 0) -> Tensor:
        return next(iter(adapters(build_run(replace(made, seed=seed), (technique,), seeded(made))).updates.values())).a

    state = torch.get_rng_state()
    one = first(LowRank(rank=2))
    assert torch.equal(one, first(LowRank(rank=2, where="*.q_proj"))) and not torch.equal(
        one, first(LowRank(rank=2), seed=1)
    )
    torch.set_rng_state(state)
    model = seeded(made)
    torch.manual_seed(5)
    build_run(made, (LowRank(),), model)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


class Bypassing(nn.Module):
    def __init__(self, shared: bool = False, evaluating: bool = False) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.evaluating = evaluating
        if shared:
            self.head.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if self.training and self.evaluating:
            return self.head(found)  # type: ignore[no-any-return]
        return nn.functional.linear(found, self.head.weight)


def small(model: Any, **more: Any) -> Job:
    return Job(model=model, data=lambda: [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))] * 4, **more)


def trained(made: Job, technique: Technique) -> Run:
    run = build_run(made, (technique,), seeded(made))
    list(steps(run, islice(Feed(made), 2)))
    return run


def test_a_weight_that_is_used_without_its_module_is_refused_in_training_and_in_evaluation() -> None:
    with pytest.raises(Mistake, match="uses the weight of head without calling that module"):
        trained(small(Bypassing), LowRank())
    trained(small(Bypassing), LowRank(where="inner"))
    run = trained(small(lambda: Bypassing(evaluating=True)), LowRank())
    run.model.eval()
    with pytest.raises(Mistake, match="uses the weight of head"), torch.no_grad(), run.outside.usable():
        run.model(torch.ones(4, 8))


def test_torchs_encoder_layers_evaluate_with_their_updates() -> None:
    made = small(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        forward=lambda model, batch: model(batch[0][None])[0],
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
    )
    run = trained(made, LowRank(rank=2))
    assert list(adapters(run).updates) == ["linear1", "linear2"] and "self_attn.out_proj" in adapters(run).left
    run.model.eval()
    x = torch.randn(1, 4, 8)
    with torch.no_grad(), run.outside.usable():
        used = run.model(x)
    with torch.no_grad():
        assert not torch.allclose(used, run.model(x), atol=1e-4), "without them it is another model"
        bring_home(run)
        torch.testing.assert_close(used, run.model(x), rtol=1e-4, atol=1e-5)


def test_what_can_not_be_updated_is_refused_and_what_is_left_out_is_told() -> None:
    with pytest.raises(
        Mistake, match=r"finds no weight to update: linear layers are inner, head. A pattern is of the whole name"
    ):
        build_run(small(Bypassing), (LowRank(where="in"),), seeded(small(Bypassing)))
    shared = small(lambda: Bypassing(shared=True))
    with pytest.raises(Mistake, match="inner shares its weight with another module"):
        build_run(shared, (LowRank(),), seeded(shared))
    with pytest.raises(Mistake, match="is the name of no weight of the model"):
        build_run(small(Bypassing), (LowRank(also="classifier"),), seeded(small(Bypassing)))
    for wrong in ({"rank": 0}, {"where": ""}, {"alpha": -1.0}):
        with pytest.raises(Mistake):
            LowRank(**wrong)  # type: ignore[arg-type]
    assert conflict((LowRank(), Shard())) and not conflict((LowRank(), OffloadModel()))
    made = calm("gpt2")
    told = adapters(build_run(made, (LowRank(),), seeded(made))).remark
    assert (
        "lm_head shares its weight with another module" in told
        and "The SHA-256 of the weights is of what is trained" in told
    )


def test_a_layer_that_fails_under_an_update_is_the_jobs_and_not_ours() -> None:
    made = small(lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(9, 8))))
    for plan in ((LowRank(),), (LowRank(), Checkpoint(every=1))):
        with pytest.raises(RuntimeError) as found:
            list(steps(build_run(made, plan, seeded(made)), islice(Feed(made), 1)))
        told = blame_for(found.value)
        assert not told.ours and told.place == "its model, in the module 1.0 (Linear)"
        assert told.library.startswith("linear.py line")


def test_workers_send_the_gradients_of_what_is_trained_and_of_nothing_else() -> None:
    made = replace(calm("llama"), mesh=on_one_axis(Link(0, 2)))
    run = build_run(made, (LowRank(rank=2),), seeded(made))
    trained_bytes = sum(4 * parameter.numel() for parameter in adapters(run).trainable)
    sent = rehearse(made, (LowRank(rank=2), DataParallel())).sent[-1]
    assert trained_bytes <= sent <= trained_bytes + 2000, "and a few bytes a weight"


def test_it_is_written_and_read_like_any_technique_and_never_chosen_by_itself() -> None:
    for written in ("LowRank()", "LowRank(rank=4, where='*.q|*.v')", "LowRank(where=('*.q', '*.v'), also='head')"):
        made = parse_technique(written, CATALOGUE)
        assert parse_technique(text(made), CATALOGUE) == made and hash(made)
    assert LowRank(where=("a", "b")) == LowRank(where="a|b")  # type: ignore[arg-type]
    plan = training_plan((LowRank(where=("a", "b")),))  # type: ignore[arg-type]
    assert LowRank.choices(None) == () and "a|b" in json.dumps(plan.as_json())  # type: ignore[arg-type]


def test_updates_are_in_the_group_of_their_weight_and_every_kind_of_optimizer_takes_them() -> None:
    made = small(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    for kind in (
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adafactor,
        shoestring.Lamb,
    ):

        def two(weights: list[nn.Parameter], kind: Any = kind) -> torch.optim.Optimizer:
            return kind([{"params": weights[:2], "lr": 0.0}, {"params": weights[2:], "lr": 0.1}])  # type: ignore[no-any-return]

        run = trained(replace(made, optimizer=two), LowRank(rank=2, also="2.bias"))
        first, second = adapters(run).updates["0"], adapters(run).updates["2"]
        groups = [group["params"] for group in run.optimizer.param_groups]
        assert list(map(len, groups)) == [2, 3] and groups[0][0] is first.a and groups[1][0] is second.a
        assert not first.b.any() and second.b.any(), kind
        one = trained(replace(made, optimizer=two), LowRank(rank=2, where="2"))  # a group that is left empty
        assert adapters(one).updates["2"].b.any()


@pytest.mark.parametrize(
    "others", [(), (Checkpoint(every=1), FusedOptimizer()), (OffloadModel(),), (Precision("fp16"),)], ids=str
)
def test_a_run_put_back_goes_on_with_the_same_bits(others: tuple[Technique, ...], tmp_path: Path) -> None:
    """With a block and its dropout that are trained as they are, so that OffloadModel writes some of its weights."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 2100), nn.Dropout(0.1), nn.Linear(2100, 8))

    made = small(lambda: nn.Sequential(*(block() for _ in range(4)), nn.Linear(8, 4)))
    plan = (LowRank(rank=2, also="1"), *others)

    def begun(place: Path, resumed: bool = False) -> tuple[Run, Feed]:
        place.mkdir(exist_ok=True)
        random_state.seed(7)
        return build_run(made, plan, seeded(made), place, resumed), Feed(made)

    def some(run: Run, feed: Feed, count: int) -> list[float]:
        return [float(loss) for loss, _ in zip(steps(run, feed), range(count), strict=False)]

    whole, feed = begun(tmp_path / "whole")
    losses = some(whole, feed, 4)
    first, first_feed = begun(tmp_path / "a")
    training = steps(first, first_feed)
    found = [float(next(training)) for _ in range(2)]
    shot = snapshot_of(first, first_feed, 2, None)
    checkpoint, _ = publish(draft(tmp_path / "a" / "checkpoints", 2, shot.weights, shot.state, shot.aliases))
    random_state.seed(99)
    again, again_feed = begun(tmp_path / "a", resumed=True)
    restore(checkpoint, again, again_feed)
    assert found + some(again, again_feed, 2) == losses
    assert weights_sha256(digest_state(again)) == weights_sha256(digest_state(whole)) and weights_sha256(
        weights(again)
    ) == weights_sha256(weights(whole))
    other = build_run(made, (LowRank(rank=4, also="1"), *others), seeded(made), tmp_path / "a", True)
    with pytest.raises(Mistake, match="the checkpoint has updates of rank 2"):
        other.state["low rank"].load_state_dict(checkpoint.state()["parts"]["low rank"])


# A run by the command, and what it leaves behind

JOB = """
import os
import torch, transformers
from shoestring import Job

def job(steps: int = 4) -> Job:
    ids = torch.arange(32).reshape(2, 16)
    made = lambda: transformers.AutoModelForSequenceClassification.from_pretrained(os.path.join(os.path.dirname(__file__), "base"))
    return Job(model=made, data=lambda: [{"input_ids": ids, "labels": torch.tensor([0, 1])}] * 9, steps=steps,
               optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2))
"""


def command(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoestring", *words], cwd=place, capture_output=True, text=True, timeout=HUNG
    )


def test_a_run_is_exported_with_its_updates_and_for_peft_and_is_refused_under_another_plan(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    (tmp_path / "job.py").write_text(JOB)
    training_plan((LowRank(rank=4, where="*.query|*.value", also="classifier"),)).save(tmp_path / "plan.json")
    done = command(tmp_path, "train", "job.py", "--plan", "plan.json", "--run", "a", "--json")
    assert done.returncode == 0, done.stderr
    assert any(
        "LowRank trains updates of rank 4 of 4 weights and 2 weights as they are" in event.get("text", "")
        for event in records(tmp_path / "a")
    )
    for kind in ("safetensors", "hf", "peft"):
        out = command(tmp_path, "export", "a", "--job", "job.py", "--to", kind, "--out", kind)
        assert out.returncode == 0, out.stderr

    def base() -> Any:
        return transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()

    ids = torch.arange(48).reshape(3, 16) % 50
    with torch.no_grad():
        merged = base()
        merged.load_state_dict(load_file(tmp_path / "safetensors"), strict=True)
        wanted = merged(input_ids=ids).logits
        assert torch.equal(
            transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
            .eval()(input_ids=ids)
            .logits,
            wanted,
        )
        adapted = peft.PeftModel.from_pretrained(base(), tmp_path / "peft").eval()
        torch.testing.assert_close(adapted(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(base()(input_ids=ids).logits, wanted, atol=1e-3)
    assert json.loads(done.stdout)["weights_sha256"] != weights_sha256(load_file(tmp_path / "safetensors"))

    training_plan((FusedOptimizer(),)).save(tmp_path / "plan.json")
    other = command(tmp_path, "train", "job.py", "--plan", "plan.json", "--run", "a", "--steps", "6", "--adopt")
    assert other.returncode == 2 and "low rank is trained beside the model's weights there or here" in other.stderr, (
        other.stderr
    )

    finished = checkpoint_of(Folder(Path(__file__).parents[3] / "golden" / "version-3" / "finished"), None)
    with pytest.raises(Mistake, match="the run trained the model's weights themselves"):
        export_adapter(WeightsExport(finished, lambda: calm("llama"), tmp_path / "none"))


def test_a_tied_weight_that_is_trained_as_it_is_may_be_given_by_any_of_its_names() -> None:
    made = calm("gpt2")
    for also in ("lm_head", "transformer.wte"):
        run = build_run(made, (LowRank(rank=2, where="*.c_attn", also=also),), seeded(made))
        assert (
            len(adapters(run).trainable) == 1 + 2 * len(adapters(run).updates)
            and len(adapters(run).state_dict()["tied"]) == 1
        )
        assert [name for name, one in run.model.named_parameters() if one.requires_grad] == ["transformer.wte.weight"]


def test_the_digest_is_of_what_is_trained() -> None:
    made = calm("llama")
    run = trained(made, LowRank(rank=2, where="*.q_proj", also="lm_head"))
    names = set(digest_state(run))
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B", "weight"}
    assert [name for name in names if name.endswith(".weight")] == ["lm_head.weight"]
