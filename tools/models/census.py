"""The census: each causal language model of the pinned `transformers`, with its default settings, read here or refused."""

import datetime
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from panax.adapters.huggingface import config_from
from panax.adapters.huggingface.config import read_config
from panax.core.errors import CheckpointError, RecipeError

PAGE = "census.md"

LOADS, REFUSED, UNKNOWN, ABSENT = "loads", "refused", "unknown", "absent"
"""Outcomes: a family reads it; a family refuses a setting; no family has its type; `transformers` has no default settings."""


def measure_census() -> dict[str, Any]:
    """Write the default config.json of every causal type, and read it.

    Returns:
        The date, the version of `transformers`, and by type the outcome with the family or the reason.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            try:
                text = CONFIG_MAPPING[model_type]().to_json_string(use_diff=False)
            except Exception as error:
                types[model_type] = [ABSENT, f"{type(error).__name__}"]
                continue
            (Path(folder) / "config.json").write_text(text, "utf-8")
            types[model_type] = list(_outcome(Path(folder), json.loads(text)))
    return {
        "date": datetime.date.today().isoformat(),
        "transformers": version("transformers"),
        "types": types,
    }


def _outcome(folder: Path, raw: Mapping[str, Any]) -> tuple[str, str]:
    try:
        config_from(folder)
        return LOADS, read_config(folder)[0].model_type
    except (RecipeError, CheckpointError) as error:
        reason = str(error).replace(f"{folder / 'config.json'}: ", "").replace(f"{folder / 'config.json'} ", "")
    if reason.startswith("no family here has model_type="):
        # "By its keys it is nearest to X; it does not read A=1, B=2 ...". The advice is the same for all.
        return UNKNOWN, reason.partition(". ")[2].partition(". A table")[0].removeprefix(
            "By its keys it is nearest to "
        )
    return REFUSED, reason


def census_page(census: Mapping[str, Any], head: str) -> Iterator[str]:
    """Yield the lines of the page."""
    types: Mapping[str, Sequence[str]] = census["types"]
    by = {
        kind: {name: why for name, (what, why) in types.items() if what == kind}
        for kind in (LOADS, REFUSED, UNKNOWN, ABSENT)
    }
    yield "# All causal models of transformers\n"
    yield (
        f"Each of the {len(types)} causal language models of transformers {census['transformers']}, with its default settings: "
        f"{len(by[LOADS])} load, {len(by[REFUSED])} are refused for a setting, {len(by[UNKNOWN])} have no family here, and "
        f"{len(by[ABSENT])} have no default settings. None is taken for another: a refusal names the part that is missing.\n"
    )
    yield f"{head} `python -m tools.models --census` reads them again ({census['date']}).\n"
    yield "## Read\n"
    yield "| `model_type` | family |\n|---|---|"
    for name, family in by[LOADS].items():
        yield f"| `{name}` | [{family}]({family}.md) |"
    for title, kind, column in (
        ("Refused for a setting", REFUSED, "reason"),
        ("Without a family", UNKNOWN, "nearest family by its settings, and those that it does not read"),
        ("Without default settings", ABSENT, "error"),
    ):
        yield f"\n## {title}\n"
        yield f"| `model_type` | {column} |\n|---|---|"
        for name, why in by[kind].items():
            yield f"| `{name}` | {_cell(why)} |"
    yield ""


def _cell(text: str) -> str:
    """Escape what a table's cell would take for structure."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
