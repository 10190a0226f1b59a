"""Names of signals: those that Python knows, and the real-time signals of batch systems and debuggers."""

import signal


def signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> signal_name(9), signal_name(10_000)
    ('SIGKILL', 'signal 10000')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
    if first <= number <= last:
        return f"SIGRTMIN+{number - first}"
    return f"signal {number}"
