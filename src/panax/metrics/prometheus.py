"""Endpoint for Prometheus: the newest value of everything that a run reports."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ..core.errors import RecipeError
from .facts import RunFacts
from .services import import_service
from .trackers import Tracker

PORT = 9464
"""Default port, in the usual range of exporters."""

_SPENT = re.compile(r"goodput/(\w+)_seconds")


@dataclasses.dataclass
class PrometheusTracker(Tracker):
    """Endpoint with metrics for a Prometheus server, at `http://ADDRESS:PORT/metrics`, during the run.

    `train/loss` is the gauge `panax_train_loss`, with the run's name as a label; the seconds of the run by
    kind are `panax_run_seconds`, with the label `spent_on`; `panax_step` is the step of the newest report.

    Attributes:
        port: 0 for any free port; see `address_bound`.
        address: Address to listen at. The endpoint shows figures to anyone who can reach it, and nothing
            else.
    """

    port: int = PORT
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RecipeError(f"PrometheusTracker.port={self.port}; expected 0 to 65535")
        self._library: Any = import_service("prometheus_client", "prometheus")
        self._server: Any = None
        self._registry: Any = None
        self._gauges: dict[str, Any] = {}
        self._run = ""

    @classmethod
    def at(cls, place: str) -> "PrometheusTracker":
        """Create a tracker from a port, or an address and a port, as on the command line.

        Raises:
            RecipeError: The text is neither.

        >>> PrometheusTracker.at("0.0.0.0:9000")
        PrometheusTracker(port=9000, address='0.0.0.0')
        """
        address, _, port = place.rpartition(":")
        if not port.isdecimal():
            raise RecipeError(f"--prometheus {place!r}; expected a port, or an address and a port as 0.0.0.0:{PORT}")
        return cls(int(port), address.strip("[]") or cls.address)

    @property
    def address_bound(self) -> tuple[str, int] | None:
        """Return the address and port at which it listens; None while it does not."""
        return None if self._server is None else self._server.server_address[:2]

    def about(self, run: RunFacts) -> None:
        self._run = run.name
        self._gauges.clear()
        self._registry = self._library.CollectorRegistry()
        try:
            self._server, _ = self._library.start_http_server(self.port, self.address, self._registry)
        except OSError as error:
            raise OSError(
                error.errno, f"can't listen on {self.address}, port {self.port} ({error.strerror}); choose another port"
            ) from error

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if self._server is None:
            return
        self._gauge("panax_step", "Steps taken.").labels(self._run).set(step)
        for name, value in values.items():
            spent = _SPENT.fullmatch(name)
            if spent:
                gauge = self._gauge("panax_run_seconds", "Seconds of the run, over all of its sessions.", "spent_on")
                gauge.labels(self._run, spent[1].replace("_", " ")).set(value)
            else:
                self._gauge(metric_name(name), name).labels(self._run).set(value if math.isfinite(value) else math.nan)

    def _gauge(self, name: str, says: str, *labels: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._library.Gauge(name, says, ("run", *labels), registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def metric_name(name: str) -> str:
    """Convert a name to one that Prometheus accepts.

    >>> metric_name("speed/tokens_per_second"), metric_name("data/epochs/web 2")
    ('panax_speed_tokens_per_second', 'panax_data_epochs_web_2')
    """
    return "panax_" + re.sub(r"\W", "_", name, flags=re.ASCII)
