"""Pictures as every viewer shows them, whatever their files are called, each with the one label that it has."""

import io
import os

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet

from panax.core import DataError
from panax.data import ExampleData, ImageFolder, ParquetImages
from panax.data.files.magic import is_image
from panax.data.images.encoded_images import ImageDecoder

TURNED = np.zeros((40, 20, 3), np.uint8)
TURNED[:20], TURNED[20:, :10], TURNED[20:, 10:] = (255, 0, 0), (0, 0, 255), (0, 255, 0)


def encoded(kind, orientation=None, array=TURNED):
    exif, out = Image.Exif(), io.BytesIO()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(array).save(out, kind, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7, 8])
def test_a_picture_that_a_camera_marked_as_turned_stands_upright(kind, orientation):
    data = encoded(kind, orientation)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB").resize((8, 8))
    seen = ImageDecoder(size=8, fit="stretch").decode(data, "photo")
    assert np.abs(seen.astype(int) - np.asarray(shown)).max() < 60


def test_damaged_notes_of_a_camera_do_no_harm(monkeypatch):
    def broken(image):
        raise ValueError("damaged EXIF")

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    assert ImageDecoder(size=8, fit="stretch").decode(encoded("PNG"), "photo").shape == (8, 8, 3)


def folder_of(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def opened(path, **settings):
    return ExampleData(examples=ImageFolder(path=str(path), size=8, **settings), cache_dir=str(path / "cache")).open()


def test_images_are_known_by_their_first_bytes(tmp_path):
    jpeg, text = encoded("JPEG"), b"BM or not, these are notes"
    root = folder_of(tmp_path, {"a/1.jfif": jpeg, "a/2": jpeg, "b/3.PNG": encoded("PNG"), "b/notes.txt": text})
    os.symlink(root / "a", root / "c")
    found = opened(root)
    assert found.examples.num_examples == 3 and found.examples.classes == ("a", "b")
    (line,) = found.account
    assert "left out: 1 of .txt, folders that are links (c)" in line
    assert [is_image(encoded(kind)[:16]) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")] == [True] * 7


def test_an_image_has_one_label(tmp_path):
    root = folder_of(tmp_path, {"1.png": encoded("PNG"), "2.png": encoded("PNG")})
    labels = root / "labels.csv"
    labels.write_text("file,label\n1.png,dog\n2.png,cat\n1.png,cat\n")
    with pytest.raises(DataError, match=r"line 4: 1\.png has the labels 'dog' and 'cat'; expected one"):
        opened(root, label=str(labels))
    labels.write_text("file,label,label\n1.png,dog,cat\n2.png,cat,dog\n")
    with pytest.raises(DataError, match="file and label once each"):
        opened(root, label=str(labels))
    labels.write_text("file,label\n1.png,dog\n2.png,cat\n2.png,cat\n9.png,emu\n")
    data = opened(root, label=str(labels))
    assert data.examples.classes == ("cat", "dog")
    assert any("has labels for 1 files that are not in" in line for line in data.account)


def test_labels_of_numbers_are_in_the_order_of_numbers(tmp_path):
    root = folder_of(tmp_path, {f"{name}.png": encoded("PNG") for name in "abc"})
    labels = root / "labels.csv"
    labels.write_text("file,label\na.png,10.0\nb.png,2.0\nc.png,-1\n")
    assert opened(root, label=str(labels)).examples.classes == ("-1", "2.0", "10.0")


def test_labels_of_shards_whose_types_differ_are_one(tmp_path):
    image = encoded("PNG")
    for number, labels in enumerate(([3, 0], [3.0, None], [0.5, 1.0])):
        parquet.write_table(pa.table({"image": [image] * 2, "label": labels}), tmp_path / f"{number}.parquet")
    data = ExampleData(
        examples=ParquetImages(paths=(str(tmp_path),), size=8), max_bad_records=2, cache_dir=str(tmp_path / "cache")
    )
    result = data.open()
    assert result.examples.read(np.arange(4))["label"].tolist() == [3, 0, 3, 1] and result.num_classes == 4
    assert any("2 unusable records are skipped" in line for line in result.account)
