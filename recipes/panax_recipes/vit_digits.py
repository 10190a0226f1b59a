"""A first run on images that come with a library."""

from panax.data import Augmentation, Digits, ExampleData, Mixing, PaddedCrop
from panax.models import VitConfig, VitTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def vit_digits() -> Experiment:
    """Train a small vision transformer on scikit-learn's handwritten digits: real images, and nothing to download.

    A fifth of the 1,797 images is held out, always the same. The others are shifted by up to a pixel and mixed with each other;
    what is judged is a running average of the parameters.

    Command: panax train vit_digits
    Hardware: two CPU cores, 1 min 21 s in all, at 2,500 images/s.
    Expected: 98.9 % of the 363 held-out images after 900 steps, 98.6 % after 300.
    """
    model = VitConfig(image_size=8, channels=1, patch=4, embed=96, num_layers=4, heads=4, ffn=288, pooling="mean")
    return Experiment(
        name="vit_digits",
        task=VitTask(model=model, label_smoothing=0.1),
        data=ExampleData(
            examples=Digits(),
            batch_size=128,
            held_out=0.2,
            augmentation=Augmentation(
                crop=PaddedCrop(padding=1), flip=0.0, mixing=Mixing(mixup=0.4, cutmix=1.0, probability=0.8)
            ),
        ),
        optimizer=AdamW(schedule=Schedule(peak=2e-3, warmup_steps=50)),
        num_steps=900,
        step=StepConfig(ema_decay=0.995),
        evaluate=EvaluateConfig(every=300),
        log_every=100,
    )
