"""A plain PyTorch SASRec, of the size and with the training of the recipe `sasrec_ml100k`: the yardstick of its quality.

In PyTorch's usual way: `nn.Embedding`, `nn.TransformerEncoderLayer` with a causal mask, tied scores, AdamW. The data,
what is held out, the batches' size, the number of steps, the learning rate and its schedule are the recipe's.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from panax.data import SequenceExamples
from panax.run import Experiment

STD = 0.02


class SasRec(nn.Module):
    """Items and positions, pre-norm layers, a norm; scores are inner products with the items' vectors."""

    def __init__(self, items: int, length: int, width: int, layers: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.items, self.positions = nn.Embedding(items, width), nn.Embedding(length, width)
        for table in (self.items, self.positions):
            nn.init.normal_(table.weight, std=STD)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, ffn, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        length = items.shape[1]
        x = self.dropout(self.items(items) + self.positions(torch.arange(length))[None])
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.layers(x, mask=mask, is_causal=True)


def trained(experiment: Experiment, train: SequenceExamples, held_out: SequenceExamples, seed: int) -> dict[str, float]:
    """NDCG@10 and the hit rate at 10 of the held-out items, ranked among all, after the recipe's steps."""
    torch.manual_seed(seed)
    config, schedule = experiment.task.model, experiment.optimizer.schedule
    model = SasRec(
        train.num_ids["items"], train.length, config.embed, config.num_layers, config.heads, config.ffn, config.dropout
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": experiment.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(experiment.optimizer.b1, experiment.optimizer.b2))
    rate = schedule.build(experiment.num_steps)
    random, size = np.random.default_rng(seed), experiment.data.batch_size
    order = np.concatenate(
        [
            random.permutation(train.num_examples)
            for _ in range(math.ceil(experiment.num_steps * size / train.num_examples))
        ]
    )
    for step in range(experiment.num_steps):
        batch = train.read(order[step * size : (step + 1) * size])
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        items, targets = (torch.from_numpy(batch[name]).long() for name in ("items", "targets"))
        there = targets >= 0
        scores = model(items.clamp(min=0))[there] @ model.items.weight.T
        loss = functional.cross_entropy(scores, targets[there])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), experiment.step.clip_norm or math.inf)
        optimizer.step()
    return evaluated(model, held_out)


@torch.no_grad()
def evaluated(model: SasRec, held_out: SequenceExamples) -> dict[str, float]:
    model.eval()
    batch = held_out.read(np.arange(held_out.num_examples))
    items, targets = (torch.from_numpy(batch[name]).long() for name in ("items", "targets"))
    row, place = torch.nonzero(targets >= 0, as_tuple=True)
    scores = model(items.clamp(min=0))[row, place] @ model.items.weight.T
    own = scores.gather(1, targets[row, place][:, None])
    rank = 1 + (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1)
    inside = rank <= 10
    gain = torch.where(inside, 1 / torch.log2(rank + 1), torch.zeros(()))
    return {"ndcg@10": float(gain.mean()), "hit_rate@10": float(inside.float().mean())}
