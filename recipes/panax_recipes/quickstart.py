"""A first run, on text that every machine already has."""

from panax.data import BytePairTokenizer, PythonLibrary, TextData
from panax.hooks import Samples
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment


def quickstart() -> Experiment:
    """Train a small decoder on the functions and classes of Python's standard library.

    Small enough for many steps in little time: it learns to write what looks like Python, indented as it should be.

    Command: panax train quickstart
    Hardware: two CPU cores (AMD EPYC, AVX-512); 3 min 3 s in all, at 17,000 to 23,000 tokens/s.
    Expected: held-out loss 2.58, 1.264 bits per byte, after 1,600 steps, where token frequencies alone give 5.77 (sources of
    Python 3.11.7). Of 20 samples, 17 are tokens and hold an indented block (benchmarks/quickstart.py).
    """
    # A window as long as the rows: distances that it was trained on, however long the text is that it writes.
    model = DecoderConfig(max_length=1024, windows=(128,), embed=192, num_layers=4, heads=4, ffn=512, qk_norm=True)
    return Experiment(
        name="quickstart",
        task=DecoderTask(model=model, compute_dtype="auto"),
        data=TextData(
            corpus=PythonLibrary(definitions=True),
            tokenizer=BytePairTokenizer(vocab_size=1024),
            sequence_length=128,
            batch_size=16,
        ),
        optimizer=AdamW(b2=0.98, schedule=Schedule(peak=5e-3, warmup_steps=50, decay="linear", final=0.0)),
        num_steps=1600,
        evaluate=EvaluateConfig(every=400),
        log_every=100,
        hooks=(Samples(every=400, prompts=("def", "class"), tokens=96, temperature=0.9),),
    )
