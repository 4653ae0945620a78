"""No bit of what training leaves has changed since ``digests.json`` was written."""

import pytest

import digests
import tiers
from launch import needs_mpi, run_mpi
from transports import RUN

NARROW = list(digests.cases(optimizers=False))
WIDE = [name for name in digests.cases() if name not in NARROW]


def in_pairs(names, sizes):
    """Each case on one number of ranks or more, so that every mode and every option meets every number: by number."""
    turns = [(name, sizes[(k + turn) % len(sizes)]) for turn in range(len(sizes)) for k, name in enumerate(names)]
    chosen = tiers.all_pairs([(*name.split(", ", 1), size) for name, size in turns])
    return {size: [turns[k][0] for k in sorted(chosen) if turns[k][1] == size] for size in sizes}


@pytest.mark.parametrize("transport", RUN)
@pytest.mark.parametrize("case", [*NARROW, *WIDE][::101])
def test_training_on_two_ranks_has_the_recorded_bits(transport, case):
    assert not digests.differences("2 threads", digests.on_threads(2, [case], RUN[transport]))


@pytest.mark.thorough
@pytest.mark.parametrize("transport", tiers.every(len(RUN), RUN))
@pytest.mark.parametrize("size", digests.SIZES)
def test_training_on_many_ranks_has_the_recorded_bits(transport, size):
    """Every case, on one number of ranks at the least."""
    assert not digests.differences(
        f"{size} threads", digests.on_threads(size, in_pairs(digests.cases(), digests.SIZES)[size], RUN[transport])
    )


@pytest.mark.full
@pytest.mark.parametrize("size", digests.SIZES)
def test_training_on_every_number_of_threads_has_the_recorded_bits(size):
    assert not digests.differences(f"{size} threads", digests.on_threads(size))


def test_virtual_ranks_have_the_recorded_bits():
    assert not digests.differences("virtual ranks", digests.of_virtual_ranks())


@needs_mpi
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("size", [2, 3])
def test_training_on_mpi_has_the_recorded_bits(size, whole, tmp_path):
    """Every case, on one number of ranks at the least; as a whole on each."""
    names = NARROW if whole else in_pairs(NARROW, [2, 3])[size]
    ranks = [{name: str(d) for name, d in rank.items()} for rank in run_mpi(size, digests.of_mpi, tmp_path, names)]
    assert not digests.differences(f"{size} threads", digests.joined_digests(ranks))


def test_doubles_of_gpus_have_the_recorded_bits(arithmetic):
    assert not digests.differences("2 threads", digests.on_doubles())
