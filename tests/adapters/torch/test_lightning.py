"""Lightning modules train unchanged, as their own Trainer trains them."""

import warnings

import jax
import lightning
import numpy as np
import pytest
import torch
from torch import nn

import panax
from panax.adapters.lightning import fit_arguments
from panax.core.errors import RecipeError
from panax.data.loading.iterable import as_batch
from panax.train import StepConfig

UNCLIPPED = StepConfig(clip_norm=None)
STEPS = 6


class Classifier(lightning.LightningModule):
    """As Lightning's own introduction writes one, with BatchNorm, groups of parameters and a schedule."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_accuracy", (logits.argmax(-1) == y).float().mean(), prog_bar=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict({"val_loss": nn.functional.cross_entropy(self(x), y), "ones": 1.0})

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)] for _ in range(STEPS)
    ]


def test_trains_as_the_trainer_does(tmp_path):
    data = batches()
    theirs, module = Classifier(), Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers of the loader and a missing logger
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        trainer.fit(theirs, loader, val_dataloaders=loader)
    adapted, optimizer = fit_arguments(module, example=data[0], num_steps=STEPS)
    step = panax.compile_step(adapted, data[0], optimizer, config=UNCLIPPED, devices=jax.devices()[:1], num_steps=STEPS)
    state = step.init()
    for batch in data:
        state, metrics = step(state, batch)
        assert 0 <= float(metrics["train_accuracy"]) <= 1
    evaluated = step.evaluate(state, data)
    assert adapted.trained(state) is module and module._trainer is None
    for (name, ours), reference in zip(module.state_dict().items(), theirs.state_dict().values()):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5, err_msg=name)
    assert evaluated["loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-4)
    assert evaluated["val_loss"] == pytest.approx(evaluated["loss"]) and evaluated["ones"] == 1.0


def test_its_arguments_are_those_of_an_experiment():
    arguments = fit_arguments(Plain(), example=EXAMPLE, num_steps=7, check=False)
    experiment = panax.Experiment(**arguments, data=[np.ones((8, 4), np.float32)])
    task, optimizer = arguments
    assert (experiment.task, experiment.optimizer, experiment.num_steps) == (task, optimizer, 7)
    assert {**arguments} == {"task": task, "optimizer": optimizer, "num_steps": 7}
    with pytest.raises(KeyError):
        arguments["data"]
    mixed = fit_arguments(Plain(), example=EXAMPLE, num_steps=7, check=False, compute_dtype="bfloat16")
    for made, halved in ((arguments, False), (mixed, True)):
        step = panax.compile_step(example=EXAMPLE, devices=jax.devices()[:1], **made)
        assert ("bf16" in str(step.compiled.trace(as_batch(EXAMPLE)).jaxpr)) == halved


class Plain(lightning.LightningModule):
    """The least that there can be; without a validation step, and without a batch_idx."""

    def __init__(self, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1)):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 1), optimizer

    def training_step(self, batch):
        return (self.layer(batch) ** 2).mean()

    def configure_optimizers(self):
        return self.make(self)


EXAMPLE = torch.ones(8, 4)


def test_forms_of_configure_optimizers():
    lr = torch.optim.lr_scheduler

    def of(form):
        def make(module):
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            return form(optimizer, lr.StepLR(optimizer, 1, 0.5))

        module = Plain(make)
        made = fit_arguments(module, example=EXAMPLE, num_steps=8, steps_per_epoch=4, check=False).optimizer
        return [round(float(made.learning_rate(8)(step)), 4) for step in (0, 3, 4)]

    assert of(lambda o, s: o) == of(lambda o, s: [o]) == [0.1, 0.1, 0.1]
    assert of(lambda o, s: ([o], [s])) == of(lambda o, s: {"optimizer": o, "lr_scheduler": s}) == [0.1, 0.1, 0.05]
    every_third = lambda o, s: [{"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step", "frequency": 3}}]  # noqa: E731
    assert of(every_third) == [0.1, 0.05, 0.05]


class ByHand(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.layer.weight.data.clamp_(-1, 1)


class OfEpochs(Plain):
    def training_step(self, batch):
        return super().training_step(batch) * (1 + self.current_epoch)


class Lossless(Plain):
    def training_step(self, batch):
        self.log("loss", (self.layer(batch) ** 2).mean())


class LogsObjects(Plain):
    def training_step(self, batch):
        self.log("all", [1.0])
        return super().training_step(batch)


class OfSums(Plain):
    def training_step(self, batch):
        self.log("all", 1.0, reduce_fx="sum")
        return super().training_step(batch)


def two(module):
    return [torch.optim.SGD([module.layer.weight], 0.1), torch.optim.SGD([module.layer.bias], 0.1)]


def epochs(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


REFUSED = {
    "by hand": (ByHand, "ByHand optimizes by hand"),
    "hook": (Hooked, "Hooked overrides on_train_batch_end, which nothing calls"),
    "epoch": (OfEpochs, "OfEpochs asks its Trainer for 'current_epoch'"),
    "no loss": (Lossless, r"training_step gave no loss \(NoneType\)"),
    "log": (LogsObjects, "self.log.'all'. is given a list"),
    "sum": (OfSums, "reduce_fx='sum'"),
    "two optimizers": (lambda: Plain(two), "returned SGD, SGD; expected one optimizer"),
    "no optimizer": (lambda: Plain(lambda module: None), "returned NoneType"),
    "epochs": (lambda: Plain(epochs), "the StepLR counts epochs.*pass steps_per_epoch"),
    "rprop": (lambda: Plain(lambda m: torch.optim.Rprop(m.parameters())), "Rprop is not translated"),
    "no lightning": (lambda: nn.Linear(4, 1), "Linear; expected a LightningModule"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(RecipeError, match=message):
        fit_arguments(make(), example=EXAMPLE, num_steps=4, check=False)


def test_a_hook_may_be_ignored_by_name():
    fit_arguments(Hooked(), example=EXAMPLE, num_steps=4, check=False, ignore=["on_train_batch_end"])
    with pytest.raises(RecipeError, match="overrides no hook 'on_fit_end'"):
        fit_arguments(Hooked(), example=EXAMPLE, num_steps=4, check=False, ignore=["on_fit_end"])


class Alternating(Plain):
    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch) ** 2).mean()
        return loss if batch_idx % 2 else 2 * loss


class Named(Plain):
    def training_step(self, batch, batch_idx):
        self.log(f"loss_{batch_idx}", 1.0)
        return (self.layer(batch) ** 2).mean()


class Scaled(Plain):
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) ** 2).mean() * torch.exp(-torch.tensor(1.0) * batch_idx)


class HandsOn(Plain):
    def shared(self, batch, batch_idx=None):
        return (self.layer(batch) ** 2).mean()

    def training_step(self, batch, batch_idx):
        return self.shared(batch, batch_idx)


@pytest.mark.parametrize("module", [Alternating, Named, Scaled])
def test_a_step_that_computes_with_the_number_of_its_batch_is_refused(module):
    with pytest.raises(RecipeError, match=r"computes or branches with batch_idx.*leaf of the batch"):
        fit_arguments(module(), example=EXAMPLE, num_steps=4, check=False)
    fit_arguments(module(), example=EXAMPLE, num_steps=4, check=False, ignore=["batch_idx"])


def test_the_number_of_a_batch_may_be_handed_on():
    fit_arguments(HandsOn(), example=EXAMPLE, num_steps=4)


class Normed(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], ignore_index=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def test_accumulation_is_lightnings_where_the_rows_alternate(tmp_path):
    """Row r of a batch goes to micro-batch r % micro_batches, as in docs/models/lightning.md."""
    data = batches()
    theirs, module = Normed(), Normed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=STEPS // 2, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(theirs, torch.utils.data.DataLoader(data, batch_size=None))
    all_batches = [
        [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*pair)]
        for pair in zip(data[::2], data[1::2], strict=True)
    ]
    arguments = fit_arguments(module, example=all_batches[0], num_steps=STEPS // 2)
    step = panax.compile_step(
        example=all_batches[0],
        config=StepConfig(clip_norm=None, micro_batches=2),
        devices=jax.devices()[:1],
        **arguments,
    )
    state = step.init()
    for batch in all_batches:
        state, _ = step(state, batch)
    arguments.task.trained(state)
    for (name, ours), reference in zip(module.state_dict().items(), theirs.state_dict().values()):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5, err_msg=name)


class ValidatesByNumber(Plain):
    def validation_step(self, batch, batch_idx):
        return self.training_step(batch) * (1 + (batch_idx == 0))


def test_an_evaluation_that_would_be_refused_is_reported_at_once():
    arguments = fit_arguments(ValidatesByNumber(), example=EXAMPLE, num_steps=4)
    (note,) = arguments.task.notes
    assert note.startswith("an evaluation would be refused: ValidatesByNumber computes or branches with batch_idx")
    assert not fit_arguments(ValidatesByNumber(), example=EXAMPLE, num_steps=4, ignore=["batch_idx"]).task.notes
