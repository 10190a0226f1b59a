"""A first run, on text that every machine already has."""

from panax.data import BytePairTokenizer, PythonLibrary, TextData
from panax.hooks import Samples
from panax.models import DecoderConfig, DecoderTask
from panax.optim import Muon, Schedule
from panax.run import EvaluateConfig, Experiment


def quickstart() -> Experiment:
    """Train a small decoder on the functions and classes of Python's standard library.

    Small enough for many steps in little time: it learns to write what looks like Python, indented as it should be.

    Command: panax train quickstart
    Hardware: two CPU cores (AMD EPYC); 1 min 56 s in all with AVX-512, at 20,000 to 25,000 tokens/s, 3 min 25 s
    if limited to AVX2.
    Expected: held-out loss 2.33, 1.139 bits per byte, after 550 steps, where token frequencies alone give 5.77 (sources of
    Python 3.11.7). Of 60 samples over three seeds, 45 are tokens and hold an indented block (benchmarks/quickstart.py).
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
            batch_size=32,
        ),
        # Rows of 32 and three iterations for each matrix: on a CPU, Muon's own products are then a tenth of a step.
        optimizer=Muon(
            dtype="float32",
            iterations=3,
            b2=0.98,
            schedule=Schedule(peak=1e-2, warmup_steps=25, decay="linear", final=0.0),
        ),
        num_steps=550,
        evaluate=EvaluateConfig(every=110),
        log_every=50,
        hooks=(Samples(every=110, prompts=("def", "class"), tokens=96, temperature=0.9),),
    )
