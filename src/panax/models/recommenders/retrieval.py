"""Catalog embeddings: computing them, writing them for a nearest-neighbor index, and exact-search
retrieval metrics.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from ...core.errors import DataError
from ..decoder.model import Decoder
from .two_tower import TwoTower
from .two_tower_task import TwoTowerTask

VECTORS, IDS = "vectors.npy", "ids.json"


def item_vectors(
    task: TwoTowerTask,
    params: TwoTower,
    batches: Iterable[Mapping[str, np.ndarray]],
    state: Mapping[str, Any] = MappingProxyType({}),
) -> Float[np.ndarray, "item width"]:
    """Compute the item tower's vector of each item of a catalog, in catalog order.

    Args:
        batches: Batches of the item's leaves only; each distinct batch size compiles one program.
        state: The model state, needed if a table grows.
    """
    tables = task.model.with_table_names().item

    def vectors(params: TwoTower, state: Any, batch: Any) -> jax.Array:
        return params.item(tables.replace_keys(state, batch), task.weight_dtype)

    return _all(vectors, params, state, batches)


def query_vectors(
    task: TwoTowerTask,
    params: TwoTower,
    batches: Iterable[Mapping[str, np.ndarray]],
    state: Mapping[str, Any] = MappingProxyType({}),
) -> Float[np.ndarray, "query width"]:
    """Compute the query tower's vectors; the counterpart of `item_vectors`."""
    tables = task.model.with_table_names().query

    def vectors(params: TwoTower, state: Any, batch: Any) -> jax.Array:
        return params.query(tables.replace_keys(state, batch), task.weight_dtype)

    return _all(vectors, params, state, batches)


def sequence_item_vectors(params: Decoder) -> Float[np.ndarray, "item width"]:
    """Return the item vectors of a trained `SequenceTask`, by id.

    The score of an item is the inner product of its vector and the history's.
    """
    return np.asarray(params.embedding.table[: params.config.vocab_size], np.float32)


def write_vectors(directory: str | Path, vectors: Float[np.ndarray, "item width"], ids: Sequence[str | int]) -> None:
    """Write `vectors.npy` (float32) and `ids.json` (each row's id), as input for a nearest-neighbor index.

    Raises:
        DataError: The numbers of ids and vectors differ, an id is duplicated, or a vector is not finite.
    """
    if len(ids) != len(vectors) or len(set(ids)) != len(ids):
        raise DataError(
            f"{len(vectors)} vectors and {len(set(ids))} different ids; expected one for each: name every item once"
        )
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise DataError(
            f"the vector of item {ids[int(wrong[0])]!r} is not finite; train the model again, or remove the item"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / VECTORS, vectors.astype(np.float32))
    (folder / IDS).write_text(json.dumps(list(ids)) + "\n", encoding="utf-8")


def retrieval_metrics(
    queries: Float[np.ndarray, "query width"],
    items: Float[np.ndarray, "item width"],
    targets: Int[np.ndarray, " query"],
    at: Sequence[int] = (10,),
    *,
    chunk: int = 1024,
) -> dict[str, float]:
    """Compute `hit_rate@k` (recall), `ndcg@k` and `mrr` of queries with one relevant item each, ranked in the
    full catalog.

    Half of the items with a score equal to the relevant item's count as ranked before it.

    Args:
        chunk: Number of queries that are scored at once; bounds memory.

    >>> retrieval_metrics(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32), np.array([0, 0]), (1,))
    {'mrr': 0.75, 'hit_rate@1': 0.5, 'ndcg@1': 0.5}
    """
    ranks = np.empty(len(queries))
    for begin in range(0, len(queries), chunk):
        part = slice(begin, begin + chunk)
        scores = queries[part] @ items.T
        target_scores = np.take_along_axis(scores, targets[part, None], axis=1)
        ranks[part] = 1 + (scores > target_scores).sum(axis=1) + 0.5 * ((scores == target_scores).sum(axis=1) - 1)
    metrics = {"mrr": float((1 / ranks).mean())}
    for k in at:
        inside = ranks <= k
        metrics[f"hit_rate@{k}"] = float(inside.mean())
        metrics[f"ndcg@{k}"] = float(np.where(inside, 1 / np.log2(ranks + 1), 0.0).mean())
    return metrics


def _all(
    vectors: Any, params: TwoTower, state: Mapping[str, Any], batches: Iterable[Mapping[str, np.ndarray]]
) -> np.ndarray:
    run = jax.jit(vectors)
    return np.concatenate([np.asarray(run(params, dict(state), dict(batch))) for batch in batches])
