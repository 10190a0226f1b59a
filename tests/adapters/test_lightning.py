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
from panax.data.iterable import as_batch
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
    "epochs": (lambda: Plain(epochs), "the StepLR counts epochs.*give steps_per_epoch"),
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
