"""PyTorch models that were written for PyTorch alone: those of `transformers` as they are, and plain ones as one writes them.

`build(name, "tiny")` is for tests, `build(name, "small")` for benchmarks. Each is drawn from a fixed seed.
"""

import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

with contextlib.redirect_stderr(io.StringIO()):
    import transformers as hf

hf.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.ERROR)


@dataclasses.dataclass(frozen=True)
class Size:
    """Of every model: width, feed-forward width, layers, heads, vocabulary, positions, pixels, rows."""

    width: int
    ffn: int
    layers: int
    heads: int
    vocab: int
    length: int
    pixels: int
    rows: int


SIZES = {
    "tiny": Size(width=32, ffn=64, layers=2, heads=4, vocab=64, length=16, pixels=32, rows=4),
    "small": Size(width=256, ffn=1024, layers=4, heads=4, vocab=4096, length=128, pixels=64, rows=8),
}

Loss = Callable[..., Any] | None


def build(name: str, size: str) -> tuple[nn.Module, Loss, Any]:
    """(module, loss, batch)."""
    torch.manual_seed(0)
    return MODELS[name](SIZES[size])


def ids(s: Size) -> torch.Tensor:
    return torch.randint(0, s.vocab, (s.rows, s.length))


def language(s: Size) -> dict[str, torch.Tensor]:
    tokens = ids(s)
    return {"input_ids": tokens, "labels": tokens}


def images(s: Size) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(s.rows, 3, s.pixels, s.pixels), "labels": torch.randint(0, 10, (s.rows,))}


def common(s: Size) -> dict[str, int]:
    return {
        "vocab_size": s.vocab,
        "hidden_size": s.width,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
    }


def llama(s: Size) -> Any:
    config = hf.LlamaConfig(**common(s), num_key_value_heads=2, max_position_embeddings=s.length)
    return hf.LlamaForCausalLM(config), None, language(s)


def qwen3(s: Size) -> Any:
    config = hf.Qwen3Config(**common(s), num_key_value_heads=2, head_dim=s.width // s.heads)
    return hf.Qwen3ForCausalLM(config), None, language(s)


def mixtral(s: Size) -> Any:
    config = hf.MixtralConfig(**common(s), num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    return hf.MixtralForCausalLM(config), None, language(s)


def gpt2(s: Size) -> Any:
    config = hf.GPT2Config(
        vocab_size=s.vocab, n_positions=s.length, n_embd=s.width, n_layer=s.layers, n_head=s.heads, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), None, language(s)


def bert(s: Size) -> Any:
    tokens = ids(s)
    batch = {
        "input_ids": tokens,
        "attention_mask": (torch.arange(s.length) < s.length - torch.arange(s.rows)[:, None]).long(),
        "labels": torch.where(tokens % 3 == 0, tokens, -100),
    }
    return hf.BertForMaskedLM(hf.BertConfig(**common(s), max_position_embeddings=s.length)), None, batch


def t5(s: Size) -> Any:
    config = hf.T5Config(
        vocab_size=s.vocab, d_model=s.width, d_ff=s.ffn, d_kv=s.width // s.heads, num_layers=s.layers, num_heads=s.heads,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), None, language(s)


def vit(s: Size) -> Any:
    settings = {k: v for k, v in common(s).items() if k != "vocab_size"}
    config = hf.ViTConfig(**settings, image_size=s.pixels, patch_size=8, num_labels=10)
    return hf.ViTForImageClassification(config), None, images(s)


def swin(s: Size) -> Any:
    config = hf.SwinConfig(
        image_size=s.pixels, patch_size=2, embed_dim=s.width // 4, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10
    )  # fmt: skip
    return hf.SwinForImageClassification(config), None, images(s)


def whisper(s: Size) -> Any:
    config = hf.WhisperConfig(
        vocab_size=s.vocab, d_model=s.width, encoder_layers=s.layers, decoder_layers=s.layers, encoder_attention_heads=s.heads,
        decoder_attention_heads=s.heads, encoder_ffn_dim=s.ffn, decoder_ffn_dim=s.ffn, max_source_positions=s.length,
        max_target_positions=s.length, num_mel_bins=16, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    features = torch.randn(s.rows, 16, 2 * s.length)
    return hf.WhisperForConditionalGeneration(config), None, {"input_features": features, "labels": ids(s)}


def mamba(s: Size) -> Any:
    config = hf.MambaConfig(
        vocab_size=s.vocab, hidden_size=s.width, state_size=4, num_hidden_layers=2, use_mambapy=False
    )
    tokens = ids(s)[:, :32]
    return hf.MambaForCausalLM(config), None, {"input_ids": tokens, "labels": tokens}


def resnet(s: Size) -> Any:
    config = hf.ResNetConfig(
        embedding_size=s.width // 2, hidden_sizes=[s.width // 2, s.width], depths=[2, 2], layer_type="basic", num_labels=10
    )  # fmt: skip
    return hf.ResNetForImageClassification(config), None, images(s)


class Basic(nn.Module):
    """A residual block, as torchvision's ResNet-18 has it."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class PlainResNet(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            Basic(width, width, 1), Basic(width, 2 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
        )  # fmt: skip


def plain_resnet(s: Size) -> Any:
    return PlainResNet(s.width // 4), nn.CrossEntropyLoss(), tuple(images(s).values())


class Recurrent(nn.Module):
    def __init__(self, kind: type, s: Size):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.layers = kind(s.width, s.width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(s.width, s.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))[0]).transpose(1, 2)


def lstm(s: Size) -> Any:
    tokens = ids(s)
    return Recurrent(nn.LSTM, s), nn.CrossEntropyLoss(), (tokens, tokens)


def gru(s: Size) -> Any:
    tokens = ids(s)[:, :32]
    return Recurrent(nn.GRU, s), nn.CrossEntropyLoss(), (tokens, tokens)


class Encoder(nn.Module):
    def __init__(self, s: Size):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        layer = nn.TransformerEncoderLayer(s.width, s.heads, s.ffn, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, s.layers), nn.Linear(s.width, s.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def encoder(s: Size) -> Any:
    tokens = ids(s)
    return Encoder(s), nn.CrossEntropyLoss(), (tokens, tokens[:, 0])


def double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 2 * width)
        self.up2, self.lift = double(4 * width, width), nn.ConvTranspose2d(width, width, 2, stride=2)
        self.up1, self.head = double(2 * width, width), nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.middle(F.max_pool2d(two, 2))
        low = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up1(torch.cat([self.lift(self.up2(torch.cat([low, two], 1))), one], 1)))


def unet(s: Size) -> Any:
    pixels = torch.randn(s.rows, 3, s.pixels, s.pixels)
    return UNet(s.width // 8 * 2), nn.CrossEntropyLoss(), (pixels, torch.randint(0, 4, (s.rows, s.pixels, s.pixels)))


class DLRM(nn.Module):
    """A recommender (arXiv:1906.00091): embeddings of categories, their products with a dense part, a small network on top."""

    def __init__(self, s: Size):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(s.vocab, s.width // 4, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, s.width), nn.ReLU(), nn.Linear(s.width, s.width // 4))
        self.top = nn.Sequential(nn.Linear(s.width // 4 + 10, s.width), nn.ReLU(), nn.Linear(s.width, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))[:, 0]


def dlrm(s: Size) -> Any:
    rows = s.rows * 16
    batch = {
        "dense": torch.randn(rows, 13),
        "sparse": torch.randint(0, s.vocab, (rows, 4)),
        "label": torch.randint(0, 2, (rows,)).float(),
    }

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(module(batch["dense"], batch["sparse"]), batch["label"])

    return DLRM(s), loss, batch


MODELS = {
    function.__name__: function
    for function in (
        llama, qwen3, mixtral, gpt2, bert, t5, vit, swin, whisper, mamba, resnet, plain_resnet, lstm, gru, encoder, unet, dlrm,
    )
}  # fmt: skip


def loss_of(loss: Loss) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The loss as a plain PyTorch loop computes it."""
    if loss is None:
        return lambda module, batch: module(**batch).loss
    if isinstance(loss, nn.Module):
        return lambda module, batch: loss(module(batch[0]), batch[1])
    return loss
