"""A mixture of experts on the quickstart's text."""

import dataclasses

from panax.layers import MoE
from panax.run import Experiment

from .quickstart import quickstart


def moe_quickstart() -> Experiment:
    """The quickstart's decoder with eight experts in each layer, of which a token uses two: as many active parameters.

    Command: panax train moe_quickstart
    """
    dense = quickstart()
    experts = MoE(experts=8, active=2, ffn=dense.task.model.ffn // 2)
    model = dataclasses.replace(dense.task.model, feed_forward=experts)
    return dataclasses.replace(dense, name="moe_quickstart", task=dataclasses.replace(dense.task, model=model))
