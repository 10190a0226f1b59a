"""Parts of a training step: everything optional, one file each; `assembly.py` lists those of a program."""
