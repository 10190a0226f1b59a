"""Compiled programs are kept on disk and read again, on any device, unless they are damaged; here in one process."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.compiling import cache as compiling
from panax.compiling.program_files import ProgramFiles
from panax.core import RecipeError, jax_internals

INPUT = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


class Kept:
    """A compiler in JAX's place, with its folder."""

    def __init__(self, folder):
        self.said: list[str] = []
        self.files = ProgramFiles(folder / "programs", "here", 1 << 30)
        self.compiler = compiling._Compiler(self.files, self.said.append)

    def run(self, device: int = 0):
        """(what a program gives, hits, misses), compiled or read by a fresh process's means."""
        jax.clear_caches()
        before = self.compiler.done
        found = jax.jit(lambda x: jnp.sin(x) @ x.T)(jax.device_put(INPUT, jax.devices()[device]))
        done = self.compiler.done
        assert found.devices() == {jax.devices()[device]}
        return np.asarray(found), done.hits - before.hits, done.misses - before.misses

    def file(self):
        [path] = self.files.folder.glob("*.program")
        return path


@pytest.fixture
def kept(tmp_path, monkeypatch):
    made = Kept(tmp_path)
    monkeypatch.setattr(jax_internals.compiler, "compile_or_get_cached", made.compiler)
    yield made
    jax.clear_caches()


def test_a_program_is_compiled_once_for_all_devices(kept):
    first, *counts = kept.run()
    assert counts == [0, 1] and kept.compiler.done.longest[0][0] == "jit__lambda"
    for device in (0, 3, 7):
        again, *counts = kept.run(device)
        assert counts == [1, 0]
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "of another kind"])
def test_a_damaged_program_is_never_run(kept, damage):
    first, *_ = kept.run()
    path = kept.file()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    text = {"flipped": bytes(data), "cut": bytes(data[:200]), "empty": b"", "of another kind": b"x" * 1000}[damage]
    path.write_bytes(text)
    again, *counts = kept.run()
    assert counts == [0, 1]
    assert len(kept.said) == 1 and "was damaged on disk, and is compiled again: jit__lambda" in kept.said[0]
    np.testing.assert_array_equal(again, first)
    assert kept.run()[1:] == (1, 0)


def test_a_program_that_jax_refuses_is_compiled_again(kept, monkeypatch):
    with monkeypatch.context() as patch:
        put = kept.files.put
        patch.setattr(kept.files, "put", lambda name, program: put(name, zlib.compress(b"not a program")))
        kept.run()
    _, *counts = kept.run()
    assert counts == [0, 1] and "could not be loaded, and is compiled again" in kept.said[0]
    assert kept.run()[1:] == (1, 0)


def test_a_folder_that_fills_up_is_one_line(kept, monkeypatch):
    def full(name, program):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.files, "put", full)
    assert kept.run()[1:] == (0, 1)
    assert kept.run()[1:] == (0, 1)
    assert len(kept.said) == 1 and "No space left on device" in kept.said[0]


def test_a_program_that_calls_python_is_not_kept(kept):
    seen: list[float] = []

    def told(x):
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return x * 2

    jax.clear_caches()
    for _ in range(2):
        jax.jit(told)(jnp.ones(3)).block_until_ready()
        jax.effects_barrier()
        jax.clear_caches()
    assert seen == [3.0, 3.0]
    assert [name for name, _ in kept.compiler.done.longest].count("jit_told") == 2


def test_what_is_compiled_for_devices_that_are_not_here_is_not_kept():
    assert jax_internals.is_cacheable(jax.devices()[0].client, ())
    assert not jax_internals.is_cacheable(object(), ())
    assert not jax_internals.is_cacheable(jax.devices()[0].client, (len,))


@pytest.mark.parametrize("text", ["-1", "much", "nan"])
def test_a_bound_that_is_none(text, monkeypatch):
    monkeypatch.setenv("PANAX_COMPILATION_CACHE_GB", text)
    with pytest.raises(RecipeError, match="PANAX_COMPILATION_CACHE_GB"):
        compiling.max_bytes()
