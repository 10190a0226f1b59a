"""Delayed sums: the previous batch's gradients travel over the slow network while this batch is processed."""

import dataclasses

import jax

from ...comms import Comms
from ...core.layout.layout import Layout
from ...spmd.collectives import all_reduce
from ...spmd.sharding_marks import ValueState, assert_sharding
from .reduction import GradientTerms, Reduction


@dataclasses.dataclass(frozen=True)
class DelayedSum:
    """Sum of the previous batch's terms over the slow network; this batch's are summed over the fast one.

    Attributes:
        slow: Reduction over the slow network.
    """

    comms: Comms
    slow: Reduction

    def reduce(self, terms: GradientTerms, layout: Layout) -> GradientTerms:
        assert terms.delayed is not None
        over, values, late = self.comms.over, dict(terms.values), terms.delayed
        rest, new = dict(terms.rest), {}
        for name, axes in terms.rest.items():
            fast = tuple(axis for axis in axes if axis not in over)
            partial_sum = assert_sharding(all_reduce(values[name], fast), dict.fromkeys(over, ValueState.OWN))
            new[name] = partial_sum.reshape(late[name].shape)
            before = late[name].reshape(partial_sum.shape)
            rest[name] = tuple(axis for axis in axes if axis in over)
            values[name] = assert_sharding(before, dict.fromkeys(rest[name], ValueState.PARTIAL))
        terms = self.slow.reduce(terms._replace(values=values, rest=rest), layout)
        # Tie both together: the sums travel while this batch is processed, and are used only after it, in place.
        sums, new = jax.lax.optimization_barrier((dict(terms.values), new))
        return terms._replace(values=sums, delayed=new)
