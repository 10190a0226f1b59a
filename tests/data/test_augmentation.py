"""Images that are changed while they are drawn: the same after a resume and on any number of processes, from every store."""

import dataclasses
import io
import itertools
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from panax.core.errors import RecipeError
from panax.data import (
    Arrays,
    Augmentation,
    Digits,
    ExampleData,
    ExampleSource,
    ImageFolder,
    Mixing,
    PaddedCrop,
    ParquetImages,
    RandAugment,
    RandomCrop,
    WebDatasetImages,
)
from panax.data.images.mixup import MIX, MIXED_LABEL
from panax.data.images.rand_augment import MAX_MAGNITUDE, OPERATIONS

SIZE, COUNT = 16, 11
ALL = Augmentation(rand_augment=RandAugment(), mixing=Mixing(cutmix=1.0))


def encoded(number: int) -> bytes:
    """A smooth picture with a bright corner, wider than high."""
    x, y = np.meshgrid(np.arange(36), np.arange(24))
    pixels = np.stack([6 * x, 9 * y, np.full_like(x, 20 * number)], axis=-1).astype(np.uint8)
    pixels[:6, :6] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("stores")
    labels = [number % 3 for number in range(COUNT)]
    for number, label in enumerate(labels):
        path = root / "folder" / str(label) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    table = pyarrow.table({"image": [encoded(n) for n in range(COUNT)], "label": labels})
    parquet.write_table(table, root / "images.parquet")
    with tarfile.open(root / "images.tar", "w") as shard:
        for number, label in enumerate(labels):
            for name, data in ((f"{number:02}.png", encoded(number)), (f"{number:02}.cls", str(label).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                shard.addfile(entry, io.BytesIO(data))
    arrays = np.stack([np.asarray(Image.open(io.BytesIO(encoded(n))).resize((SIZE, SIZE))) for n in range(COUNT)])
    return {
        "folder": ImageFolder(path=str(root / "folder"), size=SIZE),
        "parquet": ParquetImages(paths=(str(root / "images.parquet"),), size=SIZE),
        "webdataset": WebDatasetImages(paths=(str(root / "images.tar"),), size=SIZE),
        "arrays": Arrays({"image": arrays, "label": np.array(labels)}),
    }


def source(store, tmp_path: Path, augmentation: Augmentation | None = ALL, **settings) -> ExampleSource:
    data = ExampleData(
        examples=store, augmentation=augmentation, cache_dir=str(tmp_path), **{"batch_size": 4, **settings}
    )
    return data.open().train


def take(source: ExampleSource, count: int, position=None, rows=None) -> list[dict[str, np.ndarray]]:
    drawn = source.batches(position) if rows is None else source.batches_of(rows, position)
    return [batch for batch, _ in itertools.islice(drawn, count)]


def assert_same(a, b) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("kind", ["folder", "parquet", "webdataset", "arrays"])
def test_every_store_gives_the_same_again_after_a_resume_and_on_other_processes(kind, stores, tmp_path):
    drawn = source(stores[kind], tmp_path)
    batched = take(drawn, 6)
    assert set(batched[0]) == {"image", "label", MIXED_LABEL, MIX, "loss_mask"} == set(drawn.axes)
    assert batched[0]["image"].shape == (4, SIZE, SIZE, 3) and batched[0]["image"].dtype == np.uint8
    *_, (_, position) = itertools.islice(drawn.batches(), 3)
    assert_same(take(source(stores[kind], tmp_path), 3, position), batched[3:])
    for rows in ([0, 1], [1, 3], [2]):
        parts = take(source(stores[kind], tmp_path), 6, rows=np.array(rows))
        assert_same(parts, [{name: leaf[rows] for name, leaf in batch.items()} for batch in batched])


def test_each_epoch_and_seed_draws_again(stores, tmp_path):
    def of_first(**settings) -> list[bytes]:
        drawn = source(stores["folder"], tmp_path, Augmentation(), batch_size=COUNT, **settings)
        plain = source(stores["folder"], tmp_path, None, batch_size=COUNT, **settings)
        pairs = zip(take(drawn, 2), take(plain, 2), strict=True)
        # Blue tells the pictures apart, and no crop changes it.
        return [changed["image"][np.argmin(as_is["image"][:, -1, -1, 2])].tobytes() for changed, as_is in pairs]

    first, again = of_first(), of_first()
    assert first == again and first[0] != first[1]
    assert of_first(seed=1)[0] != first[0]


def test_nothing_is_changed_without_an_augmentation_or_in_what_is_held_out(stores, tmp_path):
    opened = [
        ExampleData(
            examples=stores["folder"], augmentation=augmentation, batch_size=4, held_out=0.4, cache_dir=str(tmp_path)
        ).open()
        for augmentation in (None, ALL)
    ]
    plain, augmented = (take(data.held_out, data.held_out.num_batches) for data in opened)
    for a, b in zip(plain, augmented, strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])
        real = b["loss_mask"] > 0
        assert (b[MIX][real] == 1.0).all() and (b[MIX][~real] == 0.0).all()
    assert opened[0].train.axes.keys() == {"image", "label", "loss_mask"}
    assert opened[1].train.axes == opened[1].held_out.axes


def test_a_random_crop_has_its_area_and_ratio():
    crop, generator = RandomCrop(area=(0.2, 0.5), aspect=(0.8, 1.25)), np.random.default_rng(0)
    areas, ratios, corners = [], [], []
    for _ in range(500):
        left, upper, right, lower = crop.sample_box(200, 100, generator)
        assert 0 <= left < right <= 200 and 0 <= upper < lower <= 100
        areas.append((right - left) * (lower - upper) / 20_000)
        ratios.append((right - left) / (lower - upper))
        corners.append((left, upper))
    # Sides are rounded to whole pixels of some 80.
    assert 0.19 < min(areas) < 0.22 and 0.47 < max(areas) < 0.51
    assert 0.78 < min(ratios) < 0.82 and 1.21 < max(ratios) < 1.28
    assert len({*corners}) > 300
    # No half of such a strip is nearly square: the middle stands for it.
    assert RandomCrop(area=(0.5, 0.5)).sample_box(1000, 10, generator) == (493, 0, 506, 10)


def test_a_crop_sees_the_picture_as_it_was_taken():
    """A crop of a small part has more detail than the whole picture scaled down has there."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[::2] = 255
    lines = Image.fromarray(pixels)
    crop = Augmentation(crop=RandomCrop(area=(0.06, 0.0626), aspect=(1.0, 1.0)), flip=0.0)
    cut = np.asarray(crop.apply(lines, (16, 16), lambda whole: whole.resize((16, 16)), np.random.default_rng(0)))
    assert sorted({*cut[:, :, 0].ravel().tolist()}) == [0, 255]


def test_flips_and_shifts():
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    image = Image.fromarray(pixels)

    def changed(seed: int, **settings) -> np.ndarray:
        augmentation = Augmentation(**{"crop": None, "flip": 0.0, **settings})
        return np.asarray(augmentation.apply(image, (4, 4), lambda whole: whole, np.random.default_rng(seed)))

    np.testing.assert_array_equal(changed(0, flip=1.0), pixels[:, ::-1])
    flipped = sum(np.array_equal(changed(seed, flip=0.3), pixels[:, ::-1]) for seed in range(200))
    assert 40 <= flipped <= 80
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)))
    shifts = [padded[y : y + 4, x : x + 4].tobytes() for y in range(3) for x in range(3)]
    crops = {changed(seed, crop=PaddedCrop(padding=1)).tobytes() for seed in range(100)}
    assert crops == {*shifts}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_changes_more_the_stronger_it_is(name, mode):
    image = Image.open(io.BytesIO(encoded(3))).convert(mode)

    def distance(magnitude: int, sign: int) -> float:
        changed = RandAugment(magnitude=magnitude).apply_operation(image, name, sign)
        assert changed.size == image.size and changed.mode == mode
        return float(np.abs(np.asarray(changed, np.float32) - np.asarray(image, np.float32)).mean())

    crops = [[distance(magnitude, sign) for magnitude in (1, 10, MAX_MAGNITUDE)] for sign in (1, -1)]
    unmoved = name == "identity" or (name == "color" and mode == "L")
    for weak, middle, strong in crops:
        assert (strong == 0.0) == unmoved or name == "autocontrast"
        assert weak <= middle <= strong
    directed = name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast")
    assert (crops[0] != crops[1]) == directed or name in ("sharpness", "color")


def test_operations_are_those_of_the_paper_at_their_ranges():
    assert len(OPERATIONS) == 14
    strongest = RandAugment(magnitude=MAX_MAGNITUDE)
    image = Image.fromarray(np.full((331, 331), 200, np.uint8))
    shifted = np.asarray(strongest.apply_operation(image, "translate_x"))
    assert (shifted[0] == 0).sum() == pytest.approx(150, abs=1) and shifted[0, 0] == 200
    assert np.asarray(strongest.apply_operation(image, "brightness"))[0, 0] == 255
    assert np.asarray(strongest.apply_operation(image, "brightness", -1))[0, 0] == 20
    assert np.asarray(strongest.apply_operation(image, "posterize"))[0, 0] == 200 // 16 * 16
    assert np.asarray(strongest.apply_operation(image, "solarize"))[0, 0] == 55
    turned = np.asarray(strongest.apply_operation(image, "rotate"))
    assert turned[0, 0] == 0 and (turned == 0).mean() == pytest.approx(
        1 - np.cos(np.radians(30)) ** -1 * 0.732, abs=0.03
    )


def test_rand_augment_draws_every_operation_alike():
    seen: dict[str, int] = dict.fromkeys(OPERATIONS, 0)

    class Counted(RandAugment):
        def apply_operation(self, image, name, sign=1):
            seen[name] += 1
            return image

    generator = np.random.default_rng(0)
    for _ in range(700):
        Counted(operations=2).apply(Image.new("L", (4, 4)), generator)
    # 1,400 draws of 14: 100 each, with a deviation of 9.6.
    assert sum(seen.values()) == 1400 and all(60 < times < 140 for times in seen.values())


def test_mixup_is_a_weighted_mean_and_cutmix_a_box():
    dark, bright = np.zeros((10, 20, 3), np.uint8), np.full((10, 20, 3), 200, np.uint8)
    for seed in range(20):
        mixed, share = Mixing(mixup=1.0).apply(dark, bright, np.random.default_rng(seed))
        np.testing.assert_allclose(mixed, 200 * (1 - share), atol=0.51)
        cut, share = Mixing(mixup=0.0, cutmix=1.0).apply(dark, bright, np.random.default_rng(seed))
        assert {*np.unique(cut).tolist()} <= {0, 200}
        assert share == pytest.approx((cut == 0).mean()) and not dark.any()
        rows, columns = (np.flatnonzero((cut > 0).any(axis=axes)) for axes in ((1, 2), (0, 2)))
        # A box: its rows and columns lie together and fill it.
        assert len(rows) * len(columns) * 3 == (cut > 0).sum()
        assert not len(rows) or rows[-1] - rows[0] + 1 == len(rows)


def test_labels_are_mixed_as_the_images_are(tmp_path):
    """Each picture is a shade of its label, so a mixed one tells its two labels and their shares."""
    label = np.arange(12, dtype=np.int32)
    image = np.broadcast_to((20 * label)[:, None, None, None], (12, 4, 4, 1)).astype(np.uint8)
    augmentation = Augmentation(crop=None, flip=0.0, mixing=Mixing(mixup=1.0, probability=0.7))
    drawn = source(Arrays({"image": image, "label": label}), tmp_path, augmentation, batch_size=5)
    shares = []
    for batch in take(drawn, 40):
        expected = 20 * (batch[MIX] * batch["label"] + (1 - batch[MIX]) * batch[MIXED_LABEL])
        np.testing.assert_allclose(batch["image"].mean(axis=(1, 2, 3)), expected, atol=0.51)
        assert batch[MIXED_LABEL].tolist() == batch["label"][[1, 0, 3, 2, 3]].tolist()
        shares += batch[MIX].tolist()
    assert np.mean(np.array(shares) == 1.0) == pytest.approx(0.3, abs=0.1)
    assert len({*shares}) > 100


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Augmentation(crop=None, flip=0.0), "changes nothing"),
        (lambda: Augmentation(flip=1.5), r"flip=1\.5; expected a share"),
        (lambda: RandomCrop(area=(0.5, 0.1)), r"area=\(0\.5, 0\.1\)"),
        (lambda: RandomCrop(aspect=(0.0, 1.0)), "aspect="),
        (lambda: PaddedCrop(padding=0), "padding=0; expected 1 or more"),
        (lambda: RandAugment(operations=0), "operations=0"),
        (lambda: RandAugment(magnitude=31), "magnitude=31; expected 1 or more, and 0 to 30"),
        (lambda: Mixing(mixup=0.0), "expected one of them above 0"),
        (lambda: Mixing(probability=2.0), r"probability=2\.0"),
    ],
)
def test_senseless_settings_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_what_is_no_image_is_refused(tmp_path):
    floats = Arrays({"image": np.zeros((4, 8, 8, 3), np.float32), "label": np.zeros(4, np.int32)})
    with pytest.raises(RecipeError, match=r"needs a leaf 'image' of uint8 \(height, width, 1 or 3 channels\)"):
        take(source(floats, tmp_path, Augmentation()), 1)
    unlabeled = Arrays({"image": np.zeros((4, 8, 8, 3), np.uint8)})
    with pytest.raises(RecipeError, match="mixing needs the leaves image and label"):
        source(unlabeled, tmp_path)


def test_digits_are_the_librarys(tmp_path):
    data = ExampleData(examples=Digits(), batch_size=64, held_out=0.2, cache_dir=str(tmp_path)).open()
    assert data.num_classes == 10
    batch = take(data.train, 1)[0]
    assert batch["image"].shape == (64, 8, 8, 1) and batch["image"].max() == 255
    assert data.train.examples.num_examples + data.held_out.examples.num_examples == 1797
    assert dataclasses.asdict(Digits()) == {}
