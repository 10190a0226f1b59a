"""Compressed sums over the slow network, for parameters that are large enough."""

import dataclasses

from ...comms import Comms
from ...comms.reduction import compressed_views, reduce_compressed
from ...core.layout.layout import Layout
from ...spmd.collectives import all_reduce
from .early_sum import early_residuals
from .reduction import GradientTerms, Reduction


@dataclasses.dataclass(frozen=True)
class CompressedSum:
    """Sum of codes of gradients over the slow network, after a plain sum over the fast one.

    Attributes:
        others: Reduction of the parameters that are too small to be compressed.
    """

    comms: Comms
    others: Reduction

    def reduce(self, terms: GradientTerms, layout: Layout) -> GradientTerms:
        assert terms.step is not None
        values, comms = dict(terms.values), self.comms
        ways = compressed_views(
            {name: (values[name].shape, tuple(terms.axes[name])) for name in terms.rest}, comms, layout
        )
        for name in ways:
            # Over the fast network first, so that the slow one carries each sum once.
            values[name] = all_reduce(values[name], tuple(axis for axis in terms.rest[name] if axis not in comms.over))
        residuals = terms.residuals
        before = None if residuals is None else {name: residuals[name] for name in ways}
        sums, after = reduce_compressed({name: values[name] for name in ways}, ways, before, comms, layout, terms.step)
        if residuals is not None and after is not None:
            residuals = {
                name: after[name] if name in after else early_residuals(terms.early, name, left)
                for name, left in residuals.items()
            }
        rest = {name: axes for name, axes in terms.rest.items() if name not in ways}
        return self.others.reduce(terms._replace(values={**values, **sums}, rest=rest, residuals=residuals), layout)
