"""Plain sums of gradients, in their own dtype."""

import dataclasses

from ...core.layout.layout import Layout
from ...spmd.collectives import all_reduce
from .reduction import GradientTerms


@dataclasses.dataclass(frozen=True)
class PlainSum:
    """Sum of each gradient over its mesh axes."""

    def reduce(self, terms: GradientTerms, layout: Layout) -> GradientTerms:
        sums = {name: all_reduce(terms.values[name], axes) for name, axes in terms.rest.items()}
        return terms._replace(values={**terms.values, **sums}, rest={})
