"""The parts of a run, and their order."""

import dataclasses
from typing import Any

from ...checkpoint import Checkpointer, MemoryTier
from ..folder.base_model import NamedBase
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.checkpointing import CheckpointSchedule
from ..recovery.emergency_save import EmergencySave
from ..recovery.hardware_probe import HardwareProbe
from ..recovery.interrupt import SignalHandler
from ..recovery.islands import Island
from ..recovery.rollback import RollbackController
from ..recovery.verification import SdcVerifier
from ..reporting.report import RunReporter
from .evaluation import PeriodicEvaluation
from .hook_runner import HookRunner
from .questions import PeriodicQuestions
from .rollout_batches import RolloutBatches
from .run_part import RunPart
from .step_batches import DataBatches, StepBatches


@dataclasses.dataclass(frozen=True)
class RunSaves:
    """Places in which a run saves its state: the store, and the memory of hosts if there is one.

    Attributes:
        base: Weights that are not saved, but named; None to save all.
    """

    checkpointer: Checkpointer
    memory: MemoryTier | None
    base: NamedBase | None = None


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run, with the values that they use.

    Attributes:
        batches: Batches of the steps.
        verifier: Takes the steps, and repeats some of them.
        interrupt: Signals that end the run.
        emergency: Saves before an exception ends the run.
        probe: Measurements of hosts and links.
        island: The exchange with other islands; None if there are none.
    """

    report: RunReporter
    batches: StepBatches[Any]
    rollback: RollbackController
    verifier: SdcVerifier
    interrupt: SignalHandler
    checkpoints: CheckpointSchedule
    emergency: EmergencySave
    questions: PeriodicQuestions
    evaluation: PeriodicEvaluation
    probe: HardwareProbe
    island: Island | None = None

    @classmethod
    def create(
        cls,
        prepared: PreparedRun,
        saves: RunSaves,
        rollback: RollbackController,
        report: RunReporter,
        interrupt: SignalHandler,
        island: Island | None,
        say: LogFn,
    ) -> "RunParts":
        """Create the parts that use others. Every process of the job calls it."""
        checkpoints = CheckpointSchedule(
            prepared.experiment.checkpoint, saves.checkpointer, saves.memory, rollback, report, saves.base
        )
        emergency = EmergencySave(checkpoints, rollback, report, say)
        has_rollouts = prepared.data.rollouts is not None
        batches = RolloutBatches(prepared, report, interrupt, say) if has_rollouts else DataBatches(prepared)
        return cls(
            report=report,
            batches=batches,
            rollback=rollback,
            verifier=SdcVerifier(prepared, report, rollback, say),
            interrupt=interrupt,
            checkpoints=checkpoints,
            emergency=emergency,
            questions=PeriodicQuestions(prepared, report, interrupt, emergency, say),
            evaluation=PeriodicEvaluation(prepared, batches, report, interrupt, emergency, say),
            probe=HardwareProbe(prepared, report),
            island=island,
        )

    def in_order(self, hooks: HookRunner) -> tuple[RunPart, ...]:
        """Return the parts in the order in which they act after a step.

        Scalars are read first, since they decide on a rollback, after which nothing else counts. Hooks see the scores of
        questions. An evaluation may be requested by a hook, and a save by both.
        """
        islands = () if self.island is None else (self.island,)
        before_hooks = (self.report, self.rollback, *islands, self.probe, self.batches, self.questions)
        return (*before_hooks, hooks, self.evaluation, self.checkpoints)
