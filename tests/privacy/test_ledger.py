"""The privacy ledger never forgets what was spent, whatever becomes of its file, and adds up over runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from binascii import crc32
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.privacy.account import QUICK, SampledGaussian, epsilon_of, epsilon_spent
from shoestring.privacy.ledger import NAME, WIDTH, PrivacyLedger, ReleasedRound, line_of

pytest.importorskip("dp_accounting")
WEAK = ReleasedRound("a" * 16, 0, "0" * 16, 8.0, 0.1, 1e-5)
STRONG = replace(WEAK, multiplier=4.0)  # it spends more


def ledger(folder: Path, *entries: ReleasedRound) -> Path:
    spending = PrivacyLedger(folder / NAME, WEAK.run)
    for one in entries:
        assert spending.spend(one)
    return folder / NAME


def opened(folder: Path, done: int = 0, lines: int = 0) -> PrivacyLedger:
    return PrivacyLedger(folder / NAME, WEAK.run, done, lines)


def rounds(count: int, kind: ReleasedRound = WEAK, start: int = 0) -> list[ReleasedRound]:
    return [replace(kind, round=number) for number in range(start, start + count)]


def test_what_is_spent_is_the_epsilon_of_its_rounds(tmp_path: Path) -> None:
    ledger(tmp_path, *rounds(3), *rounds(2, STRONG, 3))
    found = opened(tmp_path)
    kinds = ((SampledGaussian(8.0, 0.1), 3), (SampledGaussian(4.0, 0.1), 2))
    assert found.epsilon(exactly=True) == epsilon_spent(kinds, 1e-5)
    assert found.epsilon() == epsilon_spent(kinds, 1e-5, QUICK) >= found.epsilon(exactly=True)
    assert found.epsilon(1e-7) > found.epsilon() and found.delta == 1e-5


def test_nothing_is_spent_at_first(tmp_path: Path) -> None:
    assert opened(tmp_path).epsilon() == 0.0 and not (tmp_path / NAME).exists()


def test_a_round_played_again_counts_again(tmp_path: Path) -> None:
    """Even if it is the same in everything that a ledger knows of it: its noise was another one."""
    ledger(tmp_path, *rounds(2), *rounds(2))
    assert opened(tmp_path).epsilon() == opened(tmp_path).own_epsilon() == epsilon_of(8.0, 0.1, 4, 1e-5, QUICK)


def test_a_round_that_would_exceed_the_budget_is_known_before_it_is_played(tmp_path: Path) -> None:
    budget = epsilon_of(8.0, 0.1, 3, 1e-5)  # exactly three rounds, which the quick grid alone would say are too many
    spending = opened(tmp_path)
    assert not spending.would_exceed(WEAK, budget, rounds=3) and spending.would_exceed(WEAK, budget, rounds=4)
    for one in rounds(3):
        assert not spending.would_exceed(one, budget) and spending.spend(one, budget)
    for again in (spending, opened(tmp_path)):
        assert again.would_exceed(replace(WEAK, round=3), budget), "and after a restart, too"
        assert not again.spend(replace(WEAK, round=3), budget)
    assert len(opened(tmp_path).entries) == 3, "what is refused is not noted"


# A population


def test_several_runs_add_up_and_each_knows_its_own(tmp_path: Path) -> None:
    ledger(tmp_path, *rounds(3))
    other = PrivacyLedger(tmp_path / NAME, "b" * 16)
    for one in rounds(2, replace(STRONG, run="b" * 16)):
        assert other.spend(one, epsilon_of(4.0, 0.1, 2, 1e-5))
    kinds = ((SampledGaussian(8.0, 0.1), 3), (SampledGaussian(4.0, 0.1), 2))
    assert other.epsilon(exactly=True) == epsilon_spent(kinds, 1e-5) and other.runs == 2
    assert other.own_epsilon(exactly=True) == epsilon_of(4.0, 0.1, 2, 1e-5)


def test_all_runs_together_keep_within_what_the_population_may_spend(tmp_path: Path) -> None:
    limit = epsilon_of(8.0, 0.1, 5, 1e-5)
    ledger(tmp_path, replace(WEAK, limit=limit), *rounds(2, start=1))  # it is stated once
    other, mine = PrivacyLedger(tmp_path / NAME, "b" * 16), replace(WEAK, run="b" * 16)
    assert other.limit == limit
    assert other.would_exceed(mine, inf, rounds=3) and not other.would_exceed(mine, inf, rounds=2)
    assert [other.spend(replace(mine, round=number)) for number in range(3)] == [True, True, False]
    with pytest.raises(Mistake, match=r"promise that was made is not made larger"):
        other.would_exceed(replace(mine, limit=2 * limit), inf)
    assert other.would_exceed(replace(mine, limit=limit / 2), inf), "it may become smaller"


def spend_many(path: Path, run: str, count: int) -> None:
    spending = PrivacyLedger(path, run)
    for number in range(count):
        spending.spend(replace(WEAK, run=run, round=number), inf)


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=spend_many, args=(tmp_path / NAME, letter * 16, 20)) for letter in "bc"]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    found = opened(tmp_path)
    assert len(found.entries) == 40 and not found.damaged and found.lines == 40 and found.runs == 2


def test_what_another_run_spends_meanwhile_is_seen_before_a_round_is_noted(tmp_path: Path) -> None:
    limit = epsilon_of(8.0, 0.1, 2, 1e-5)
    first, second = (PrivacyLedger(tmp_path / NAME, letter * 16) for letter in "bc")
    entry = replace(WEAK, limit=limit)
    assert first.spend(replace(entry, run="b" * 16)) and first.spend(replace(entry, run="b" * 16, round=1))
    assert not second.spend(replace(entry, run="c" * 16)), "it looked before the others had spent anything"


def test_secret_noise_and_that_of_a_seed_are_not_added_up(tmp_path: Path) -> None:
    ledger(tmp_path, WEAK)
    with pytest.raises(Mistake, match="this run's noise follows from a seed"):
        opened(tmp_path).spend(replace(WEAK, seeded=True))
    (tmp_path / "tests").mkdir()
    ledger(tmp_path / "tests", replace(WEAK, seeded=True))
    with pytest.raises(Mistake, match="is not secret"):
        opened(tmp_path / "tests").spend(WEAK)


def test_a_ledger_of_the_version_before_whose_noise_followed_from_the_jobs_seed_is_not_gone_on_with(
    tmp_path: Path,
) -> None:
    import json
    from binascii import crc32

    head = json.dumps(
        {"round": 0, "digest": "a" * 32, "multiplier": 8.0, "rate": 0.1, "delta": 1e-5}, separators=(",", ":")
    ).encode()[:-1]
    head += b" " * (WIDTH - len(head) - 19)
    (tmp_path / NAME).write_bytes(head + b',"crc":"%08x"}\n' % crc32(head))
    found = opened(tmp_path)
    assert not found.damaged and found.entries[0].seeded and found.epsilon() > 0
    with pytest.raises(Mistake, match="is not secret"):
        found.spend(WEAK)


# Damage


def test_cut_off_anywhere_it_is_never_less_than_the_truth(tmp_path: Path) -> None:
    """The truth is that of the rounds that the run is known to have done; of the last line, that it was written at all."""
    whole = ledger(tmp_path, *rounds(2), *rounds(2, STRONG, 2)).read_bytes()
    truth = opened(tmp_path).epsilon()
    weak, strong = SampledGaussian(8.0, 0.1), SampledGaussian(4.0, 0.1)
    before = [epsilon_spent(((weak, min(count, 2)), (strong, max(count - 2, 0))), 1e-5, QUICK) for count in range(5)]
    for length in range(len(whole)):
        (tmp_path / NAME).write_bytes(whole[:length])
        assert opened(tmp_path).epsilon() >= before[length // WIDTH], length
        if length > 3 * WIDTH or length < WIDTH:  # a kind of which no line is left can't be known
            assert opened(tmp_path, done=4).epsilon() >= truth, length


def test_with_any_bit_flipped_it_is_never_less_than_the_truth(tmp_path: Path) -> None:
    whole = ledger(tmp_path, *rounds(2), *rounds(2, STRONG, 2)).read_bytes()
    truth = opened(tmp_path).epsilon()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        (tmp_path / NAME).write_bytes(bytes(broken))
        found = opened(tmp_path)
        assert found.damaged == 1 and found.epsilon() >= truth, place


def test_a_line_that_was_cut_out_is_counted(tmp_path: Path) -> None:
    whole = ledger(tmp_path, *rounds(4)).read_bytes()
    for cut in range(3):
        (tmp_path / NAME).write_bytes(whole[: cut * WIDTH] + whole[(cut + 1) * WIDTH :])
        found = opened(tmp_path)
        assert found.damaged == 1 and found.epsilon() == epsilon_of(8.0, 0.1, 4, 1e-5, QUICK), cut
        assert found.spend(replace(WEAK, round=4)) and found.damaged == 1, "and stays so"


def test_an_older_copy_is_known_to_who_has_seen_the_newer_one(tmp_path: Path) -> None:
    path = ledger(tmp_path, *rounds(2))
    older = path.read_bytes()
    ledger(tmp_path, *rounds(3, replace(WEAK, run="b" * 16)))
    seen = opened(tmp_path).lines
    path.write_bytes(older)
    found = opened(tmp_path, done=2, lines=seen)
    assert found.lost_rounds == 3 and found.epsilon() == epsilon_of(8.0, 0.1, 5, 1e-5, QUICK)


def test_after_a_torn_line_the_next_one_is_whole_and_the_torn_one_counts(tmp_path: Path) -> None:
    for left in (1, 100, WIDTH - 2):
        folder = tmp_path / str(left)
        folder.mkdir()
        path = ledger(folder, *rounds(3))
        path.write_bytes(path.read_bytes()[: 2 * WIDTH + left])
        spending = opened(folder)
        assert spending.spend(replace(WEAK, round=2))
        again = opened(folder)
        assert len(path.read_bytes()) == 4 * WIDTH and again.damaged == 1
        assert again.epsilon() == spending.epsilon() == epsilon_of(8.0, 0.1, 4, 1e-5, QUICK)
    path = ledger(tmp_path, *rounds(3))
    path.write_bytes(path.read_bytes()[:-1])  # a line that lacks only its end is made whole
    assert opened(tmp_path).spend(replace(WEAK, round=3))
    assert not opened(tmp_path).damaged and opened(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 4, 1e-5, QUICK)


def test_a_ledger_of_which_nothing_is_left_has_spent_everything(tmp_path: Path) -> None:
    assert opened(tmp_path, done=1).epsilon() == opened(tmp_path, lines=1).epsilon() == inf
    (tmp_path / NAME).write_bytes(b"x")
    found = opened(tmp_path)
    assert found.epsilon() == inf and found.would_exceed(WEAK, 1e6)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"line": 10**15},
        {"limit": inf},
        {"limit": -1.0},
        {"multiplier": "8"},
        {"multiplier": 1e-9},
        {"rate": 2.0},
        {"round": "first"},
        {"seeded": 1},
        {"delta": 0.0},
        {"other": 3},
        {"run": 7},
    ],
)
def test_resealed_nonsense_counts_as_a_lost_line_and_never_as_less(tmp_path: Path, nonsense: dict[str, object]) -> None:
    import json
    from binascii import crc32

    whole = ledger(tmp_path, *rounds(2)).read_bytes()
    told = json.loads(line_of(1, replace(WEAK, round=1)))
    told.pop("crc")
    head = json.dumps(told | nonsense, separators=(",", ":")).encode()[:-1].ljust(WIDTH - 19)
    (tmp_path / NAME).write_bytes(whole[:WIDTH] + head + b',"crc":"%08x"}\n' % crc32(head))
    found = opened(tmp_path)
    assert found.epsilon() >= epsilon_of(8.0, 0.1, 2, 1e-5, QUICK)


def test_one_ledger_has_one_delta(tmp_path: Path) -> None:
    ledger(tmp_path, WEAK)
    with pytest.raises(Mistake, match="delta"):
        opened(tmp_path).spend(replace(WEAK, round=1, delta=1e-3))
    with pytest.raises(Mistake, match="delta"):
        opened(tmp_path / "other").would_exceed(replace(WEAK, delta=0.0), 1.0)


def test_a_pipe_in_place_of_the_ledger_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(Mistake, match="pipe"):
        opened(tmp_path)


def test_what_spend_returned_from_is_there_after_a_kill(tmp_path: Path) -> None:
    """The process ends without closing or flushing anything, right after it was told that the round is noted."""
    program = (
        f"import os\nfrom pathlib import Path\nfrom shoestring.privacy.ledger import *\n"
        f"spending = PrivacyLedger(Path({str(tmp_path / NAME)!r}))\nfor number in range(2):\n"
        f"    spending.spend(ReleasedRound('a' * 16, number, '0' * 16, 8.0, 0.1, 1e-5))\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == -9
    assert opened(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 2, 1e-5, QUICK)


def test_the_longest_entry_fits_on_a_line() -> None:
    longest = ReleasedRound(
        "a" * 16, 10**9, "b" * 16, 123500.0, 0.12345678901234568, 1.2345678901234567e-10, 12.345678901234567, False
    )
    assert len(line_of(10**9, longest)) == WIDTH


def test_lines_that_were_cut_out_while_a_run_went_on_are_missed_by_all_later_runs(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    mine = PrivacyLedger(path, "mine")
    for round in range(4):
        assert mine.spend(ReleasedRound("mine", round, "0" * 16, 1.0, 0.1, 1e-5))
    before = mine.epsilon()
    path.write_bytes(path.read_bytes()[: 2 * WIDTH])
    assert mine.spend(ReleasedRound("mine", 4, "0" * 16, 1.0, 0.1, 1e-5))
    for seen in (mine, PrivacyLedger(path, "other")):
        assert seen.lost_rounds == 2 and seen.epsilon() > before


@pytest.mark.parametrize(
    "odd",
    [
        {"line": 9_999_999},
        {"multiplier": 1e-3},
        {"rate": 1e-320},
        {"rate": True},
        {"round": -1},
        {"limit": True},
        {"line": True},
    ],
    ids=str,
)
def test_a_line_that_no_run_wrote_costs_neither_memory_nor_a_promise(odd: dict[str, object], tmp_path: Path) -> None:
    """With a checksum that fits: counted as damaged, or an epsilon that is beyond any budget, at once."""
    path, real = tmp_path / "privacy.jsonl", ReleasedRound("mine", 0, "0" * 16, 1.0, 0.1, 1e-5)
    head = json.dumps({"line": 0} | vars(real) | odd, separators=(",", ":")).encode()[:-1].ljust(WIDTH - 19)
    path.write_bytes(head + b',"crc":"%08x"}\n' % crc32(head))
    ledger = PrivacyLedger(path, "mine")
    assert ledger.epsilon(1e-5, exactly=True) == inf
    assert ledger.would_exceed(real, 8.0) and not ledger.spend(real, 8.0)


def test_what_is_cut_off_by_a_full_disk_counts_as_a_round(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path, "mine")
    entry = ReleasedRound("mine", 0, "0" * 16, 1.0, 0.1, 1e-5)
    assert ledger.spend(entry)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (WIDTH + 100, before[1]))
    try:
        with pytest.raises(OSError):
            ledger.spend(replace(entry, round=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = PrivacyLedger(path, "mine", 1, 1)
    assert again.lost_rounds == 1 and again.spend(replace(entry, round=1)) and again.lost_rounds == 1


def test_two_names_of_one_ledger_and_a_limit_that_is_met_exactly(tmp_path: Path) -> None:
    path, entry = tmp_path / "a", ReleasedRound("mine", 0, "0" * 16, 1.0, 0.1, 1e-5)
    first = PrivacyLedger(path, "mine")
    assert first.spend(entry)
    os.link(path, tmp_path / "b")
    other = PrivacyLedger(tmp_path / "b", "other")
    assert other.spend(replace(entry, run="other")) and first.spend(replace(entry, round=1))
    whole = PrivacyLedger(path, "mine")
    assert (whole.lines, whole.damaged, whole.runs) == (3, 0, 2)
    limit = whole.epsilon(exactly=True)
    exactly = PrivacyLedger(tmp_path / "c", "mine")
    limited = [exactly.spend(replace(entry, round=round, limit=limit)) for round in range(4)]
    assert limited == [True, True, True, False] and exactly.epsilon(exactly=True) == limit
