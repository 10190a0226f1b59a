"""Convolutions by the C files and as sums of shifted arrays, against XLA's in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core.layout.target import Target
from panax.kernels.convolution import (
    ConvolutionGeometry,
    choose_convolution,
    convolution_input_gradient,
    convolution_weight_gradient,
    convolve,
    describe_case,
    output_shape,
)
from panax.kernels.cpu.choice import CpuKernels, use_temporarily
from panax.kernels.cpu.native import OWN, unavailable_reason
from panax.kernels.registry import list_kernels

needs_library = pytest.mark.skipif(
    unavailable_reason(OWN, "float32") is not None, reason=str(unavailable_reason(OWN, "float32"))
)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A convolution: images, channels of a group, places, and its geometry."""

    places: tuple[int, ...]
    taps: tuple[int, ...]
    images: int = 2
    inputs: int = 3
    outputs: int = 5
    groups: int = 1
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: int = 1
    input_dilation: int = 1

    @property
    def geometry(self) -> ConvolutionGeometry:
        axes = len(self.places)
        return ConvolutionGeometry(
            stride=(self.stride,) * axes,
            padding=(self.padding,) * axes,
            dilation=(self.dilation,) * axes,
            input_dilation=(self.input_dilation,) * axes,
            groups=self.groups,
        )

    def draw(self, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the input, the weights and the output's gradient."""
        draw = np.random.default_rng(7).standard_normal
        x = draw((self.images, self.groups * self.inputs, *self.places))
        w = draw((self.groups * self.outputs, self.inputs, *self.taps))
        d_out = draw((self.images, w.shape[0], *output_shape(x.shape, w.shape, self.geometry)))
        return x.astype(dtype), w.astype(dtype), d_out.astype(dtype)


CASES = {
    "square": Shapes((9, 11), (3, 3), padding=(1, 1)),
    "one_tap": Shapes((5, 7), (1, 1), inputs=17, outputs=13),
    "one_tap_with_stride": Shapes((7, 8), (1, 1), stride=2),
    "stride": Shapes((12, 13), (3, 3), stride=2, padding=(1, 1)),
    "stride_beyond_the_filter": Shapes((13, 11), (2, 2), stride=3),
    "large_filter": Shapes((19, 20), (7, 7), stride=2, padding=(3, 3), outputs=40),
    "dilated": Shapes((17, 15), (3, 3), dilation=3, padding=(3, 3)),
    "dilated_with_stride": Shapes((17, 15), (3, 2), dilation=2, stride=2, padding=(2, 2)),
    "transposed": Shapes((6, 5), (2, 2), input_dilation=2, padding=(1, 1)),
    "transposed_with_overlap": Shapes((6, 5), (4, 4), input_dilation=2, padding=(2, 3)),
    "transposed_with_gaps": Shapes((5, 6), (2, 2), input_dilation=3, padding=(1, 2)),
    "transposed_and_dilated": Shapes((6, 5), (3, 3), input_dilation=2, dilation=2, padding=(4, 4)),
    "cropped": Shapes((11, 12), (3, 3), padding=(-1, -2)),
    "groups": Shapes((8, 9), (3, 3), groups=3, inputs=4, outputs=6, padding=(1, 1)),
    "deep": Shapes((6, 6), (3, 3), inputs=70, outputs=33, padding=(1, 1)),
    "wide": Shapes((40, 41), (2, 2), images=1, inputs=2, outputs=150),
    "many_small_images": Shapes((2, 2), (3, 3), images=37, inputs=20, outputs=30, padding=(1, 1)),
    "line": Shapes((50,), (5,), padding=(2, 2), inputs=8, outputs=9),
    "causal_line": Shapes((33,), (4,), padding=(3, 0), inputs=4, outputs=7),
    "volume": Shapes((5, 6, 7), (3, 2, 3), padding=(1, 1), stride=2),
    "one_image_of_one_place": Shapes((1, 1), (1, 1), images=1, inputs=1, outputs=4),
    "no_image": Shapes((4, 4), (3, 3), images=0),
    "no_output_place": Shapes((2, 2), (3, 3)),
}
DEPTHWISE = {
    "line": Shapes((33,), (4,), padding=(3, 3), groups=12, inputs=1, outputs=1),
    "square": Shapes((9, 11), (3, 3), padding=(1, 1), groups=5, inputs=1, outputs=1),
    "stride_and_dilation": Shapes(
        (14, 11), (3, 3), padding=(2, 2), groups=5, inputs=1, outputs=1, stride=2, dilation=2
    ),
    "cropped": Shapes((9, 11), (2, 3), padding=(-1, 2), groups=5, inputs=1, outputs=1),
}


def references(case: Shapes) -> list[np.ndarray]:
    """The output and both gradients, by XLA in float64."""
    x, w, d_out = case.draw()
    geometry = case.geometry
    with jax.enable_x64(True):
        forward = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
            x, w, geometry.stride, geometry.padding, geometry.input_dilation, geometry.dilation,
            feature_group_count=geometry.groups,
        )  # fmt: skip
        out, transpose = jax.vjp(forward, jnp.asarray(x), jnp.asarray(w))
        return [np.asarray(each) for each in (out, *transpose(jnp.asarray(d_out)))]


def terms(case: Shapes) -> tuple[int, int, int]:
    """The most products that a number of the output, or of either gradient, is the sum of."""
    taps = int(np.prod(case.taps))
    d_out = case.draw()[2]
    return taps * case.inputs, taps * case.outputs, case.images * max(int(np.prod(d_out.shape[2:])), case.places[0])


def check(found: list[np.ndarray], case: Shapes) -> None:
    for ours, expected, count in zip(found, references(case), terms(case), strict=True):
        assert ours.shape == expected.shape
        # A sum of n products, each at most 4 squared, of which each partial sum is rounded: n roundings of about the root of n.
        allowed = 16 * np.finfo(np.float32).eps * (count + 1)
        assert np.abs(ours - expected).max(initial=0.0) <= allowed


def run(name: str, case: Shapes, dtype: type = np.float32) -> list[np.ndarray]:
    x, w, d_out = (jnp.asarray(each) for each in case.draw(dtype))
    functions = next(each for each in list_kernels("convolution") if each.name == name).run
    return [
        np.asarray(jax.jit(functions.forward, static_argnums=2)(x, w, case.geometry)),
        np.asarray(jax.jit(functions.input_gradient, static_argnums=(2, 3))(d_out, w, x.shape, case.geometry)),
        np.asarray(jax.jit(functions.weight_gradient, static_argnums=(2, 3))(x, d_out, w.shape, case.geometry)),
    ]


@needs_library
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_files_equal_float64(case: Shapes) -> None:
    check(run(OWN, case), case)


@pytest.mark.parametrize("case", DEPTHWISE.values(), ids=DEPTHWISE)
def test_shifted_arrays_equal_float64(case: Shapes) -> None:
    check(run("shifted", case), case)


@needs_library
def test_an_image_does_not_depend_on_the_others() -> None:
    case = CASES["many_small_images"]
    x, w, _ = case.draw(np.float32)
    forward = next(each for each in list_kernels("convolution") if each.name == OWN).run.forward
    together = np.asarray(forward(jnp.asarray(x), jnp.asarray(w), case.geometry))
    for image in (0, 17, 36):
        alone = np.asarray(forward(jnp.asarray(x[image : image + 1]), jnp.asarray(w), case.geometry))
        assert np.array_equal(alone[0], together[image])


@needs_library
def test_what_is_not_finite_stays_where_it_is_read() -> None:
    """Padding is zero even beside NaN, and no place that a filter does not read is touched."""
    x, w = np.ones((1, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
    x[0, 2, 5, 5] = np.nan
    x[0, 1, 0, 0] = np.inf
    forward = next(each for each in list_kernels("convolution") if each.name == OWN).run.forward
    out = np.asarray(forward(jnp.asarray(x), jnp.asarray(w), Shapes((6, 6), (3, 3), padding=(1, 1)).geometry))
    expected = np.zeros((6, 6), bool)
    expected[4:, 4:] = True
    assert np.array_equal(np.isnan(out[0, 0]), expected)
    assert np.array_equal(np.isinf(out[0, 0]), expected[::-1, ::-1])
    assert out[0, 3, 2, 2] == 36


@needs_library
def test_bfloat16_is_multiplied_exactly() -> None:
    """Products of bfloat16 are exact in float32, so only the order of summing differs."""
    case = CASES["stride"]
    x, w, d_out = (jnp.asarray(each, jnp.bfloat16) for each in case.draw())
    functions = next(each for each in list_kernels("convolution") if each.name == OWN).run
    widened = [each.astype(jnp.float32) for each in (x, w, d_out)]
    assert np.array_equal(functions.forward(x, w, case.geometry), functions.forward(*widened[:2], case.geometry))
    assert np.array_equal(
        functions.weight_gradient(x, d_out, w.shape, case.geometry),
        functions.weight_gradient(widened[0], widened[2], w.shape, case.geometry),
    )


@needs_library
def test_the_choice_follows_the_case() -> None:
    def chosen(case: Shapes, cpu: str = OWN, platform: str = "cpu") -> str:
        x, w, _ = (jnp.asarray(each, jnp.float32) for each in case.draw())
        with use_temporarily(CpuKernels(product_float32=cpu)):
            return choose_convolution(describe_case(x, w, x.shape, w.shape, case.geometry), Target(platform)).name

    large = Shapes((64, 64), (3, 3), inputs=64, outputs=64, padding=(1, 1))
    assert chosen(large) == OWN
    assert chosen(large, cpu="xla") == "xla"
    assert chosen(CASES["square"]) == "xla"
    assert chosen(dataclasses.replace(large, outputs=2)) == "xla"
    assert chosen(DEPTHWISE["line"]) == "shifted"
    assert chosen(DEPTHWISE["line"], platform="tpu") == "xla"


def test_the_public_functions_agree_with_jax_without_the_library() -> None:
    case = CASES["stride"]
    x, w, d_out = (jnp.asarray(each) for each in case.draw(np.float32))
    with use_temporarily(CpuKernels()):
        convolutions = [
            np.asarray(convolve(x, w, case.geometry)),
            np.asarray(convolution_input_gradient(d_out, w, x.shape, case.geometry)),
            np.asarray(convolution_weight_gradient(x, d_out, w.shape, case.geometry)),
        ]
    check(convolutions, case)
