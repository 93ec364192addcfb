from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.devices.records import Records, records_of
from shoestring.federated.round import DeviceView, Objective, Order, Updates
from shoestring.federated.techniques.behaviour.flip_classes import FlippedSamples, flip_classes
from shoestring.federated.techniques.behaviour.malicious import Malicious, is_malicious
from tests.federated.techniques.behaviour.small import CLASSES, COUNTS, SEED, Small, clients, job
from tests.federated.techniques.local_training.toy import COST

SHARE = 0.5
HARMFUL = [is_malicious(SHARE, SEED, name) for name in COUNTS]


def found(*techniques: Malicious, number: int = 0, names: tuple[str, ...] = tuple(COUNTS)) -> Updates:
    small = Small(techniques)
    devices = [DeviceView(records_of(small.job, name, clients()[name], SEED)) for name in names]
    return small.parts.work(small.order(number, judges=True), devices, Objective(small.job.local))


def test_the_devices_of_these_tests_are_of_both_kinds() -> None:
    assert any(HARMFUL) and not all(HARMFUL)


def test_as_many_are_malicious_as_is_said_and_more_of_them_are_the_same_and_others() -> None:
    names = [f"n{number}" for number in range(3000)]
    few, many = ({name for name in names if is_malicious(share, 1, name)} for share in (0.2, 0.4))
    assert (
        len(few) / 3000 == pytest.approx(0.2, abs=0.03)
        and len(many) / 3000 == pytest.approx(0.4, abs=0.03)
        and few < many
    )
    assert not any(is_malicious(0.0, 1, name) for name in names[:100]) and all(
        is_malicious(1.0, 1, name) for name in names[:100]
    )


@pytest.mark.parametrize(
    "technique", [Malicious(SHARE, attack) for attack in ("sign-flip", "label-flip", "noise", "replacement")]
)
def test_honest_rows_keep_their_bits_and_malicious_ones_do_not(technique: Malicious) -> None:
    for number in range(2):
        plain, attacked = found(number=number), found(technique, number=number)
        for place, harm in enumerate(HARMFUL):
            assert torch.equal(plain.rows[place], attacked.rows[place]) == (not harm)
            alone = found(technique, number=number, names=(list(COUNTS)[place],))
            assert torch.equal(alone.rows[0], attacked.rows[place])


def test_a_flipped_sign_is_strength_times_the_opposite() -> None:
    plain, attacked = found(), found(Malicious(SHARE, "sign-flip", 2.5))
    for place, harm in enumerate(HARMFUL):
        assert torch.equal(attacked.rows[place], (-2.5 if harm else 1.0) * plain.rows[place])


def test_noise_is_as_long_as_the_update_and_another_in_every_round_and_on_every_device() -> None:
    plain, attacked = found(), found(Malicious(1.0, "noise", 3.0))
    size = plain.rows.shape[1]
    lengths = attacked.rows.norm(dim=1) / (3.0 * plain.rows.norm(dim=1))
    assert torch.allclose(lengths, torch.ones(len(COUNTS)), atol=4 / (2 * size) ** 0.5)
    whole = torch.cat([attacked.rows, found(Malicious(1.0, "noise", 3.0), number=1).rows])
    angles = nn.functional.normalize(whole) @ nn.functional.normalize(torch.cat([whole, plain.rows])).mT
    assert float((angles - torch.eye(len(whole), angles.shape[1])).abs().max()) < 0.5
    zero = Malicious(1.0, "noise").attack_row(torch.zeros(4), Order(SEED, 0, torch.zeros(4)), "ada")
    assert torch.equal(zero, torch.zeros(4))


def trained_on_flipped(name: str) -> Tensor:
    """What a device finds on a copy of its records, in which the classes that it trains on are flipped one by one."""
    small, data = Small(), clients()[name]
    records = records_of(small.job, name, data, SEED)
    inputs, targets = (tensor.clone() for tensor in data.tensors)
    for place in records.trained.tolist():
        targets[place] = CLASSES - 1 - targets[place]
    device = DeviceView(replace(records, data=TensorDataset(inputs, targets)))
    return small.parts.work(small.order(), [device], Objective(small.job.local)).rows[0]


def test_flipped_classes_and_replacement_are_training_on_flipped_classes() -> None:
    flip, replaced = found(Malicious(SHARE, "label-flip")), found(Malicious(SHARE, "replacement", 7.0))
    for place, name in enumerate(COUNTS):
        if HARMFUL[place]:
            assert torch.equal(flip.rows[place], trained_on_flipped(name))
            assert torch.equal(replaced.rows[place], 7.0 * trained_on_flipped(name))


def test_what_a_device_is_judged_by_is_not_flipped() -> None:
    assert found(Malicious(1.0, "label-flip")).before == found().before


def test_enough_strength_replaces_the_mean() -> None:
    """One attacker of n devices of equal count, honest ones that found nothing: strength n gives the attacker's weights."""
    rows = torch.zeros(4, 6)
    rows[2] = torch.arange(6.0)
    sent = Malicious(1.0, "replacement", 4.0).attack_row(rows[2], Order(SEED, 0, rows[0]), "ada")
    assert torch.allclose(torch.stack([rows[0], rows[1], sent, rows[3]]).mean(0), torch.arange(6.0))


class Ragged(Dataset[tuple[list[int], int]]):
    """Samples that do not stack."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> tuple[list[int], int]:
        return [1] * (place + 1), place % 3


def test_samples_that_do_not_stack_are_flipped_when_they_are_asked_for() -> None:
    records = Records("ada", Ragged(), torch.tensor([0, 1, 4]), torch.tensor([2, 3]), collate=list)
    changed = flip_classes(records, 3).data
    assert isinstance(changed, FlippedSamples)
    assert [changed[place][1] for place in range(5)] == [2, 1, 2, 0, 1] and changed[1][0] == [1, 1]
    with pytest.raises(Mistake, match="not from 0 to 0, as Malicious expects"):
        flip_classes(records, 1).data[1]


def test_a_job_whose_samples_have_no_class_is_refused_though_most_devices_are_honest() -> None:
    records = {name: TensorDataset(torch.randn(6, 5), torch.rand(6, CLASSES)) for name in COUNTS}
    with pytest.raises(Mistake, match=r"no \(input, class\) pairs"):
        Small((Malicious(0.1, "label-flip"),), records=records).round()
    with pytest.raises(Mistake, match=r"classes=…"):
        Small((Malicious(0.1, "label-flip", classes=2),)).round()
    assert len(Small((Malicious(0.1, "sign-flip"),), records=records).round().participants) == 4


def test_a_device_of_one_sample_can_be_malicious() -> None:
    records = {"ada": TensorDataset(torch.randn(1, 5), torch.tensor([1]))}
    one = records_of(job(), "ada", records["ada"], SEED)
    assert flip_classes(one, CLASSES).data[0][1] == CLASSES - 2


def test_knobs_that_mean_nothing_are_refused() -> None:
    for make in (
        lambda: Malicious(1.5),
        lambda: Malicious(attack="rude"),
        lambda: Malicious(strength=-1.0),
        lambda: Malicious(attack="label-flip", strength=2.0),
        lambda: Malicious(classes=1),
    ):
        with pytest.raises(Mistake, match="in Malicious"):
            make()
    assert Malicious(0.0).exactness(COST) is Exactness.BITS and Malicious().exactness(COST) is Exactness.CHANGED
