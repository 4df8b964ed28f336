"""Images of more channels, 16 bits and floats: reading, measuring, augmenting, and runs from training to prediction."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vitamp as package
from datasets import open_dataset
from datasets.base import Unreadable
from datasets.decoding import Reader
from datasets.given import open_given
from datasets.transforms.pixels import Pixels
from engine.evaluation.alike import edited
from engine.evaluation.features import contents_of
from engine.inputs.batches import Inputs
from engine.preflight import fill_in
from tests.datasets.opened import part, settings
from tests.datasets.shards.tar_files import write_tar
from tests.program import Vitamp
from tests.refused import refusal
from tools.common.command_line import Tool
from tools.common.report_page.evaluations import pictured
from utils.config import load_config
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import UserError
from utils.seeding import seed_host
from vitamp.bands import DEFLATED, planes_of, read_bands, together

SIDE = 16
TINY = (
    *("-device", "cpu", "-image_size", SIDE, "-batch_size", 32, "-num_workers", 0, "-num_classes", 2),
    *("MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=32", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2", "MODEL.MLP_RATIO=2"),
    *("TRAIN.NUM_EPOCHS=6", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=0.005", "DATA.CROP=none", "DATA.FLIP=0"),
)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(*arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, *arrays)
    return file.getvalue()


def png16(array: np.ndarray) -> bytes:
    """RGB of 16 bits, which Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(array: np.ndarray, **options: Any) -> bytes:
    tifffile = pytest.importorskip("tifffile")
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


def saved(array: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def bands(channels: int, dtype: type, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 256 if dtype is np.uint8 else 65536, (12, 10, channels))
    return values.astype(dtype)


def last_to_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(2, 0, 1))


FILES: dict[str, tuple[int, int | str, type, Callable[[np.ndarray], bytes]]] = {
    "npy": (5, 8, np.uint8, npy),
    "npy, channels first": (5, 16, np.uint16, lambda a: npy(last_to_first(a))),
    "npy, big endian": (2, 16, np.uint16, lambda a: npy(a.astype(">u2"))),
    "npy, floats": (7, "float", np.float32, npy),
    "npz": (4, 16, np.uint16, npz),
    "npz of bands": (3, 16, np.uint16, lambda a: npz(*last_to_first(a))),
    "tiff, planes": (5, 16, np.uint16, lambda a: tiff(last_to_first(a), photometric="minisblack")),
    "tiff, interleaved": (4, 16, np.uint16, lambda a: tiff(a, photometric="minisblack", planarconfig="contig")),
    "tiff, grey": (1, 16, np.uint16, lambda a: tiff(a[:, :, 0])),
    "png, grey": (1, 16, np.uint16, lambda a: saved(a[:, :, 0])),
    "png, RGB": (3, 16, np.uint16, png16),
    "png, RGBA": (4, 8, np.uint8, saved),
    "several files": (4, 16, np.uint16, lambda a: together([png16(a[:, :, :3]), saved(a[:, :, 3])])),
    "three grey files": (3, 8, np.uint8, lambda a: together([saved(plane) for plane in last_to_first(a)])),
}


@pytest.mark.parametrize("kind", FILES)
def test_no_value_is_lost_between_file_and_normalised_tensor(kind: str) -> None:
    channels, bits, dtype, write = FILES[kind]
    array = bands(channels, dtype)
    data = settings(IMAGE_CHANNELS=channels, BITS=bits, IMAGE_SIZE=8, CROP="none", IMAGENET_MEAN=0.5, IMAGENET_STD=0.25)
    assert np.array_equal(Reader(data).whole(write(array)), array)
    square = np.ascontiguousarray(array[:8, :8])
    out = torch.empty(1, channels, 8, 8, dtype=torch.uint8 if data.is_plain else torch.float32)
    Pixels(data, train=False)(write(square), out[0])
    _, high = data.value_range
    wanted = (square.astype(np.float64) / high - 0.5) / 0.25
    found = Inputs(data)(out)[0].permute(1, 2, 0).numpy()
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("content", "bits", "said"),
    [
        (npy(bands(3, np.uint16)), 16, "it has 3 channels; DATA.IMAGE_CHANNELS is 4"),
        (npy(bands(4, np.uint8)), 16, "its values are uint8; DATA.BITS 16 takes uint16"),
        (npy(bands(4, np.uint16)), 8, "its values are uint16; DATA.BITS 8 takes uint8"),
        (npy(bands(4, np.int16)), 16, "int16, which have a sign"),
        (npy(np.full((4, 5, 4), np.nan, np.float32)), "float", "80 of its 80 values are NaN or infinity"),
        (npy(np.zeros((2, 2, 5, 5), np.uint16)), 16, "its shape is 2 x 2 x 5 x 5"),
        (npz(bands(3, np.uint16), bands(1, np.uint8)), 16, "its files differ: 10 x 12 of uint16 and 10 x 12 of uint8"),
        (npy(np.array([{}])), 16, "allow_pickle"),
        (npy(bands(4, np.uint16))[:300], 16, ""),
        (b"II*\0 not a tiff", 16, ""),
        (b"", 16, "the file is empty"),
    ],
)
def test_files_of_other_bands_are_refused_with_the_reason(content: bytes, bits: object, said: str) -> None:
    if content.startswith(b"II"):
        pytest.importorskip("tifffile")
    assert said in refusal(Reader(settings(IMAGE_CHANNELS=4, BITS=bits)).whole, content, by=Unreadable)


def claiming(*shape: int) -> bytes:
    """The header of a file of numpy, which is all of it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def zipped(content: bytes, method: int, size: int | None = None) -> bytes:
    """A zip that says `size` of its one file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as files:
        files.writestr("a.npy", content)
    whole = bytearray(file.getvalue())
    at = whole.rindex(b"PK\x01\x02") + 24
    if size is not None:
        whole[at : at + 4] = struct.pack("<I", size)
    return bytes(whole)


SQUARE = np.zeros((40, 40), np.uint16)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: claiming(2**44, 10), "it decodes to 175,921,860,444,160 bytes or more; DATA.MAX_IMAGE_BYTES allows"),
        (lambda: npz(SQUARE), "it decodes to 3,328 bytes or more; DATA.MAX_IMAGE_BYTES allows 2,000"),
        (lambda: zipped(claiming(2**44, 10), zipfile.ZIP_DEFLATED), "it decodes to 175,921,860,444,160 bytes"),
        (lambda: zipped(npy(SQUARE), zipfile.ZIP_DEFLATED, size=500), "Bad CRC-32"),
        (lambda: zipped(npy(SQUARE), zipfile.ZIP_BZIP2, size=500), "compressed by another method than deflate"),
        (lambda: together([npy(SQUARE[:20]), npy(SQUARE[:20])]), "it decodes to 3,456 bytes or more"),
        (lambda: together([saved(SQUARE[:12, :12])] * 9), "it decodes to 1,152 bytes or more; DATA.MAX_IMAGE_BYTES al"),
        (lambda: tiff(SQUARE), "it decodes to 3,200 bytes or more"),
        (lambda: saved(SQUARE), "it decodes to 12,800 bytes or more"),
        (lambda: dicom(SQUARE), "it decodes to 12,800 bytes or more"),
        (lambda: dicom(SQUARE, syntax=DEFLATED, Rows=2, Columns=2), "it decodes to 3,"),
        (lambda: npy(np.zeros((0, 16, 1), np.uint16)), "its shape is 0 x 16 x 1, which has no pixels"),
    ],
)
def test_sizes_are_judged_before_pixels_are_unpacked(content: Callable[[], bytes], said: str) -> None:
    reader = Reader(settings(IMAGE_CHANNELS=1, BITS=16, MAX_IMAGE_BYTES=2000))
    assert said in refusal(reader.whole, content(), by=Unreadable)


def test_a_limit_of_bytes_can_be_raised() -> None:
    large = saved(SQUARE.astype(np.uint8))
    assert "DATA.MAX_IMAGE_BYTES" in refusal(Reader(settings(MAX_IMAGE_BYTES=12_799)).whole, large, by=Unreadable)
    assert Reader(settings(MAX_IMAGE_BYTES=12_800)).whole(large).shape == (40, 40, 3)


@pytest.mark.parametrize(("shape", "channels"), [((1, 10), 1), ((8, 8, 5), 8), ((3, 4, 5), 5)])
def test_python_reads_a_file_as_training_does(tmp_path: Path, shape: tuple[int, ...], channels: int) -> None:
    """The first two would be other images if their axes were arranged twice."""
    content = npy(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape))
    (tmp_path / "image.npy").write_bytes(content)
    planes = planes_of(tmp_path / "image.npy", channels, 8)
    np.testing.assert_array_equal(planes.permute(1, 2, 0), read_bands(content, channels, 8))


def test_changed_files_of_an_image_are_other_contents(tmp_path: Path) -> None:
    rows = "".join(f"{n}_1.npy,{n}_2.npy,{n % 2}\n" for n in range(6))
    (tmp_path / "all.csv").write_text("file_1,file_2,label\n" + rows)
    for name in ("1", "2"):
        for number in range(6):
            (tmp_path / f"{number}_{name}.npy").write_bytes(npy(np.full((8, 8), number, np.uint8)))
    data = DataConfig(DATASET="csv", DATA_PATH=f"{tmp_path}/all.csv", IMAGE_CHANNELS=2, IMAGE_SIZE=8)

    def contents() -> str:
        return contents_of(open_dataset(data, True, 2, 0, torch.device("cpu")))

    before = contents()
    assert contents() == before
    for number in range(6):
        (tmp_path / f"{number}_2.npy").write_bytes(npy(np.full((8, 8), 9, np.uint8)))
    assert contents() != before
    data = DataConfig(DATASET="shards", DATA_PATH=f"{tmp_path}/tars", IMAGE_SIZE=8, CACHE=f"{tmp_path}/cache")
    of_tars = []
    for value in (1, 2):
        image = npy(np.full((8, 8, 3), value, np.uint8))
        members = [
            (f"{n}.{end}", content) for n in range(6) for end, content in (("npy", image), ("cls", b"%d" % (n % 2)))
        ]
        for split in ("train", "val"):
            write_tar(tmp_path / "tars" / split / "0.tar", members)
        of_tars.append(contents())
    assert of_tars[0] != of_tars[1]


def test_edited_copies_of_floats_are_floats() -> None:
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    flipped, *_ = edited(images)
    assert torch.equal(flipped, images.flip(-1))
    assert torch.equal(edited((255 * images).to(torch.uint8))[0], (255 * images).to(torch.uint8).flip(-1))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    with pytest.raises(Exception, match=r"tifffile is needed to read these images .* Run: pip install tifffile"):
        Reader(settings(IMAGE_CHANNELS=4, BITS=16)).whole(b"II*\0")


def dicom(stored: np.ndarray, **fields: object) -> bytes:
    pydicom = pytest.importorskip("pydicom")
    about = pydicom.dataset.FileDataset(None, {}, preamble=b"II*\0".ljust(128, b"\0"))
    about.file_meta = pydicom.dataset.FileMetaDataset()
    about.file_meta.TransferSyntaxUID = fields.pop("syntax", pydicom.uid.ExplicitVRLittleEndian)
    about.file_meta.MediaStorageSOPClassUID = about.SOPClassUID = pydicom.uid.CTImageStorage
    about.file_meta.MediaStorageSOPInstanceUID = about.SOPInstanceUID = "1.2.3"
    about.Rows, about.Columns = stored.shape
    about.SamplesPerPixel, about.PhotometricInterpretation = 1, "MONOCHROME2"
    about.BitsAllocated, about.BitsStored, about.HighBit, about.PixelRepresentation = 16, 12, 11, 0
    about.PixelData = stored.astype("<u2").tobytes()
    for name, value in fields.items():
        setattr(about, name, value)
    file = io.BytesIO()
    about.save_as(file, enforce_file_format=True)
    return file.getvalue()


def test_slope_and_window_of_dicom_are_applied() -> None:
    stored = np.arange(0, 4096, 64).reshape(8, 8)
    reader = Reader(settings(IMAGE_CHANNELS=1, BITS="float"))
    assert np.array_equal(reader.whole(dicom(stored))[:, :, 0], stored)
    slope = {"RescaleSlope": 2, "RescaleIntercept": -1000}
    assert np.array_equal(reader.whole(dicom(stored, **slope))[:, :, 0], 2.0 * stored - 1000)
    window = {**slope, "WindowCenter": 1000.5, "WindowWidth": 2001}  # from 0 to 2000
    wanted = ((2.0 * stored - 1000) / 2000).clip(0, 1)
    found = reader.whole(dicom(stored, **window))[:, :, 0]
    assert np.allclose(found, wanted, atol=1e-6)
    inverted = reader.whole(dicom(stored, **window, PhotometricInterpretation="MONOCHROME1"))[:, :, 0]
    assert np.allclose(inverted, 1 - wanted, atol=1e-6)
    with pytest.raises(Unreadable, match=r"its values are float32; DATA\.BITS 16 takes uint16"):
        Reader(settings(IMAGE_CHANNELS=1, BITS=16)).whole(dicom(stored))


@pytest.mark.parametrize("windowed", [0, 1, 4])
def test_windows_in_some_dicom_files_are_warned_of(tmp_path: Path, windowed: int) -> None:
    for number, place in enumerate(("train/a/1", "train/a/2", "train/b/3", "train/b/4", "val/a/5", "val/b/6")):
        file = tmp_path / "data" / f"{place}.dcm"
        file.parent.mkdir(parents=True, exist_ok=True)
        window = {"WindowCenter": 1000.5, "WindowWidth": 2001} if number < windowed else {}
        file.write_bytes(dicom(np.arange(0, 4096, 64).reshape(8, 8), **window))
    places = {"DATA.DATA_PATH": str(tmp_path / "data"), "DATA.CACHE": str(tmp_path)}
    loaded = fill_in(load_config(None, words={**places, "DATA.IMAGE_CHANNELS": "1", "DATA.BITS": "float"}))
    said = "DICOM: some training images have a window, and so values of another unit"
    assert any(said in warning for warning in loaded.warnings) == (windowed == 1)


def test_palettes_of_dicom_are_colours() -> None:
    pydicom = pytest.importorskip("pydicom")
    file = pytest.importorskip("pydicom.data").get_testdata_file("examples_palette.dcm", download=False)
    about = pydicom.dcmread(file)
    found = Reader(settings(IMAGE_CHANNELS=3, BITS=16)).whole(Path(file).read_bytes())
    assert np.array_equal(found, pydicom.pixels.apply_color_lut(about.pixel_array, about))


def test_augmentations_of_shape_move_all_bands_alike() -> None:
    data = settings(IMAGE_CHANNELS=5, BITS=16, IMAGE_SIZE=12, ROTATE=20, SHIFT=0.2, IMAGENET_MEAN=[0.2])
    plane = bands(1, np.uint16)
    pixels = Pixels(data, True, TrainConfig(RAND_AUGMENT=True, COLOR_JITTER=0.4))
    alike, changed = npy(np.ascontiguousarray(plane.repeat(5, axis=2))), 0
    for seed in range(8):
        out = torch.empty(5, 12, 12)
        seed_host(seed, "test")
        pixels(alike, out)
        assert (out == out[0]).all()
        again = torch.empty(5, 12, 12)
        seed_host(seed, "test")
        pixels(alike, again)
        assert torch.equal(out, again)
        changed += not np.array_equal(out[0].numpy(), plane[:, :, 0])
    assert changed == 8


Make = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def write_classes(root: Path, make: Make) -> Path:
    """Class folders of images with stripes: horizontal ones in class a, vertical ones in class b."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 128), ("val", 64)):
        for number in range(count):
            stripes = np.arange(SIDE) // 2 % 2
            stripes = np.tile(stripes, (SIDE, 1)).T if number % 2 else np.tile(stripes, (SIDE, 1))
            path = root / split / "ab"[number % 2] / f"{number}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, make(generator, stripes))
    return root


def test_mean_and_std_of_other_channels_than_those_of_timms_weights_are_measured(tmp_path: Path) -> None:
    write_classes(tmp_path / "data", lambda of, _: of.integers(0, 256, (SIDE, SIDE, 5)).astype(np.uint8))
    weights = tmp_path / "vit_tiny_patch16_224.safetensors"
    save_file({"a": torch.zeros(1)}, weights)
    words = {"DATA.DATA_PATH": str(tmp_path / "data"), "DATA.CACHE": str(tmp_path), "DATA.IMAGE_CHANNELS": "5"}
    words |= {"MODEL.NAME": weights.stem, "MODEL.PRETRAINED": str(weights)}
    loaded = fill_in(load_config(None, words=words))
    assert "auto: timm's vit_tiny_patch16_224" in "".join(loaded.notes)
    assert len(loaded.config.DATA.IMAGENET_MEAN) == 5


def top1(vitamp: Vitamp, *words: object) -> float:
    text = vitamp(*words, script="scripts/evaluate.py", code=0).out
    return float(next(line for line in text.splitlines() if line.strip().startswith("top-1 ")).split()[1])


def test_a_class_in_the_low_byte_is_learned(tmp_path: Path, vitamp: Vitamp) -> None:
    def low_byte(generator: np.random.Generator, stripes: np.ndarray) -> np.ndarray:
        return (256 * 12 + 128 * stripes + generator.integers(0, 128, stripes.shape)).astype(np.uint16)

    root, run = write_classes(tmp_path / "data", low_byte), tmp_path / "run"
    words = ("-data_path", root, *TINY, f"DATA.CACHE={tmp_path}", "DATA.IMAGE_CHANNELS=1", "DATA.BITS=16")
    done = vitamp(*words, "-output", run, code=0)
    values = np.stack([np.load(path) for path in sorted(root.glob("train/*/*.npy"))]) / 65535
    said = f"(12 of 16 bits): DATA.IMAGENET_MEAN [{values.mean():.4g}], DATA.IMAGENET_STD [{values.std():.4g}]"
    assert f"Measured on 128 training images, of values from {values.min() * 65535:g} to" in done.text
    assert said in done.text
    meta = json.loads(next(run.glob("checkpoints/step-*/meta.json")).read_text())
    assert meta["input"]["mean"] == pytest.approx([values.mean()], rel=1e-9)
    assert meta["input"]["std"] == pytest.approx([values.std()], rel=1e-6)
    assert (meta["input"]["bits"], meta["input"]["range"]) == (16, [0, 65535])
    assert top1(vitamp, run) > 95
    again = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=7", code=0)
    assert "Measur" not in again.text
    done = vitamp(*words, "DATA.RANGE=auto", "-output", tmp_path / "ranged", "TRAIN.NUM_EPOCHS=1", code=0)
    assert "DATA.RANGE [3072, 3327]" in done.text


def test_a_class_in_the_fifth_channel_is_learned_and_lost_where_channels_are_permuted(
    tmp_path: Path, vitamp: Vitamp
) -> None:
    def fifth(generator: np.random.Generator, stripes: np.ndarray) -> np.ndarray:
        noise = generator.integers(0, 256, (SIDE, SIDE, 5))
        noise[:, :, 4] = noise[:, :, 4] // 2 + 128 * stripes
        return noise.astype(np.uint8)

    root, run = write_classes(tmp_path / "data", fifth), tmp_path / "run"
    words = ("-data_path", root, *TINY, f"DATA.CACHE={tmp_path}", "DATA.IMAGE_CHANNELS=5")
    done = vitamp(*words, "-output", run, "TRAIN.RAND_AUGMENT=true", "TRAIN.COLOR_JITTER=0.4", "DATA.ROTATE=3", code=0)
    left_out = (
        "Left out, because images with DATA.IMAGE_CHANNELS 5 and DATA.BITS 8 have no such colours: TRAIN.COLOR_JITTER"
    )
    assert f"{left_out}; TRAIN.RAND_AUGMENT but for Rotate" in done.text
    assert top1(vitamp, run) > 95
    permuted = tmp_path / "permuted"
    for path in root.glob("val/*/*.npy"):
        (permuted / path.parent.name).mkdir(parents=True, exist_ok=True)
        np.save(permuted / path.parent.name / path.name, np.load(path)[:, :, [4, 0, 1, 2, 3]])
    assert 20 < top1(vitamp, run, "-data_path", permuted) < 80

    # Prediction, vitamp.load and the exported weights compute the same.
    images = sorted(map(str, root.glob("val/*/*.npy")))[:8]
    rows = vitamp(run, *images, "-format", "json", script="scripts/predict.py", code=0).out
    predicted = [next(one["probability"] for one in row["guesses"] if one["class"] == "a") for row in json.loads(rows)]
    model, transform = package.load(run)
    arrays = torch.stack([transform(np.load(path)) for path in images])
    assert torch.equal(arrays, torch.stack([transform(path) for path in images]))
    with torch.no_grad():
        assert model(arrays).softmax(1)[:, 0].tolist() == pytest.approx(predicted, abs=2e-6)
    weights = tmp_path / "model.pt2"
    vitamp(run, "-to", "torch", "-with_preprocess", "-out", weights, script="scripts/export.py", code=0)
    batch = open_given(images, load_data(run)).__getitems__([(0, index) for index in range(8)])
    exported = torch.export.load(weights).module()(batch.images)
    assert exported.softmax(1)[:, 0].tolist() == pytest.approx(predicted, abs=2e-6)
    for other, said, instead in (
        ("-to onnx -with_resize -out x.onnx", "-with_resize", "-with_preprocess"),
        ("-to hub -output x", "-to hub", "-to safetensors"),
    ):
        refused = vitamp(run, *other.split(), script="scripts/export.py", cwd=tmp_path, code=2)
        assert f"{said}: for 8-bit grey and RGB images" in refused.text
        assert f"; use {instead}." in refused.text

    # Pretrained weights of three channels are adapted; other tools look at these images, too.
    first = tmp_path / "rgb"
    vitamp("-dataset", "synthetic", "DATA.SYNTHETIC_TRAIN=64", *TINY, "-output", first, "TRAIN.NUM_EPOCHS=1", code=0)
    adapted = vitamp(*words, "-pretrained", first, "-dry_run", code=0)
    assert "patch_embed.proj.weight resized from 32x3x4x4 to 32x5x4x4" in adapted.text
    vitamp("-cfg", run / "config.yaml", "-out", tmp_path / "batch.png", script="scripts/show_batch.py", code=0)
    shown = pictured(open_given(images, load_data(run)), 0, load_data(run))
    assert shown["bands"] == "bands 1, 2, 3 of 5 in false colour"
    packed = tmp_path / "packed"
    refused = vitamp(root, packed, "DATA.IMAGE_CHANNELS=5", script="scripts/pack_images.py", code=2)
    assert "add -keep" in refused.text
    kept = vitamp(root, packed, "DATA.IMAGE_CHANNELS=5", "-keep", script="scripts/pack_images.py", code=0)
    assert "Measuring" not in kept.text
    assert top1(vitamp, run, "-data_path", packed) > 95


def load_data(run: Path) -> DataConfig:
    from engine.trained.model import load_trained

    return load_trained(run, device="cpu").config.DATA


def test_files_in_columns_are_the_channels_of_an_image(tmp_path: Path, vitamp: Vitamp) -> None:
    for number in range(8):
        for band in range(2):
            plane = np.full((9, 9), 1000 * number + band, np.uint16)
            plane[0, 0] = 7
            (tmp_path / f"{number}_{band}.png").write_bytes(saved(plane))
    lines = [f"{number}_1.png,{'ab'[number % 2]},{number}_0.png" for number in range(8)]
    table = tmp_path / "all.csv"
    table.write_text("\n".join(["file_2,label,file_1", *lines]))
    data = settings(DATASET="csv", DATA_PATH=str(table), IMAGE_CHANNELS=2, BITS=16, VAL_FRACTION=0.25)
    samples = part(data, num_classes=2)
    first = Reader(data).whole(samples.read(0))
    assert first[5, 5].tolist() == [1000.0 * int(Path(samples.name(0)).name[0]), first[5, 5, 0] + 1]
    run, small = tmp_path / "run", ("-batch_size", 2, "TRAIN.NUM_EPOCHS=1", "DATA.VAL_FRACTION=0.25")
    kind = ("DATA.IMAGE_CHANNELS=2", "DATA.BITS=16", f"DATA.CACHE={tmp_path}/cache")
    vitamp("-data_path", table, *TINY, *kind, *small, "-output", run, code=0)
    predict: Any = {"script": "scripts/predict.py"}
    split = vitamp(run, "-part", "all", "-format", "jsonl", **predict, code=0).out
    assert vitamp(run, table, "-format", "jsonl", **predict, code=0).out == split
    alone = vitamp(run, tmp_path / "0_0.png", **predict, code=1).text
    assert "it has 1 channels; DATA.IMAGE_CHANNELS is 2, or name its other files in a table" in alone
    (tmp_path / "photos.csv").write_text("photo\n0_0.png\n")
    refused = vitamp(run, tmp_path / "photos.csv", **predict, code=2)
    assert refused.text.endswith("no column path or image_path or image or file or filename; its columns are photo.\n")

    (tmp_path / "3_1.png").unlink()
    words = ("-data_path", table, *TINY, "DATA.IMAGE_CHANNELS=2", "DATA.BITS=16", "-batch_size", 2, "DATA.MAX_BAD=0")
    refused = vitamp(*words, f"DATA.CACHE={tmp_path}", code=2)
    assert f"its file {tmp_path}/3_1.png does not exist" in refused.text
    given = ("DATA.IMAGENET_MEAN=0.5", "DATA.IMAGENET_STD=0.5")
    assert f"{table} names 3_1.png, but there is no file" in vitamp(*words, *given, code=2).text
    table.write_text(table.read_text().replace("file_2", "file_3"))
    assert "are the files of an image, but there is none with number 2" in vitamp(*words, code=2).text


def test_bad_file_of_several_is_named(tmp_path: Path, vitamp: Vitamp) -> None:
    for band in ("red", "infrared"):
        (tmp_path / band).mkdir()
        for number in range(12):
            (tmp_path / band / f"{number}.png").write_bytes(saved(np.full((9, 9), 1000 * number, np.uint16)))
    bad = tmp_path / "infrared"
    (bad / "3.png").write_bytes(b"<html>")
    (bad / "4.png").write_bytes(saved(np.zeros((5, 9), np.uint16)))
    (bad / "5.png").unlink()
    (bad / "5.png").mkdir()
    lines = [f"red/{number}.png,infrared/{number}.png,{'ab'[number % 2]}" for number in range(12)]
    (tmp_path / "all.csv").write_text("\n".join(["file_1,file_2,label", *lines, lines[0].replace("red/0", "red/1")]))
    words = ("-data_path", tmp_path / "all.csv", "-num_classes", 2, "-image_size", 8, "DATA.IMAGE_CHANNELS=2")
    kind = ("DATA.BITS=16", "DATA.IMAGENET_MEAN=0.5", "DATA.IMAGENET_STD=0.5", f"DATA.CACHE={tmp_path}/cache")
    done = vitamp(*words, *kind, "-fix", tmp_path / "fix.txt", script="scripts/check_data.py", code=1)
    for said in (
        f"its file {bad}/3.png: not an image in a known format",
        f"its files differ: 9 x 9 of uint16 and 9 x 5 of uint16 ({bad}/4.png)",
        f"its file {bad}/5.png: ",
    ):
        assert said in done.text
        assert said in (tmp_path / "fix.txt").read_text()
    assert "have the name of another" not in done.text


def test_means_of_recipes_and_weights_for_other_images_are_measured(tmp_path: Path, vitamp: Vitamp) -> None:
    def noise(generator: np.random.Generator, _: np.ndarray) -> np.ndarray:
        return generator.integers(0, 256, (SIDE, SIDE, 5), dtype=np.uint8)

    words = ("-data_path", write_classes(tmp_path / "data", noise), *TINY, f"DATA.CACHE={tmp_path}", "-dry_run")
    shipped = (*words, "DATA.IMAGE_CHANNELS=5", "-cfg", "vit_tiny_patch16_224")
    done = vitamp(*shipped, code=0)
    assert "STD auto: configs/_vit_imagenet.yaml:7 has that of images of other channels or bits" in done.text
    assert "Measured on 128 training images, of values from 0 to 255: DATA.IMAGENET_MEAN [0." in done.text
    assert "[0.4, 0.5, 0.6] has 3 numbers" in vitamp(*shipped, "DATA.IMAGENET_MEAN=[0.4,0.5,0.6]", code=2).text

    # Weights of five channels for photographs, and a teacher of photographs for five channels.
    run, photographs = tmp_path / "run", tmp_path / "photographs"
    five = ("-data_path", tmp_path / "data", *TINY, f"DATA.CACHE={tmp_path}", "DATA.IMAGE_CHANNELS=5")
    vitamp(*five, "TRAIN.NUM_EPOCHS=1", "-output", run, code=0)
    for number, path in enumerate(sorted(tmp_path.glob("data/*/*/*.npy"))):
        other = photographs / path.relative_to(tmp_path / "data").with_suffix(".png")
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(saved(bands(3, np.uint8, number)))
    done = vitamp("-data_path", photographs, *TINY, f"DATA.CACHE={tmp_path}", "-pretrained", run, "-dry_run", code=0)
    assert "DATA.IMAGENET_MEAN and DATA.IMAGENET_STD auto: " in done.text
    assert "patch_embed.proj.weight resized from 32x5x4x4 to 32x3x4x4" in done.text
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=2).state_dict(), tmp_path / "t.safetensors")
    teacher = f"vit_tiny_patch16_224={tmp_path}/t.safetensors"
    refused = vitamp(*five, "-dry_run", "TRAIN.DISTILLATION_TYPE=soft", "-teacher_model", teacher, code=2)
    assert f"{teacher}: trained with DATA.IMAGE_CHANNELS 3, but here it is 5" in refused.text


def test_benchmarks_of_random_images_need_no_measured_mean(vitamp: Vitamp) -> None:
    words, tool = ["DATA.IMAGE_CHANNELS=5", "DATA.BITS=16"], Tool("a.py", "Measure.", ())
    assert tool.read(words).load(resolved=False).config.DATA.IMAGENET_MEAN == (0.5,)
    with pytest.raises(UserError, match="IMAGENET_MEAN auto does not work in this tool"):
        tool.read([*words, "DATA.IMAGENET_MEAN=auto"]).load(resolved=False)
    refused = vitamp("timm", *words, script="scripts/benchmark_amp.py", code=2)
    assert "DATA.BITS: this table has a value of its own for all loops" in refused.text


def test_check_data_names_blank_bands_and_the_hint_of_16_bits(tmp_path: Path, vitamp: Vitamp) -> None:
    for number in range(20):
        array = bands(3, np.uint16, number)
        array[:, :, 1] *= number != 4
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png16(array))
        grey = tmp_path / "grey" / "ab"[number % 2] / f"{number}.png"
        grey.parent.mkdir(parents=True, exist_ok=True)
        grey.write_bytes(saved(array[:, :, 0]))
    words = ("-num_classes", 2, "-image_size", 8, "DATA.BITS=16", "DATA.VAL_FRACTION=0.2", f"DATA.CACHE={tmp_path}")
    found = vitamp("-data_path", tmp_path / "data", *words, script="scripts/check_data.py", code=0).text
    assert "blank: band 2" in found
    assert "Images of 3 channels, DATA.BITS 16, by size: 10 x 12 (20)" in found
    noted = vitamp("-data_path", tmp_path / "grey", *TINY, "-batch_size", 4, "-dry_run", code=0).text
    assert "With 16 bits, of which 8 are read: 18 of 18 training images. DATA.BITS=16 reads all" in noted


def test_arrays_in_tar_files_are_read_where_there_is_no_other_image(tmp_path: Path) -> None:
    arrays = [bands(4, np.uint16, seed) for seed in range(6)]
    members = [(f"{k}.npz", npz(array)) for k, array in enumerate(arrays)]
    labels = [(f"{k}.cls", str(k % 2).encode()) for k in range(6)]
    write_tar(tmp_path / "all.tar", [*members, ("0.png", saved(bands(3, np.uint8))), *labels])
    data = settings(DATASET="shards", DATA_PATH=str(tmp_path), IMAGE_CHANNELS=4, BITS=16, VAL_FRACTION=0.4)
    samples = part(data, num_classes=2)
    names = [Path(samples.name(index)).name for index in range(len(samples))]
    for index, name in enumerate(names):
        if name.endswith("npz"):
            assert np.array_equal(Reader(data).whole(samples.read(index)), arrays[int(name[0])])
    assert "0.npz" not in names


def test_settings_that_do_not_fit_are_refused(tmp_path: Path, vitamp: Vitamp) -> None:
    root = write_classes(tmp_path / "data", lambda _, stripes: np.full((SIDE, SIDE, 2), stripes.max(), np.uint16))
    words = ("-data_path", root, *TINY, f"DATA.CACHE={tmp_path}")
    for given, said in (
        ("DATA.IMAGE_CHANNELS=2 DATA.BITS=16", "channel 1 has the same value in all training images"),
        ("DATA.IMAGE_CHANNELS=3 DATA.BITS=16", "a/0.npy cannot be read: it has 2 channels; DATA.IMAGE_CHANNELS is 3"),
        ("DATA.IMAGE_CHANNELS=2 DATA.BITS=16 DATA.RANGE=9,9", "must be the smallest and the largest"),
        ("DATA.IMAGE_CHANNELS=2 DATA.BITS=16 DATA.IMAGENET_MEAN=1,2,3", "DATA.IMAGE_CHANNELS 2 needs 1 or 2"),
        ("DATA.IMAGE_CHANNELS=3", ".npy .npz .dcm need DATA.BITS or DATA.IMAGE_CHANNELS"),
    ):
        assert said in vitamp(*words, *given.split(), code=2).text
    given = ("DATA.IMAGE_CHANNELS=2", "DATA.IMAGENET_MEAN=0.5", "DATA.IMAGENET_STD=0.5")
    refused = vitamp("-dataset", "digits", *TINY, "-num_classes", 10, *given, code=2)
    assert "digits has 8-bit images of 1 or 3 channels" in refused.text
