"""Lines of the journal with an environment's replies."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from .environments.turns import TurnReply

MAX_REPLIES_BYTES = 1 << 30
"""Maximum size of the replies to one turn of a rollout as JSON."""


@dataclasses.dataclass(frozen=True)
class ReplyEntry:
    """Replies to one turn of the answers of a rollout.

    Attributes:
        number: As `JournalEntry.number`.
        step: Steps taken before.
        turn: Number of the turn, from 1.
        environment: Name of the environment.
        replies: For each answer that waited for one, by its index in the rollout: a hash of its tokens up to there, and the
            reply.
    """

    number: int
    step: int
    turn: int
    environment: str
    replies: Mapping[int, tuple[str, TurnReply]]

    def to_json(self) -> str:
        """Return the entry as one line."""
        return json.dumps(
            {
                "rollout": self.number,
                "step": self.step,
                "turn": self.turn,
                "environment": self.environment,
                "replies": {
                    str(place): [digest, dataclasses.asdict(reply)] for place, (digest, reply) in self.replies.items()
                },
            }
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "ReplyEntry":
        """Read the fields of a line.

        Raises:
            ValueError: They have another form.
        """
        try:
            return cls(
                int(fields["rollout"]),
                int(fields["step"]),
                int(fields["turn"]),
                str(fields["environment"]),
                {
                    int(place): (str(digest), TurnReply.from_json(reply))
                    for place, (digest, reply) in fields["replies"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it does not describe replies: {error!r}") from error
