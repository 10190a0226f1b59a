"""Links of a page as the site needs them: to other pages, to the repository, or a path as code."""

import os
import re
from pathlib import Path

_CODE_OR_LINK = re.compile(
    r"(?P<fence>^```.*?^```$)|(?P<code>(?<!`)`[^`\n]+`(?!`))"
    r"|(?<![\\!])\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])+)\]\((?P<target>[^)\s]+)\)"
    r"|(?<!\\)!\[(?P<alt>[^\[\]]*)\]\((?P<image>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def rewrite_links(text: str, page: Path, shown: Path, root: Path, repository: str) -> str:
    """Rewrite a page's relative links: a path outside of docs/ becomes an address in the repository, or code if it has none.

    Args:
        page: The file that the text is from.
        shown: The page of docs/ that shows it.
        repository: The repository's address on the web; may be empty.
    """

    def target_of(link: str) -> tuple[Path, str]:
        path, sign, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if target == root / "README.md":
            target = root / "docs/index.md"
        elif target.is_dir() and (target / "index.md").is_file():
            target /= "index.md"
        return target, sign + anchor

    def replaced(match: re.Match[str]) -> str:
        link = match["target"] or match["image"]
        if not link or "://" in link or link.startswith("mailto:") or (link.startswith("#") and page == shown):
            return match[0]
        target, anchor = target_of(link)
        if match["image"]:
            return f"![{match['alt']}]({os.path.relpath(target, shown.parent)})"
        if target.suffix == ".md" and target.is_relative_to(root / "docs"):
            return f"[{match['text']}]({os.path.relpath(target, shown.parent)}{anchor})"
        path = target.relative_to(root).as_posix()
        if repository:
            kind = "tree" if target.is_dir() else "blob"
            return f"[{match['text']}]({repository.rstrip('/')}/{kind}/main/{path}{anchor})"
        return match["text"] if match["text"].strip("`") == path else f"{match['text']} (`{path}`)"

    return _CODE_OR_LINK.sub(replaced, text)


def landing_page(readme: str, index: str) -> str:
    """Return the site's first page: README down to its commands, then the index without its title."""
    head, _, _ = readme.partition("\n## ")
    _, _, body = index.partition("\n")
    return f"{head.rstrip()}\n\n{body.lstrip()}"
