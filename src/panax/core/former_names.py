"""Names that classes and settings had in version 0.1.1: its checkpoints, and caches of data, are still read."""

import re
from collections.abc import Mapping
from typing import Any

from .serializable import find_serializable

_CLASSES = {
    "Filtered": "FilteredCorpus",
    "Hashed": "HashBuckets",
    "Joined": "ConcatCorpus",
    "Keys": "HashedIds",
    "Numbered": "IntegerIds",
    "OwnSchedule": "CustomSchedule",
    "Part": "MixtureComponent",
    "RewindConfig": "RollbackConfig",
    "Vocabulary": "CountVocabulary",
}
"""Present names of classes, by their former ones. Settings name them, and fingerprints of data hash the names."""

_FORMER = {new: old for old, new in _CLASSES.items()}
_ANY_RENAMED = re.compile(r"\b(?:" + "|".join(_FORMER) + r")\b(?=\(|$)")

_AGENT = {"collections": "rollouts_per_step"}
_OFF_POLICY = {**_AGENT, "target_rate": "tau", "target_period": "target_update_interval"}
_OPTIMIZERS = (
    "Adafactor", "AdamW", "Lamb", "Lars", "Lion", "Muon", "ScheduleFreeAdamW", "Sgd", "Shampoo", "Soap",
)  # fmt: skip

FIELDS: Mapping[str, Mapping[str, str]] = {
    "Dqn": _OFF_POLICY,
    "Experiment": {"table_optimizer": "embedding_optimizer", "rewind": "rollback"},
    "GridWorld": {"seen": "observation"},
    "Islands": {"place": "store"},
    "MoE": {"normalised": "normalize_topk"},
    "Ppo": {
        **_AGENT,
        "piece_length": "bptt_length",
        "trace": "gae_lambda",
        "target_divergence": "target_kl",
        "entropy_weight": "ent_coef",
        "value_weight": "vf_coef",
        "normalise_advantages": "normalize_advantages",
        "normalise_observations": "normalize_observations",
        "normalise_rewards": "normalize_rewards",
        "first_log_deviation": "init_log_std",
        "evaluation_draws": "stochastic_eval",
    },
    "RollbackConfig": {"most": "max_rollbacks"},
    "Rules": {"gathered_as": "weight_gather_dtype"},
    "Sac": _OFF_POLICY,
    "TwoTowerConfig": {"normalised": "normalize"},
    "VerifyConfig": {"most": "max_rollbacks"},
    **{name: {"rates": "lr_multipliers", "decays": "decay_multipliers"} for name in _OPTIMIZERS},
}
"""Present names of fields, by the present name of the class and their former name."""


def with_present_names(description: Any) -> Any:
    """Return a description of settings with the present names of its classes and fields.

    A class that the caller has registered under a former name takes precedence.

    >>> with_present_names({"type": "RewindConfig", "after": 3, "most": 2})
    {'type': 'RollbackConfig', 'after': 3, 'max_rollbacks': 2}
    """
    if isinstance(description, list):
        return [with_present_names(item) for item in description]
    if not isinstance(description, dict):
        return description
    kind = description.get("type")
    if not isinstance(kind, str):
        return {name: with_present_names(item) for name, item in description.items()}
    present = kind if kind not in _CLASSES or find_serializable(kind) else _CLASSES[kind]
    fields = FIELDS.get(present, {})
    items = {fields.get(name, name): with_present_names(item) for name, item in description.items()}
    return {**items, "type": present}


def with_former_names(text: str) -> str:
    """Return a class's name or a repr with the names that fingerprints hash, which a rename must not change.

    >>> with_former_names("ConcatCorpus"), with_former_names("Bag(column='id', ids=IntegerIds(rows=4))")
    ('Joined', "Bag(column='id', ids=Numbered(rows=4))")
    """
    return _ANY_RENAMED.sub(lambda match: _FORMER[match.group()], text)
