"""The chain of a program's reductions, by its settings; what each sums, `tests/comms` compares on meshes."""

import pytest

from panax.comms import Comms
from panax.train.reductions.chain import choose_reduction
from panax.train.reductions.compressed_sum import CompressedSum
from panax.train.reductions.delayed_sum import DelayedSum
from panax.train.reductions.plain_sum import PlainSum

COMPRESSED, DELAYED = Comms(compress="int8"), Comms(delayed=True)
BOTH = Comms(compress="int8", delayed=True)


@pytest.mark.parametrize(
    ("comms", "expected"),
    [
        (None, PlainSum()),
        (Comms(), PlainSum()),
        (COMPRESSED, CompressedSum(COMPRESSED, PlainSum())),
        (DELAYED, DelayedSum(DELAYED, PlainSum())),
        (BOTH, DelayedSum(BOTH, CompressedSum(BOTH, PlainSum()))),
    ],
    ids=["nothing", "plain", "compressed", "delayed", "both"],
)
def test_a_program_has_one_reduction(comms, expected):
    assert choose_reduction(comms) == expected
