"""Seconds of a GRPO step on sums, in Panax and in TRL, from the same weights: interleaved, each side in a process of its own.

The model of sft_arithmetic is exported, and TRL reads it. Both draw 8 answers of at most 5 tokens to each of 32 prompts, reward
them by the same function, and make one AdamW update at the same rate. The first steps, which compile, are not counted.

    python benchmarks/grpo_step.py WEIGHTS [--rounds 3] [--steps 25]
    python benchmarks/grpo_step.py --drawn [--rounds 2] [--steps 6]

WEIGHTS is a run of sft_arithmetic. With `--drawn` the model has the shape of SmolLM2-135M with random weights, which are as fast
as any: 4 answers of 48 tokens to each of 4 prompts. With `--paged` TRL generates by transformers' continuous batching.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED = 5
"""First steps, which are not counted."""

RATE = 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="?", default="")
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--paged", action="store_true")
    parser.add_argument("--side", choices=["panax", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        seconds = (panax_steps if options.side == "panax" else trl_steps)(options)
        print(json.dumps(seconds))
        return
    if bool(options.weights) == options.drawn:
        parser.error("name a run of sft_arithmetic, or pass --drawn")
    with tempfile.TemporaryDirectory() as folder:
        exported = str(Path(folder) / "exported")
        if options.drawn:
            draw_weights(exported)
        else:
            subprocess.run([sys.executable, "-m", "panax", "export", options.weights, exported], check=True)
        medians: dict[str, list[float]] = {"panax": [], "trl": []}
        for _ in range(options.rounds):
            for side, weights in (("panax", options.weights or exported), ("trl", exported)):
                flags = ["--steps", str(options.steps), "--side", side, *(["--paged"] if options.paged else [])]
                flags += ["--drawn"] if options.drawn else []
                done = subprocess.run(
                    [sys.executable, __file__, weights, *flags], check=True, capture_output=True, text=True
                )
                medians[side].append(statistics.median(json.loads(done.stdout.splitlines()[-1])))
                print(f"{side:6} {medians[side][-1]:.3f} s a step", flush=True)
    ratios = [trl / panax for panax, trl in zip(medians["panax"], medians["trl"], strict=True)]
    print(f"TRL takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")


def draw_weights(folder: str) -> None:
    """Write a model of SmolLM2-135M's shape with random weights, and the tokenizer of the sums, as transformers reads them."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from panax_recipes.sums import sums_folder

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(sums_folder() / "tokenizer")).save_pretrained(folder)


def sizes(options: argparse.Namespace) -> tuple[int, int, int]:
    """Return the numbers of prompts, of answers to each, and of tokens of an answer."""
    return (4, 4, 48) if options.drawn else (32, 8, 5)


def panax_steps(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each step."""
    import panax
    from panax.adapters.huggingface import config_from
    from panax.hooks import Hook
    from panax.models import DecoderTask, PolicyGradient
    from panax.optim import AdamW, Schedule
    from panax.run import EvaluateConfig, QuestionConfig
    from panax_recipes.grpo_arithmetic import grpo_arithmetic

    ends: list[float] = []

    class Times(Hook):
        def after_step(self, run: Any) -> None:
            ends.append(time.perf_counter())

    prompts, samples, tokens = sizes(options)
    recipe = grpo_arithmetic()
    if options.drawn:
        recipe = dataclasses.replace(
            recipe, task=DecoderTask(model=config_from(options.weights), objective=PolicyGradient())
        )
    data = dataclasses.replace(recipe.data, batch_size=prompts, samples=samples, tokens=tokens, rows=prompts * samples)
    with tempfile.TemporaryDirectory() as folder:
        experiment = dataclasses.replace(
            recipe,
            data=data,
            directory=folder,
            init=f"{'hf' if options.drawn else 'checkpoint'}:{options.weights}",
            num_steps=options.steps,
            optimizer=AdamW(schedule=Schedule(peak=RATE, decay="constant"), weight_decay=0.0),
            evaluate=EvaluateConfig(every=0),
            questions=QuestionConfig(),
            hooks=(Times(),),
        )
        panax.fit(experiment, quiet=True)
    skipped = 1 if options.drawn else SKIPPED
    return [after - before for before, after in zip(ends[skipped:], ends[skipped + 1 :], strict=False)]


def trl_steps(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from panax_recipes.sums import is_right, sums_folder

    ends: list[float] = []

    class Times(TrainerCallback):
        def on_step_end(self, *arguments: Any, **settings: Any) -> None:
            ends.append(time.perf_counter())

    records = [json.loads(line) for line in (sums_folder() / "prompts.jsonl").read_text().splitlines()]

    def reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
        pairs = [(text, {"answer": each}) for text, each in zip(completions, answer, strict=True)]
        return [is_right(*pair) for pair in pairs]

    prompts, samples, tokens = sizes(options)
    tokenizer = AutoTokenizer.from_pretrained(options.weights)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=prompts * samples,
            num_generations=samples,
            max_completion_length=tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=options.steps,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            use_transformers_paged=options.paged,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.weights),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(records),
            processing_class=tokenizer,
            callbacks=[Times()],
        )
        trainer.train()
    skipped = 1 if options.drawn else SKIPPED
    return [after - before for before, after in zip(ends[skipped:], ends[skipped + 1 :], strict=False)]


if __name__ == "__main__":
    main()
