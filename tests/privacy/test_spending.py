"""The privacy ledger never forgets what was spent, whatever becomes of its file."""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.privacy.account import QUICK, SampledGaussian, epsilon_of, spent
from shoestring.privacy.spending import NAME, WIDTH, Entry, Spending

pytest.importorskip("dp_accounting")
WEAK, STRONG = Entry(0, "a" * 32, 8.0, 0.1, 1e-5), Entry(0, "b" * 32, 4.0, 0.1, 1e-5)   # the strong one spends more


def ledger(folder: Path, *entries: Entry) -> Path:
    spending = Spending(folder)
    for one in entries:
        spending.spend(one)
    return folder / NAME


def rounds(count: int, kind: Entry = WEAK, start: int = 0) -> list[Entry]:
    return [replace(kind, round=number) for number in range(start, start + count)]


def test_what_is_spent_is_the_epsilon_of_its_rounds(tmp_path: Path) -> None:
    ledger(tmp_path, *rounds(3), *rounds(2, STRONG, 3))
    found = Spending(tmp_path)
    kinds = ((SampledGaussian(8.0, 0.1), 3), (SampledGaussian(4.0, 0.1), 2))
    assert found.epsilon(exactly=True) == spent(kinds, 1e-5)
    assert found.epsilon() == spent(kinds, 1e-5, QUICK) >= found.epsilon(exactly=True)
    assert found.epsilon(1e-7) > found.epsilon() and found.delta == 1e-5


def test_nothing_is_spent_at_first(tmp_path: Path) -> None:
    assert Spending(tmp_path).epsilon() == 0.0 and not (tmp_path / NAME).exists()


def test_a_round_played_again_with_the_same_settings_counts_once_and_with_others_anew(tmp_path: Path) -> None:
    ledger(tmp_path, *rounds(2), *rounds(2))
    assert Spending(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 2, 1e-5, QUICK)
    ledger(tmp_path, replace(WEAK, digest="c" * 32))
    assert Spending(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 3, 1e-5, QUICK)


def test_a_round_that_would_exceed_the_budget_is_known_before_it_is_played(tmp_path: Path) -> None:
    budget = epsilon_of(8.0, 0.1, 3, 1e-5)   # exactly three rounds, which the quick grid alone would say are too many
    spending = Spending(tmp_path)
    for one in rounds(3):
        assert not spending.would_exceed(one, budget)
        spending.spend(one)
    assert spending.would_exceed(replace(WEAK, round=3), budget)
    assert Spending(tmp_path).would_exceed(replace(WEAK, round=3), budget), "and after a restart, too"
    assert not spending.would_exceed(replace(WEAK, round=2), budget), "the same round again tells nothing new"
    assert spending.would_exceed(replace(WEAK, round=2, digest="c" * 32), budget)


def test_cut_off_anywhere_it_is_never_less_than_the_truth(tmp_path: Path) -> None:
    """The truth is that of the rounds that the run is known to have done; of the last line, that it was written at all."""
    whole = ledger(tmp_path, *rounds(2), *rounds(2, STRONG, 2)).read_bytes()
    truth = Spending(tmp_path).epsilon()
    weak, strong = SampledGaussian(8.0, 0.1), SampledGaussian(4.0, 0.1)
    before = [spent(((weak, min(count, 2)), (strong, max(count - 2, 0))), 1e-5, QUICK) for count in range(5)]
    for length in range(len(whole)):
        (tmp_path / NAME).write_bytes(whole[:length])
        assert Spending(tmp_path).epsilon() >= before[length // WIDTH], length
        if length > 3 * WIDTH or length < WIDTH:   # a kind of which no line is left can't be known
            assert Spending(tmp_path, done=4).epsilon() >= truth, length


def test_with_any_bit_flipped_it_is_never_less_than_the_truth(tmp_path: Path) -> None:
    whole = ledger(tmp_path, *rounds(2), *rounds(2, STRONG, 2)).read_bytes()
    truth = Spending(tmp_path).epsilon()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        (tmp_path / NAME).write_bytes(bytes(broken))
        found = Spending(tmp_path)
        assert found.damaged == 1 and found.epsilon() >= truth, place


def test_after_a_torn_line_the_next_one_is_whole_and_the_torn_one_counts(tmp_path: Path) -> None:
    path = ledger(tmp_path, *rounds(3))
    for left in (1, 100, WIDTH - 2):
        path.write_bytes(path.read_bytes()[:2 * WIDTH + left])
        spending = Spending(tmp_path)
        spending.spend(replace(WEAK, round=2))
        again = Spending(tmp_path)
        assert len(path.read_bytes()) == 4 * WIDTH and again.damaged == 1
        assert again.epsilon() == spending.epsilon() == epsilon_of(8.0, 0.1, 4, 1e-5, QUICK)
        path.write_bytes(b"".join(path.read_bytes()[start:start + WIDTH] for start in (0, WIDTH, 3 * WIDTH)))
    path.write_bytes(path.read_bytes()[:-1])   # a line that lacks only its end is made whole
    Spending(tmp_path).spend(replace(WEAK, round=2))
    assert Spending(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 3, 1e-5, QUICK)


def test_a_ledger_of_which_nothing_is_left_has_spent_everything(tmp_path: Path) -> None:
    assert Spending(tmp_path, done=1).epsilon() == inf
    (tmp_path / NAME).write_bytes(b"x")
    found = Spending(tmp_path)
    assert found.epsilon() == inf and found.would_exceed(WEAK, 1e6)


def test_one_run_has_one_delta(tmp_path: Path) -> None:
    ledger(tmp_path, WEAK)
    with pytest.raises(Mistake, match="delta"):
        Spending(tmp_path).spend(replace(WEAK, round=1, delta=1e-3))
    with pytest.raises(Mistake, match="delta"):
        Spending(tmp_path / "other").would_exceed(replace(WEAK, delta=0.0), 1.0)


def test_a_pipe_in_place_of_the_ledger_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(Mistake, match="pipe"):
        Spending(tmp_path)


def test_what_spend_returned_from_is_there_after_a_kill(tmp_path: Path) -> None:
    """The process ends without closing or flushing anything, right after it was told that the round is noted."""
    program = (f"import os\nfrom pathlib import Path\nfrom shoestring.privacy.spending import *\n"
               f"spending = Spending(Path({str(tmp_path)!r}))\nfor number in range(2):\n"
               f"    spending.spend(Entry(number, 'a' * 32, 8.0, 0.1, 1e-5))\nos.kill(os.getpid(), 9)")
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == -9
    assert Spending(tmp_path).epsilon() == epsilon_of(8.0, 0.1, 2, 1e-5, QUICK)
