"""The report of a published comparison: the effect of each flaw on the verdict."""

from pathlib import Path

from panax.metrics.page.blocks import Code, Paragraph, Picture, Points, Section, TextTable
from panax.metrics.page.html import page
from panax.metrics.page.markdown import markdown, table

from ..formats import format_seconds
from ..published_study import FLAWS, SIDES, Published, variants
from ..workload.sources import read_source
from .files import MARKDOWN, PAGE, PLOTS
from .plots import ColumnBar, bars

DISTINCT = 0.1
"""Ratios that differ by less than this fraction count as equal: on a busy machine, two runs of one variant
differ by as much."""


def write_published(published: Published, folder: Path) -> tuple[Path, str]:
    """Write the page and the Markdown file. Returns the path of the page, and the table with the answer."""
    main = _table(published)
    picture = Picture(
        "ratios", _picture(published), "JAX's time of a step by PyTorch's, as each variant's own clock has it."
    )
    answer = answers(published)
    sections = [
        Section("The answer", (Paragraph(answer[0], lead=True), Points(tuple(answer[1:])))),
        Section("Table", (main, Paragraph(_setting(published)), picture)),
        Section("The flaws", (Points(tuple(f"**{name}**: {what}." for name, what in FLAWS.values())),)),
        Section(
            "Programs",
            (
                Code(published.command, "console"),
                *(
                    Code(read_source(name), "python", f"{name.replace('.', '/')}.py")
                    for name in ("torch.published_torch", "jax.published_jax", "jax.plain_vit")
                ),
            ),
        ),
    ]
    title = "A published comparison, with its flaws and without"
    (folder / PLOTS).mkdir(exist_ok=True)
    (folder / PLOTS / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")
    (folder / PAGE).write_text(page(title, sections), encoding="utf-8")
    (folder / MARKDOWN).write_text(markdown(title, sections), encoding="utf-8")
    return folder / PAGE, f"{table(main)}\n\n" + "\n".join(answer) + "\n"


def _shown(published: Published):
    return [variant for variant in variants(True) if variant.name in published.found]


def _setting(published: Published) -> str:
    found = published.environment
    return (
        f"{published.title}; random images, SGD with a learning rate of 1e-3, float32. {found['processor']}, "
        f"{found['cores']} cores"
        f"{''.join(', ' + name for name in found['accelerators'])}. Each side of each variant in a fresh process; "
        f"{published.rounds} rounds of {published.steps} steps, medians."
    )


def _table(published: Published) -> TextTable:
    rows: list[tuple[str, ...]] = [
        ("variant", "PyTorch a step", "JAX a step", "JAX by PyTorch", "PyTorch's first losses", "JAX's first losses")
    ]
    for variant in _shown(published):
        ratio = published.ratio(variant.name)
        times = [_time(published, variant.name, side) for side in SIDES]
        first = [", ".join(f"{loss:.4g}" for loss in published.losses(variant.name, side)[:3]) for side in SIDES]
        rows.append((variant.title, *times, "" if ratio is None else f"{ratio:.2f}", *first))
    return TextTable(tuple(rows), marked=0)


def _time(published: Published, variant: str, side: str) -> str:
    return format_seconds(published.seconds(variant, side)) or published.found[variant].get(side, {}).get(
        "error", "not measured"
    )


def _picture(published: Published) -> str:
    ratios = [(variant, ratio) for variant in _shown(published) if (ratio := published.ratio(variant.name)) is not None]
    return bars(
        [
            ColumnBar("panax" if not variant.flaws else "plain_jax", variant.title, ratio, 0, 0, f"{ratio:.2f}")
            for variant, ratio in ratios
        ],
        "JAX's time by PyTorch's",
    )


def answers(published: Published) -> list[str]:
    """Describe the effect of all flaws together on the verdict, then of each alone."""
    right, wrong = published.ratio("corrected"), published.ratio("published")
    if right is None:
        return ["The corrected comparison was not finished, so the effect of each flaw is unknown."]
    first = f"Result of the comparison without its flaws: {_faster(right)}."
    if wrong is not None:
        turned = "the verdict turns round" if (right > 1) != (wrong > 1) else "the verdict has the same sign"
        change = (
            "by less than this run can show"
            if abs(wrong / right - 1) < DISTINCT
            else f"{wrong / right:.2f} times the honest ratio"
        )
        first += f" As it was published: {_faster(wrong)}: {turned}, the ratio is {wrong:.2f} instead of {right:.2f} ({change})."
    sentences = [first]
    for variant in _shown(published):
        if len(variant.flaws) == 1:
            sentences.append(f"{variant.title}: {_effect(published, variant.name, right)}")
    if "tf32" not in published.found:
        sentences.append("TF32 on one side: not shown, it takes a GPU.")
    return sentences


def _faster(ratio: float) -> str:
    if abs(ratio - 1) < DISTINCT:
        return f"JAX and PyTorch are level (JAX takes {ratio:.2f} times as long)"
    return (
        f"JAX takes {ratio:.2f} times as long" if ratio > 1 else f"PyTorch takes {1 / ratio:.2f} times as long as JAX"
    )


def _effect(published: Published, name: str, right: float) -> str:
    ratio = published.ratio(name)
    if ratio is None:
        return "not finished."
    moved = ratio / right
    sentence = (
        "does not change the ratio by more than this run can show"
        if abs(moved - 1) < DISTINCT
        else (f"changes the ratio from {right:.2f} to {ratio:.2f}")
    )
    for side, title in SIDES.items():
        flawed, honest = published.losses(name, side), published.losses("corrected", side)
        if flawed and honest and abs(flawed[0] - honest[0]) > 1e-3 * abs(honest[0]):
            sentence += f"; {title}'s first loss is {flawed[0]:.4g} instead of {honest[0]:.4g}"
    return sentence + "."
