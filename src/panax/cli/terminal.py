"""The terminal that commands print to: text appears as it is, whatever brackets or colons a path or a message has."""

from rich.console import Console


def plain_console() -> Console:
    """A console that takes no text for markup or emoji; what is styled is said by `style=`."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
