"""The PyTorch side of the published comparison: a ViT on noise, SGD, and the requested flaws."""

import time

import torch

from ...measure.cores import usable_cores
from ...workload.compared_work import ComparedWork
from ...workload.precision import Precision
from .torch_device import set_precision
from .torch_eager import build, compute_loss, make_optimizer, to_tensors


def train(work: ComparedWork, flaws: tuple[str, ...], steps: int, rounds: int) -> dict[str, list[float]]:
    """Train, and measure time as the script does.

    Returns:
        `seconds` of a step, by the script's clock, for each round; and `losses` of the steps before the clock
        starts.
    """
    set_precision(Precision.F32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(usable_cores())
    module = build(work).to(device)
    optimizer = make_optimizer(work, module)
    batches = [{name: leaf.to(device) for name, leaf in to_tensors(batch).items()} for batch in work.batches()]
    classes = len(work.config()["id2label"])

    def drawn() -> dict[str, torch.Tensor]:
        image, label = batches[0]["image"], batches[0]["label"]
        return {
            "image": torch.randn(image.shape, device=device),
            "label": torch.randint(0, classes, label.shape, device=device),
        }

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute_loss(module, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    losses = [float(step(batch)) for batch in batches]
    seconds = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for n in range(steps):
            step(drawn() if "data" in flaws else batches[n % len(batches)])
        if "clock" not in flaws:
            wait()
        seconds.append((time.perf_counter() - start) / steps)
    return {"seconds": seconds, "losses": losses}
