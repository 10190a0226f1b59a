"""PyTorch as its users write it: `transformers`' model, `torch.optim`, a plain loop."""

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, MixtralForCausalLM, ViTForImageClassification

from ...workload.compared_work import Batch, ComparedWork, use_weight_decay
from .. import RunningColumn
from .torch_device import make_running_column, torch_dtype

MODELS = {"vit": ViTForImageClassification, "llama": LlamaForCausalLM, "mixtral": MixtralForCausalLM}
ATTENTION = {"eager": "eager", "fused": "sdpa"}


def build(work: ComparedWork) -> torch.nn.Module:
    """Build the model with the work's weights."""
    dtype = torch_dtype(work.precision.stored)
    model = MODELS[work.family].from_pretrained(
        work.folder, attn_implementation=ATTENTION[work.attention], dtype=dtype, local_files_only=True
    )
    return model.train()


def compute_loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the mean cross-entropy of a batch, in float32."""
    if "image" in batch:
        return functional.cross_entropy(module(batch["image"]).logits.float(), batch["label"])
    logits = module(input_ids=batch["tokens"], use_cache=False).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_optimizer(work: ComparedWork, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Create AdamW or SGD; norms and biases don't decay."""
    numbers = work.optimizer
    if numbers.name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=numbers.learning_rate, fused=True)
    groups = [
        {
            "params": [p for name, p in module.named_parameters() if use_weight_decay(name)],
            "weight_decay": numbers.weight_decay,
        },
        {"params": [p for name, p in module.named_parameters() if not use_weight_decay(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=numbers.learning_rate, betas=(numbers.b1, numbers.b2), eps=numbers.epsilon, fused=True
    )


def to_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Convert a batch to the form of PyTorch's models: channels first, labels of 64 bits."""
    tensors = {name: torch.from_numpy(leaf) for name, leaf in batch.items()}
    return {
        name: leaf.permute(0, 3, 1, 2).contiguous() if name == "image" else leaf.long()
        for name, leaf in tensors.items()
    }


def prepare(work: ComparedWork, compile: bool = False) -> RunningColumn:
    """Prepare a step: forward, under autocast if precision is mixed, backward, update."""
    if work.family == "dlrm":
        from . import torch_dlrm

        return torch_dlrm.prepare(work)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = build(work).to(device)
    optimizer = make_optimizer(work, module)
    compute = torch.compile(compute_loss) if compile else compute_loss
    mixed = work.precision.is_mixed

    def put(batch: Batch) -> dict[str, torch.Tensor]:
        dtype = torch_dtype(work.precision.stored)
        leaves = to_tensors(batch)
        return {name: leaf.to(device, dtype if name == "image" else leaf.dtype) for name, leaf in leaves.items()}

    def loss_in_precision(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            return compute(module, batch)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_in_precision(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return make_running_column(work, device, module, put, step, loss_in_precision)
