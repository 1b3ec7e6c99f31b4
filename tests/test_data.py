"""Loading data sets from files in their standard formats, preparing and augmenting them."""

import gzip
import hashlib
import math
import pickle
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_files import (
    cifar_arrays,
    idx_bytes,
    python2_batch,
    random_bytes,
    write_camvid,
    write_cifar_binary,
    write_cifar_python,
    write_cityscapes,
    write_class_folders,
    write_idx,
    write_image,
    write_svhn,
)
from opteq.data import (
    Augment,
    Dataset,
    Images,
    Split,
    check_split,
    describe,
    flat,
    grey,
    images,
    load,
    names,
    norm_sqrt_d,
    pickles,
    resize,
    segmentation,
    sphere,
    theory_split,
    two_classes,
    unit_norm,
)
from opteq.data.arrays import CIFAR_PYTHON, IDX_FILES
from opteq.data.checksums import MD5
from opteq.data.files import check_md5
from opteq.data.openml import OPENML, Entry


def as_pixels(array):
    return torch.from_numpy(array.astype(np.float64) / 255).float()


# Without files


def test_digits_are_a_fixed_stratified_split():
    train, test = load("digits")
    assert train.x.shape == (1437, 1, 8, 8)
    assert test.x.shape == (360, 1, 8, 8)
    assert (train.x.dtype, train.y.dtype) == (torch.float32, torch.int64)
    assert (train.x.min(), train.x.max()) == (0, 1)
    counts, everything = torch.bincount(test.y), torch.bincount(torch.cat([train.y, test.y]))
    assert (counts - everything * 360 / 1797).abs().max() < 1
    assert test.y[:10].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3]  # another split would make figures incomparable
    assert torch.equal(load("digits").test.x, test.x)


def test_sphere_is_uniform_with_standard_normal_labels():
    train, test = load("sphere")
    assert train.x.shape == test.x.shape == (1000, 1000)
    assert torch.allclose(train.x.norm(dim=1), torch.full((1000,), 1000.0).sqrt(), rtol=1e-6)
    assert abs(float(train.y.mean())) < 0.15
    assert abs(float(train.y.std()) - 1) < 0.1
    assert not torch.equal(train.x, test.x)
    assert train.x.mean(0).norm() < 1.2  # sqrt(d/n) = 1 for a uniform sphere
    assert torch.equal(sphere(5, 3, seed=1).train.x, sphere(5, 3, seed=1).train.x)
    assert torch.allclose(sphere(5, 3, radius=2.0).test.x.norm(dim=1), torch.tensor(2.0))


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf, "1"])
def test_the_radius_of_a_sphere_is_a_positive_number(radius):
    with pytest.raises((TypeError, ValueError), match="'radius' parameter of sphere must be a finite number > 0"):
        sphere(5, 3, radius=radius)


def test_a_split_and_a_data_set_unpack():
    dataset = sphere(6, 3, test=4)
    x, y = dataset.train
    train, test = dataset
    assert (len(train), len(test)) == (6, 4)
    assert x is train.x
    assert y is train.y


# Files of arrays


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", "mnist/MNIST/raw"), ("mnist", "."), ("fashion-mnist", "fashion-mnist"), ("fashion-mnist", ".")],
)
def test_idx_files_are_read_where_they_are(tmp_path, name, folder, packed):
    images, labels, *_ = write_idx(tmp_path / folder, packed=packed)
    dataset = load(name, tmp_path, verify=False)
    assert torch.equal(dataset.train.x, as_pixels(images)[:, None])
    assert torch.equal(dataset.train.y, torch.from_numpy(labels).long())
    assert dataset.test.x.shape == (10, 1, 28, 28)
    assert len(dataset.classes) == 10
    assert dataset.train.x.is_contiguous()


def test_the_root_is_the_argument_or_the_environment_or_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_idx(tmp_path / "data" / "mnist")
    monkeypatch.delenv("OPTEQ_DATA", raising=False)
    assert len(load("mnist", verify=False).train) == 20
    write_idx(tmp_path / "elsewhere" / "mnist", (30, 10))
    monkeypatch.setenv("OPTEQ_DATA", str(tmp_path / "elsewhere"))
    assert len(load("mnist", verify=False).train) == 30
    assert len(load("mnist", str(tmp_path / "data"), verify=False).train) == 20
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load("mnist", "~/data", verify=False).train) == 20
    monkeypatch.setenv("OPTEQ_DATA", "")
    assert len(load("mnist", verify=False).train) == 20


@pytest.mark.parametrize(
    ("name", "write"),
    [("mnist", write_idx), ("cifar10", write_cifar_python), ("svhn", write_svhn), ("camvid", write_camvid)],
)
def test_the_root_itself_is_a_data_set_only_where_it_is_given(tmp_path, monkeypatch, name, write):
    write(tmp_path)
    assert {line.name for line in describe(tmp_path) if line.found} == {"digits", "sphere"}
    assert len(load(name, tmp_path, verify=False).train)
    monkeypatch.setenv("OPTEQ_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{name} was not found under {tmp_path}\."):
        load(name, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "other"), [("mnist", "fashion-mnist"), ("fashion-mnist", "mnist")])
def test_published_files_of_one_data_set_are_not_taken_for_the_other(tmp_path, monkeypatch, name, other, packed, verify):
    write_idx(tmp_path, packed=packed)
    for path in tmp_path.iterdir():
        monkeypatch.setitem(MD5[name], path.name, hashlib.md5(path.read_bytes()).hexdigest())
    assert len(load(name, tmp_path, verify=verify).train) == 20
    with pytest.raises(ValueError, match=rf"{tmp_path} holds {name}, not {other}: "):
        load(other, tmp_path, verify=verify)


def assert_is_the_cifar_of_the_makers(dataset):
    parts = cifar_arrays()
    expected = as_pixels(np.concatenate([x for x, _ in parts[:5]])).reshape(-1, 3, 32, 32)
    assert torch.equal(dataset.train.x, expected)
    assert dataset.train.y.tolist() == np.concatenate([y for _, y in parts[:5]]).tolist()
    assert torch.equal(dataset.test.x, as_pixels(parts[5][0]).reshape(-1, 3, 32, 32))
    assert dataset.classes[:2] == ("airplane", "automobile")


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "."])
def test_cifar_is_read_from_binary_files(tmp_path, folder):
    write_cifar_binary(tmp_path / folder)
    assert_is_the_cifar_of_the_makers(load("cifar10", tmp_path, verify=False))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_cifar_is_read_from_python_batches(tmp_path, protocol):
    write_cifar_python(tmp_path / "cifar-10-batches-py", protocol)
    assert_is_the_cifar_of_the_makers(load("cifar10", tmp_path, verify=False))


def test_cifar_is_read_from_batches_of_python_2(tmp_path):
    for name, part in zip(CIFAR_PYTHON, cifar_arrays(), strict=True):
        (tmp_path / name).write_bytes(python2_batch(*part))
    assert_is_the_cifar_of_the_makers(load("cifar10", tmp_path, verify=False))


class Malicious:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path, protocol):
    from os import mkdir

    write_cifar_python(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({"data": Malicious(mkdir, str(tmp_path / "trap"))}, protocol))
    with pytest.raises(ValueError, match=r"data_batch_3 cannot be read.*mkdir.*only arrays and plain types are admitted"):
        load("cifar10", tmp_path, verify=False)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "call", [(eval, "1"), (getattr, "", "join"), (np.load, "x.npy"), (torch.load, "x.pt"), (type, "A", (), {})]
)
def test_no_name_outside_of_the_list_is_admitted(tmp_path, call):
    write_cifar_python(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Malicious(*call)))
    with pytest.raises(ValueError, match="only arrays and plain types"):
        load("cifar10", tmp_path, verify=False)


def check_refused(tmp_path, payload):
    """The one line with which a batch that holds these opcodes is refused."""
    write_cifar_python(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04" + payload + b".")
    with pytest.raises(ValueError, match="data_batch_1 cannot be read as a pickle") as error:
        load("cifar10", tmp_path, verify=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def code_of(text):
    return b"cnumpy\ndtype\nX" + struct.pack("<I", len(text)) + text.encode() + b"\x89\x88\x87R"


@pytest.mark.parametrize("code", ["V8", "O", "|O", ">i8", "i8", "u1,u1", "2u1"])
def test_only_arrays_of_bytes_are_admitted(tmp_path, code):
    state = b"(K\x03X\x01\x00\x00\x00|NNNK\x08K\x01K\x3ftb"  # version, order, ..., 8 bytes, aligned to 1, the flags of objects
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    dtype = code_of(code) + state
    message = check_refused(tmp_path, array + b"(K\x01K\x01\x85" + dtype + b"\x89C\x08AAAAAAAAtb")
    assert f"array of type {code!r}, and only bytes are admitted" in message


def test_the_state_of_a_type_does_not_change_bytes(tmp_path):
    state = b"(K\x03X\x01\x00\x00\x00|NNNK\x08K\x01K\x3ftb"
    check_refused(tmp_path, code_of("u1") + state + b"0cos\nsystem\n")
    assert (np.dtype(np.uint8).itemsize, np.dtype(np.uint8).hasobject) == (1, False)


@pytest.mark.parametrize(
    ("buffer", "dtype"),
    [(b"J\xff\xff\xff\x7f", code_of("u1")), (b"C\x08AAAAAAAA", b"X\x01\x00\x00\x00O")],
    ids=["a number", "objects"],
)
def test_an_array_is_made_of_bytes_that_are_there(tmp_path, buffer, dtype):
    payload = b"cnumpy.core.numeric\n_frombuffer\n(" + buffer + dtype + b"K\x01\x85X\x01\x00\x00\x00Ct" + b"R"
    assert "an array that is not made of bytes" in check_refused(tmp_path, payload)


@pytest.mark.parametrize(
    "state",
    [b"}X\x08\x00\x00\x00__code__Ns", b"N}X\x0c\x00\x00\x00__defaults__Ns\x86", b"N}X\x08\x00\x00\x00functionNs\x86"],
    ids=["__dict__", "__defaults__", "function"],
)
@pytest.mark.parametrize(
    "name",
    [b"numpy\ndtype", b"numpy\nndarray", b"_codecs\nencode", b"numpy._core.multiarray\n_reconstruct"],
    ids=["dtype", "ndarray", "encode", "_reconstruct"],
)
def test_a_pickle_cannot_set_attributes_of_what_it_names(tmp_path, name, state):
    def attributes():
        functions = [call.function for call in pickles._ADMITTED.values() if not isinstance(call, str)]
        return [(function, dict(vars(function)), function.__defaults__) for function in functions]

    before = attributes()
    assert "attribute" in check_refused(tmp_path, b"c" + name + b"\n" + state + b"b")
    assert attributes() == before
    write_cifar_python(tmp_path)
    assert_is_the_cifar_of_the_makers(load("cifar10", tmp_path, verify=False))


def test_a_name_of_many_lines_is_refused_with_one(tmp_path):
    name = b"X" + struct.pack("<I", 600) + b"a\nb" * 200
    assert len(check_refused(tmp_path, name + name + b"\x93")) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("opcode", [b"r" + struct.pack("<I", 2**20), b"p1048576\n"], ids=["LONG_BINPUT", "PUT"])
def test_a_pickle_gets_no_room_for_more_objects_than_it_has(tmp_path, opcode):
    assert "it has 3 bytes before the object that it counts as number 1048576" in check_refused(tmp_path, b"N" + opcode)


def test_a_stray_binary_batch_does_not_hide_the_python_ones(tmp_path):
    write_cifar_python(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(b"stray")
    assert_is_the_cifar_of_the_makers(load("cifar10", tmp_path, verify=False))


def test_packed_files_count_only_where_they_can_be_read(tmp_path):
    write_svhn(tmp_path / "svhn")
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.rename(path.with_name(f"{path.name}.gz"))
    assert not next(line.found for line in describe(tmp_path) if line.name == "svhn")
    with pytest.raises(FileNotFoundError, match=r"not complete in .*svhn: test_32x32\.mat not found"):
        load("svhn", tmp_path, verify=False)


def test_label_10_of_svhn_is_the_digit_0(tmp_path):
    write_svhn(tmp_path / "svhn")
    dataset = load("svhn", tmp_path, verify=False)
    assert dataset.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    raw = as_pixels(random_bytes(0, 32, 32, 3, 12))
    assert all(torch.equal(dataset.train.x[i, c], raw[:, :, c, i]) for i in range(12) for c in range(3))
    assert dataset.test.x.shape == (12, 3, 32, 32)


# Folders of images


def test_class_folders_are_read_in_the_order_of_their_names(tmp_path):
    write_class_folders(tmp_path / "imagenette64", ("n02102040", "n01440764"), (64, 64))
    write_image(tmp_path / "imagenette64/train/n01440764/UPPER.PNG", random_bytes(9, 64, 64, 3))
    for other in ("notes.txt", "._0.png"):
        (tmp_path / "imagenette64/train/n01440764" / other).write_text("not an image by its name")
    dataset = load("imagenette64", tmp_path)
    assert dataset.classes == ("tench", "English springer")
    assert dataset.train.y.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert dataset.test.y.tolist() == [0, 0, 1, 1]
    assert isinstance(dataset.train.x, torch.Tensor)
    assert torch.equal(dataset.train.x[1], as_pixels(random_bytes(1, 64, 64, 3)).permute(2, 0, 1))


def test_images_are_cropped_around_the_centre_then_resized(tmp_path):
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255  # the square in the middle
    write_image(tmp_path / "wide.png", pixels)
    write_image(tmp_path / "tall.png", pixels.transpose(1, 0, 2).copy())
    paths = [str(tmp_path / "wide.png"), str(tmp_path / "tall.png")]
    assert torch.equal(Images(paths, (10, 10))[:], torch.ones(2, 3, 10, 10))
    small = Images(paths, (4, 4))[:]  # Pillow's filter looks half a pixel beyond the crop
    assert small.min() > 0.85
    assert torch.equal(small[:, :, 1:3, 1:3], torch.ones(2, 3, 2, 2))


def test_a_grey_image_and_a_large_jpeg_become_three_channels(tmp_path):
    Image.new("L", (640, 480), 128).save(tmp_path / "a.jpg")
    x = Images([str(tmp_path / "a.jpg")], (32, 48))[0]
    assert torch.allclose(x, torch.full((3, 32, 48), 128 / 255), atol=0.01)


def test_sixteen_bits_are_scaled_and_pixels_of_no_known_range_refused(tmp_path):
    levels = np.array([[200, 257 * 10], [257 * 128, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    x = Images([str(tmp_path / "a.png")], (2, 2))[0]
    assert torch.allclose(x[0] * 255, torch.tensor([[1.0, 10.0], [128.0, 255.0]]), atol=1e-4)  # to the nearest
    Image.fromarray(levels.astype(np.float32)).save(tmp_path / "b.tiff")
    with pytest.raises(ValueError, match="floating-point numbers of no known range"):
        Images([str(tmp_path / "b.tiff")], (2, 2))[0]
    Image.fromarray(np.full((2, 2), 70000, dtype=np.int32)).save(tmp_path / "c.tiff")
    with pytest.raises(ValueError, match="from 70000 to 70000"):
        Images([str(tmp_path / "c.tiff")], (2, 2))[0]


def test_folders_too_large_to_hold_are_lazy_and_index_as_a_tensor_does(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    full = load("imagenet", tmp_path, size=(4, 6)).train.x
    monkeypatch.setattr(images, "IN_MEMORY", 4 * 3 * 4 * 6 * (6 + 4) - 1)
    lazy = load("imagenet", tmp_path, size=(4, 6)).train.x
    assert isinstance(lazy, Images)
    assert isinstance(full, torch.Tensor)
    assert (lazy.shape, lazy.dtype, len(lazy)) == (full.shape, full.dtype, 6)
    mask = torch.tensor([True, False, True, False, False, True])
    for index in [
        0,
        -1,
        slice(1, 5, 2),
        slice(0, 0),
        [2, 0],
        torch.tensor([3, 3, 1]),
        torch.tensor(2),
        torch.tensor([[0], [1]]),
        mask,
    ]:
        assert torch.equal(lazy[index], full[index])
    with pytest.raises(IndexError):
        lazy[torch.tensor([6])]
    assert "png" not in repr(lazy)


def test_images_are_taken_without_decoding(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    full = load("imagenet", tmp_path, size=(4, 6)).train.x
    monkeypatch.setattr(images, "IN_MEMORY", 0)
    lazy = load("imagenet", tmp_path, size=(4, 6)).train.x
    for rows in (slice(1, 5, 2), [2, 0, -1], torch.tensor([3, 3, 1]), torch.arange(6) % 2 == 0, slice(0, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(images, "decode", None)
            taken = lazy.take(rows)
        assert isinstance(taken, Images)
        assert taken.shape == full[rows].shape
        assert torch.equal(taken[:], full[rows])
    with pytest.raises(IndexError):
        lazy.take([6])
    for rows, shape in ((2, r"\[\]"), (torch.tensor([[0], [1]]), r"\[2, 1\]")):
        with pytest.raises(ValueError, match=rf"'rows' parameter of Images must be a slice.*Got {shape} instead"):
            lazy.take(rows)


def test_a_folder_at_the_limit_is_held(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    monkeypatch.setattr(images, "IN_MEMORY", 4 * 3 * 4 * 6 * (6 + 4))
    assert isinstance(load("imagenet", tmp_path, size=(4, 6)).train.x, torch.Tensor)


def test_class_folders_without_a_size_take_that_of_the_first_image(tmp_path):
    from opteq.data.folders import class_folders

    write_class_folders(tmp_path, size=(5, 7))
    assert class_folders(tmp_path, "own", None).train.x.shape == (6, 3, 5, 7)


def test_camvid_has_label_maps_beside_its_images(tmp_path):
    write_camvid(tmp_path / "camvid")
    dataset = load("camvid", tmp_path)
    assert (len(dataset.classes), dataset.ignore) == (11, 11)
    for part in (dataset.train, dataset.valid, dataset.test):
        assert part.x.shape == (2, 3, 6, 8)
        assert torch.equal(part.y[1], torch.from_numpy(random_bytes(1, 6, 8) % 12).long())
        check_split(part, dataset.classes, dataset.ignore)


def test_label_maps_are_resized_with_their_images_without_mixing_ids(tmp_path):
    for part in ("train", "val", "test"):
        image = np.zeros((8, 12, 3), np.uint8)
        image[:, 6:] = 255
        write_image(tmp_path / part / "a.png", image)
        write_image(tmp_path / f"{part}annot" / "a.png", np.where(image[:, :, 0] == 255, 10, 0).astype(np.uint8))
    x, y = load("camvid", tmp_path, size=4).train
    assert set(y.unique().tolist()) == {0, 10}
    assert torch.equal((x[0, 0] > 0.5), y[0] == 10)
    assert torch.equal(y[0, 0], torch.tensor([0, 0, 10, 10]))


@pytest.mark.parametrize("kind", ["labelIds", "labelTrainIds"])
def test_cityscapes_has_nineteen_train_ids_and_void(tmp_path, kind):
    write_cityscapes(tmp_path / "cityscapes", kind)
    dataset = load("cityscapes", tmp_path, size=(8, 16))
    assert (len(dataset.classes), dataset.ignore, len(dataset.train), len(dataset.test)) == (19, 255, 2, 2)
    pixels = dataset.train.y[0].flatten()
    if kind == "labelTrainIds":
        assert pixels[:20].tolist() == [*range(19), 255]
    else:  # ids as cityscapesscripts lists them
        known = {7: "road", 8: "sidewalk", 11: "building", 19: "traffic light", 26: "car", 31: "train", 33: "bicycle"}
        assert {i: dataset.classes[pixels[i]] for i in known} == known
        assert [i for i in range(34) if pixels[i] == 255] == [*range(7), 9, 10, 14, 15, 16, 18, 29, 30]
    assert load("cityscapes", tmp_path).train.x.shape == (2, 3, 256, 512)


# Bad input


@pytest.mark.parametrize(
    ("given", "meant"), [("minst", "mnist"), ("CIFAR-10", "cifar10"), ("imagnet", "imagenet"), ("FashionMNIST", "fashion-mnist")]
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(given, meant):
    with pytest.raises(ValueError, match=rf"The 'name' parameter of load must be one of digits, .*Did you mean '{meant}'\?"):
        load(given)


def test_a_name_unlike_any_other_gets_no_suggestion():
    with pytest.raises(ValueError, match=r"Got 'zzzz' instead\.$"):
        load("zzzz")
    with pytest.raises(TypeError, match="the name of a data set"):
        load(3)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("digits", "sphere")])
def test_missing_files_are_an_error_that_says_what_to_put_where(tmp_path, name):
    with pytest.raises(FileNotFoundError) as error:
        load(name, tmp_path)
    text = str(error.value)
    source = next(line.source for line in describe(tmp_path) if line.name == name)
    assert text.startswith(f"{name} was not found under {tmp_path}. Put ")
    assert source in text
    assert all(way in text for way in ("root=", "OPTEQ_DATA", "--data.root", "--root"))
    assert "\n" not in text


def test_the_missing_file_of_four_is_named(tmp_path):
    write_idx(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / f"{IDX_FILES[3]}.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"not complete in {tmp_path}/MNIST/raw: {IDX_FILES[3]} not found\. Put {IDX_FILES[0]}, "
    ):
        load("mnist", tmp_path)


def test_a_file_other_than_the_published_one_is_an_error(tmp_path):
    write_idx(tmp_path / "mnist")
    with pytest.raises(
        ValueError, match=rf"{IDX_FILES[0]}\.gz is not the published file: its MD5 must be f68b\w+\. Got \w+ instead.*verify=False"
    ):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "write"), [("cifar10", write_cifar_binary), ("cifar10", write_cifar_python), ("svhn", write_svhn)]
)
def test_every_format_is_verified(tmp_path, name, write):
    write(tmp_path)
    with pytest.raises(ValueError, match="is not the published file"):
        load(name, tmp_path)


def test_a_file_with_its_published_checksum_passes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    check_md5(tmp_path / "a", {"a": "900150983cd24fb0d6963f7d28e17f72"})  # RFC 1321
    check_md5(tmp_path / "a", {})


def test_every_file_has_a_checksum_of_the_right_form():
    files = [digest for table in MD5.values() for digest in table.values()]
    assert all(len(digest) == 32 and int(digest, 16) for digest in files)
    assert len(set(files)) == len(files) == 8 + 8 + 12 + 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, idx_bytes(random_bytes(0, 20, 28, 28))[:-5], r"must have 15696 bytes for its 20 items\. Got 15691"),
        (0, idx_bytes(random_bytes(0, 20, 28, 28)) + b"x", r"must have 15696 bytes for its 20 items\. Got more instead"),
        (0, struct.pack(">4I", 0x803, *[2**32 - 1] * 3) + b"x", "Got 17 instead"),
        (0, b"\0\0", "magic number must be 2051. Got 0 instead"),
        (0, idx_bytes(random_bytes(0, 20)), "magic number must be 2051. Got 2049 instead"),
        (1, idx_bytes(random_bytes(0, 20, 1, 1)), "magic number must be 2049. Got 2051 instead"),
        (1, idx_bytes(np.zeros(19, np.uint8)), "holds 20 images, but train-labels-idx1-ubyte holds 19 labels"),
        (
            3,
            idx_bytes(np.array([*range(9), 10], np.uint8)),
            r"t10k-labels-idx1-ubyte must have labels from 0 to 9. Got 10 instead, in sample 9",
        ),
    ],
)
def test_a_broken_idx_file_is_an_error(tmp_path, file, content, message):
    write_idx(tmp_path, packed=False)
    (tmp_path / IDX_FILES[file]).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("mnist", tmp_path, verify=False)


@pytest.mark.parametrize("cut", [0, 5, 200, -4])
def test_a_truncated_gz_is_an_error(tmp_path, cut):
    write_idx(tmp_path)
    path = tmp_path / f"{IDX_FILES[2]}.gz"
    path.write_bytes(path.read_bytes()[:cut] if cut else b"not gzip")
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        load("mnist", tmp_path, verify=False)


def test_a_gz_is_not_unpacked_beyond_what_its_header_says(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / f"{IDX_FILES[2]}.gz"
    path.write_bytes(gzip.compress(idx_bytes(random_bytes(0, 10, 28, 28)) + bytes(2**26), 1))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"must have 7856 bytes for its 10 items. Got more instead"):
            load("mnist", tmp_path, verify=False)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "records of 3073 bytes. Got 0"),
        (bytes(3072), "Got 3072"),
        (b"\x0a" + bytes(3072), "data_batch_2.bin must have labels from 0 to 9. Got 10"),
    ],
)
def test_a_broken_binary_batch_is_an_error(tmp_path, content, message):
    write_cifar_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path, verify=False)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "must hold a dictionary. Got list"),
        ({"labels": [1]}, r"must hold 'data'.*Got None"),
        ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "array of type 'f8', and only bytes are admitted"),
        ({"data": [[1] * 3072], "labels": [1]}, "must hold 'data'"),
        ({"data": np.zeros((2, 30), np.uint8), "labels": [1, 2]}, r"Got \(2, 30\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, r"must hold 'labels', 2 whole numbers. Got int64 \[1\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "must hold 'labels'"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "must hold 'labels'"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [-1, 0]}, "Got -1 instead, in sample 0"),
    ],
)
def test_a_batch_without_images_or_labels_is_an_error(tmp_path, batch, message):
    write_cifar_python(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path, verify=False)


def test_a_truncated_pickle_is_an_error(tmp_path):
    write_cifar_python(tmp_path)
    (tmp_path / "test_batch").write_bytes((tmp_path / "test_batch").read_bytes()[:1000])
    with pytest.raises(ValueError, match="test_batch cannot be read as a pickle"):
        load("cifar10", tmp_path, verify=False)


def test_a_broken_mat_file_is_an_error(tmp_path):
    from scipy.io import savemat

    write_svhn(tmp_path)
    path = tmp_path / "test_32x32.mat"
    whole = path.read_bytes()
    for content in (whole[:3000], b"", b"not MATLAB" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"test_32x32\.mat is not a MATLAB file with X and y"):
            load("svhn", tmp_path, verify=False)
    savemat(path, {"X": random_bytes(0, 32, 32, 3, 4), "y": np.ones((3, 1), np.uint8)})
    with pytest.raises(ValueError, match=r"X \[32, 32, 3, 3\] for its 3 labels. Got uint8 \[32, 32, 3, 4\]"):
        load("svhn", tmp_path, verify=False)
    savemat(path, {"X": random_bytes(0, 32, 32, 3, 2), "y": np.array([[1], [11]], np.uint8)})
    with pytest.raises(ValueError, match="Got 11 instead, in sample 1"):
        load("svhn", tmp_path, verify=False)


def test_an_image_that_is_not_an_image_is_an_error(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    for content in (b"no image", (tmp_path / "val/dog/0.png").read_bytes()[:60]):
        (tmp_path / "val/dog/1.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"val/dog/1\.png is not an image that can be read"):
            load("imagenet", tmp_path, size=8)
    monkeypatch.setattr(images, "IN_MEMORY", 0)
    lazy = load("imagenet", tmp_path, size=8).test.x
    assert lazy[:3].shape == (3, 3, 8, 8)
    with pytest.raises(ValueError, match=r"val/dog/1\.png"):
        lazy[3]


def test_class_folders_must_agree_and_hold_images(tmp_path):
    write_class_folders(tmp_path)
    write_image(tmp_path / "val/horse/0.png", random_bytes(0, 8, 8, 3))
    with pytest.raises(ValueError, match=r"same classes in train and val\. Got horse in only one"):
        load("imagenet", tmp_path)
    (tmp_path / "train/horse").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train/horse holds no images"):
        load("imagenet", tmp_path)


def test_a_part_without_class_folders_is_an_error(tmp_path):
    write_class_folders(tmp_path)
    (tmp_path / "empty/train").mkdir(parents=True)
    (tmp_path / "empty/val").mkdir()
    with pytest.raises(FileNotFoundError, match="must hold folders of images, and has none"):
        load("imagenet", tmp_path / "empty")


@pytest.mark.parametrize(
    ("path", "pixels", "error", "message"),
    [
        (
            "valannot/frame1.png",
            random_bytes(0, 6, 9) % 11,
            ValueError,
            r"valannot/frame1.png must be 6 x 8, as its image. Got 6 x 9",
        ),
        ("valannot/frame1.png", np.full((6, 8), 12, np.uint8), ValueError, r"labels from 0 to 10 \(or 11, void\). Got 12"),
        ("valannot/frame1.png", random_bytes(0, 6, 8, 3), ValueError, "one byte a pixel. Got an image of mode RGB"),
        ("valannot/frame9.png", random_bytes(0, 6, 8), FileNotFoundError, "no image for the label map frame9"),
        ("train/frame9.png", random_bytes(0, 6, 8, 3), FileNotFoundError, "no label map for the image frame9"),
        ("test/frame1.png", random_bytes(0, 3, 4, 3), ValueError, r"test/frame1.png is 3 x 4, others 6 x 8: give the size="),
    ],
)
def test_label_maps_must_fit_their_images(tmp_path, path, pixels, error, message):
    write_camvid(tmp_path)
    write_image(tmp_path / path, pixels)
    with pytest.raises(error, match=message):
        load("camvid", tmp_path)


def test_label_maps_too_large_to_hold_are_refused(tmp_path, monkeypatch):
    write_camvid(tmp_path)
    monkeypatch.setattr(segmentation, "MASKS_IN_MEMORY", 8 * 6 * 6 * 8 - 1)
    with pytest.raises(ValueError, match=r"Label maps of 6 x 8 pixels would take 0\.0 GiB\. Give a smaller size="):
        load("camvid", tmp_path)
    assert load("camvid", tmp_path, size=4).train.y.shape == (2, 4, 4)


def test_images_of_one_size_are_resized():
    whole, small = load("digits"), load("digits", size=(4, 5))
    for split, shrunk in zip(whole, small, strict=True):
        assert torch.equal(shrunk.x, resize(split.x, (4, 5)))
        assert torch.equal(shrunk.y, split.y)
    assert load("digits", size=4).test.x.shape == (360, 1, 4, 4)


@pytest.mark.parametrize(
    ("name", "size", "error", "message"),
    [
        ("sphere", 8, ValueError, "left out for sphere, whose samples are no images"),
        ("digits", 0, ValueError, "an integer >= 1"),
        ("imagenet", 0, ValueError, "an integer >= 1"),
        ("imagenet", 2.5, TypeError, "an integer >= 1"),
        ("imagenet", (2, 3, 4), ValueError, r"a number or \(height, width\)"),
    ],
)
def test_a_size_must_make_sense(name, size, error, message):
    with pytest.raises(error, match=f"'size' parameter of load must be {message}"):
        load(name, size=size)


@pytest.mark.parametrize(
    ("paths", "size", "error", "words"),
    [
        ("a.png", (2, 2), TypeError, "'paths' parameter of Images must be a list of paths. Got 'a.png'"),
        (Path("a.png"), (2, 2), TypeError, "'paths' parameter of Images must be a list of paths"),
        (["a.png"], 2, TypeError, r"'size' parameter of Images must be a tuple \(height, width\). Got 2"),
        (["a.png"], (2, 0), ValueError, "'size' parameter of Images must be an integer >= 1. Got 0"),
        (["a.png"], (2, 2, 2), ValueError, r"'size' parameter of Images must be a number or \(height, width\)"),
    ],
)
def test_images_are_a_list_of_files_and_two_sides(paths, size, error, words):
    with pytest.raises(error, match=words):
        Images(paths, size)


@pytest.mark.parametrize(
    ("name", "module", "package"), [("digits", "sklearn.datasets", "scikit-learn"), ("imagenet", "PIL.Image", "Pillow")]
)
def test_a_missing_dependency_says_how_to_install_it(tmp_path, monkeypatch, name, module, package):
    write_class_folders(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'opteq\[train\]'"):
        load(name, tmp_path)


# Checks of a split


def make_split(x=None, y=None):
    return Split(torch.zeros(4, 1, 2, 2) if x is None else x, torch.tensor([0, 1, 2, 1]) if y is None else y)


def test_a_good_split_passes(tmp_path):
    check_split(make_split(), 3)
    check_split(make_split(), ("a", "b", "c"))
    check_split(make_split(y=torch.tensor([0, 1, 255, 1])), 2, ignore=255)
    check_split(make_split(y=torch.zeros(4)), 0)
    check_split(make_split(x=Images(["a"] * 4, (2, 2))), 3)


def with_nan(value):
    x = torch.zeros(4, 1, 2, 2)
    x[2, 0, 1, 0] = value
    return x


@pytest.mark.parametrize(
    ("split", "classes", "message"),
    [
        (make_split(x=torch.zeros(5, 1)), 3, "Got 5 samples and 4 labels"),
        (make_split(x=with_nan(float("nan"))), 3, "'x' of a split must be finite. Got NaN or infinity instead, in sample 2"),
        (make_split(x=with_nan(float("inf"))), 3, "in sample 2"),
        (make_split(), 2, r"labels from 0 to 1\. Got 2 instead, in sample 2"),
        (make_split(y=torch.tensor([0, -1, 2, 1])), 3, "Got -1 instead, in sample 1"),
        (make_split(y=torch.zeros(4)), 3, "labels of type torch.int64. Got torch.float32"),
        (make_split(y=torch.zeros(4, dtype=torch.int32)), 3, "Got torch.int32"),
        (make_split(), (), "regression must be floating-point numbers. Got torch.int64"),
        (make_split(y=torch.tensor([0, 0, 0, float("nan")])), (), "'y' of a split must be finite.*sample 3"),
    ],
)
def test_a_bad_split_is_an_error(split, classes, message):
    with pytest.raises(ValueError, match=message):
        check_split(split, classes)


def test_a_void_label_is_only_allowed_where_it_is_named():
    with pytest.raises(ValueError, match="Got 255"):
        check_split(make_split(y=torch.tensor([0, 1, 255, 1])), 3)
    with pytest.raises(TypeError, match="a Split"):
        check_split((torch.zeros(1), torch.zeros(1)), 3)


# Descriptions and fetching


def test_descriptions_say_what_is_found(tmp_path):
    write_class_folders(tmp_path / "imagenette64")
    write_cifar_python(tmp_path / "cifar-10-batches-py")
    lines = {line.name: line for line in describe(tmp_path)}
    assert tuple(lines) == names()
    assert {name for name, line in lines.items() if line.found} == {"digits", "sphere", "imagenette64", "cifar10"}
    assert lines["cifar10"].shape == "3 x 32 x 32"
    assert lines["svhn"].source.startswith("http")
    assert all(line.samples and line.terms for line in lines.values())


@pytest.fixture
def tiny_openml(monkeypatch):
    """OpenML with data sets of 30 + 10 samples; the list of what was asked for."""
    asked = []

    def fetch_openml(**arguments):
        asked.append(arguments)
        width = 784 if arguments["data_id"] != OPENML["cifar10"].number else 3072
        target = np.array([str(i % 10) for i in range(40)], dtype=object)
        return SimpleNamespace(data=random_bytes(0, 40, width).astype(np.int64), target=target)

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch_openml)
    for name, entry in OPENML.items():
        monkeypatch.setitem(OPENML, name, Entry(entry.number, entry.shape, 30, (1,) * 10))
    return asked


@pytest.mark.parametrize(
    ("name", "number", "shape"),
    [("mnist", 554, (1, 28, 28)), ("fashion-mnist", 40996, (1, 28, 28)), ("cifar10", 40927, (3, 32, 32))],
)
def test_files_are_fetched_through_openml(tmp_path, tiny_openml, name, number, shape):
    dataset = load(name, tmp_path, download=True)
    assert tiny_openml[0].items() >= {"data_id": number, "as_frame": False, "data_home": str(tmp_path)}.items()
    assert dataset.train.x.shape == (30, *shape)
    assert torch.equal(dataset.test.x.flatten(1), as_pixels(random_bytes(0, 40, len(dataset.test.x[0].flatten())))[30:])
    assert dataset.test.y.tolist() == list(range(10))
    check_split(dataset.train, dataset.classes)


def test_files_that_are_there_are_not_fetched(tmp_path, tiny_openml):
    write_idx(tmp_path / "mnist")
    assert len(load("mnist", tmp_path, verify=False, download=True).train) == 20
    assert tiny_openml == []


def test_rows_in_another_order_are_refused(tmp_path, tiny_openml, monkeypatch):
    monkeypatch.setitem(OPENML, "mnist", Entry(554, (1, 28, 28), 30, (2, 0) + (1,) * 8))
    with pytest.raises(ValueError, match="mnist of OpenML must end with the test part"):
        load("mnist", tmp_path, download=True)


def test_the_counts_of_the_test_parts_are_those_of_the_data_sets():
    assert {name: sum(entry.test_counts) for name, entry in OPENML.items()} == dict.fromkeys(OPENML, 10000)


@pytest.mark.parametrize("failure", [URLError("no network"), TimeoutError("no network")])
def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path, monkeypatch, failure):
    def fetch_openml(**arguments):
        raise failure

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch_openml)
    with pytest.raises(
        FileNotFoundError, match=rf"could not be fetched from OpenML .*no network.*Put {IDX_FILES[0]}.* into {tmp_path}/mnist"
    ):
        load("mnist", tmp_path, download=True)


def test_what_is_not_on_openml_names_its_own_address(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"svhn is not to be had from OpenML.*http://ufldl\.stanford\.edu/housenumbers/"):
        load("svhn", tmp_path, download=True)


# Preparations


def test_two_classes_are_chosen_and_labelled_by_their_order():
    y = torch.tensor([3, 7, 1, 7, 3, 3])
    split = two_classes(Split(torch.arange(6.0)[:, None], y), (7, 3))
    assert split.x.flatten().tolist() == [0, 1, 3, 4, 5]
    assert split.y.tolist() == [1, 0, 0, 1, 1]


def test_two_classes_draw_so_many_of_each():
    train, _ = load("digits")
    a, again, other = (two_classes(train, (0, 1), 20, seed) for seed in (0, 0, 1))
    assert torch.bincount(a.y).tolist() == [20, 20]
    assert torch.equal(a.x, again.x)
    assert not torch.equal(a.x, other.x)
    assert len(a.x.flatten(1).unique(dim=0)) == len(a)


@pytest.mark.parametrize(
    ("classes", "count", "message"),
    [
        ((0, 1), 200, "at most the 142 samples that class 0 has. Got 200"),
        ((0, 12), None, "labels that samples have. Got 12"),
        ((1, 1), 5, "two different"),
    ],
)
def test_classes_that_are_not_there_are_an_error(classes, count, message):
    with pytest.raises(ValueError, match=message):
        two_classes(load("digits").train, classes, count)


def test_label_maps_have_no_two_classes(tmp_path):
    write_camvid(tmp_path / "camvid")
    dataset = load("camvid", tmp_path)
    message = r"must be one label a sample, not a map of them: y of shape \[n\]\. Got \[2, 6, 8\]"
    with pytest.raises(ValueError, match=f"'split' parameter of two_classes {message}"):
        two_classes(dataset.train)
    with pytest.raises(ValueError, match=f"'dataset' parameter of theory_split {message}"):
        theory_split(dataset, train=2, test=2)


def test_grey_is_the_luminance_of_pillow():
    pixels = random_bytes(0, 5, 6, 3)
    ours = grey(as_pixels(pixels).permute(2, 0, 1)[None])
    theirs = torch.from_numpy(np.array(Image.fromarray(pixels).convert("L"))) / 255
    assert ours.shape == (1, 1, 5, 6)
    assert (ours[0, 0] - theirs).abs().max() < 1 / 255
    assert grey(ours) is ours
    with pytest.raises(ValueError, match="1 or 3 channels"):
        grey(torch.zeros(1, 2, 3, 3))


def test_resize_is_that_of_pillow():
    pixels = random_bytes(0, 32, 32)
    theirs = np.array(Image.fromarray(pixels).resize((28, 20), Image.Resampling.BILINEAR))
    ours = resize(as_pixels(pixels)[None, None], (20, 28))
    assert (ours[0, 0] - torch.from_numpy(theirs) / 255).abs().max() < 1.5 / 255
    assert resize(ours, (20, 28)) is ours
    assert resize(ours, 7).shape == (1, 1, 7, 7)
    with pytest.raises(ValueError, match=r"\[n, channels, height, width\]"):
        resize(torch.zeros(3, 3), 2)
    with pytest.raises(ValueError, match="'size' parameter of resize must be an integer >= 1"):
        resize(ours, 0)
    for size in ((4,), (4, 4, 4)):
        with pytest.raises(ValueError, match=r"'size' parameter of resize must be a number or \(height, width\)"):
            resize(ours, size)


def test_norms_are_one_or_sqrt_d():
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(flat(unit_norm(x)).norm(dim=1), torch.ones(5, dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(flat(norm_sqrt_d(x)).norm(dim=1), torch.full((5,), 24.0, dtype=torch.float64).sqrt(), rtol=1e-14)
    assert torch.allclose(unit_norm(x) * flat(x).norm(dim=1).reshape(-1, 1, 1, 1), x)
    x[3] = 0
    for scale in (unit_norm, norm_sqrt_d):
        with pytest.raises(ValueError, match=r"a finite norm > 0; look at sample 3\. Got 0\.0 instead"):
            scale(x)


def test_the_data_of_the_theory_are_vectors_of_one_norm_with_signs():
    digits = load("digits")
    data = theory_split(digits, train=200, test=40)
    assert data.train.x.shape == (200, 784)
    assert data.test.x.shape == (40, 784)
    assert data.classes == ()
    assert (data.train.x.dtype, data.train.y.dtype) == (torch.float64, torch.float64)
    assert torch.allclose(data.train.x.norm(dim=1), torch.ones(200, dtype=torch.float64), rtol=1e-14)
    assert (data.train.y == -1).sum() == (data.train.y == 1).sum() == 100
    chosen = two_classes(digits.train, (0, 1), 100)
    assert torch.equal(data.train.y, 2.0 * chosen.y.double() - 1)
    assert torch.equal(data.train.x, unit_norm(flat(resize(chosen.x.double(), 28))))
    check_split(data.train, data.classes)


def test_the_other_preparation_keeps_the_images_and_has_norm_sqrt_d():
    data = theory_split(
        load("digits"), classes=(3, 8), train=20, test=10, norm="sqrt_d", size=None, targets=(0, 5), dtype=torch.float32
    )
    assert data.train.x.shape == (20, 64)
    assert torch.allclose(data.train.x.norm(dim=1), torch.full((20,), 8.0))
    assert set(data.train.y.tolist()) == {0, 5}


def test_colour_images_become_grey_and_lazy_ones_are_read(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    monkeypatch.setattr(images, "IN_MEMORY", 0)
    data = theory_split(load("imagenet", tmp_path, size=8), train=4, test=4, size=5)
    assert data.train.x.shape == (4, 25)


def test_a_sphere_keeps_its_labels():
    points = sphere(10, 6, test=4)
    data = theory_split(points, train=8, test=4, norm="sqrt_d")
    assert torch.equal(data.train.y, points.train.y[:8].double())
    assert torch.allclose(data.train.x, points.train.x[:8].double(), rtol=1e-6)
    with pytest.raises(ValueError, match="'test' parameter of theory_split must be at most 4"):
        theory_split(points, train=8, test=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 21}, "'train' parameter of theory_split must be even"),
        ({"norm": "two"}, "'unit' or 'sqrt_d'"),
        ({"train": 1000}, "per_class"),
        ({"targets": (1, 2, 3)}, "'targets' parameter of theory_split must be two numbers"),
    ],
)
def test_settings_of_the_theory_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        theory_split(load("digits"), **{"train": 20, "test": 10, **arguments})


# Augmentation


def augmented_one_by_one(x, draws, fill):
    """The definition: pad by 9, cut out, mirror."""
    results = []
    for image, (dy, dx, mirror) in zip(x, draws.tolist(), strict=True):
        height, width = image.shape[-2:]
        padded = torch.full((*image.shape[:-2], height + 18, width + 18), fill, dtype=image.dtype)
        padded[..., 9 : 9 + height, 9 : 9 + width] = image
        cut = padded[..., 9 + dy : 9 + dy + height, 9 + dx : 9 + dx + width]
        results.append(cut.flip(-1) if mirror else cut)
    return torch.stack(results)


@settings(max_examples=30)
@given(
    crop=st.integers(0, 9),
    flip=st.booleans(),
    n=st.integers(1, 6),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_a_batch_is_augmented_as_one_by_one(crop, flip, n, height, width, seed):
    generator = torch.Generator().manual_seed(seed)
    augment = Augment(crop, flip)
    x = torch.rand(n, 3, height, width, generator=generator)
    y = torch.randint(0, 11, (n, height, width), generator=generator)
    draws = augment.draw(n, generator)
    moved, labels = augment.apply(x, draws, y, void=11)
    assert torch.equal(moved, augmented_one_by_one(x, draws, 0))
    assert torch.equal(labels, augmented_one_by_one(y, draws, 11))
    assert torch.equal(augment.apply(x, draws), moved)


def test_draws_cover_all_shifts_and_repeat_with_their_generator():
    draws = Augment(2, True).draw(2000, torch.Generator().manual_seed(0))
    assert draws.dtype == torch.int64
    counts = [draws[:, k].unique(return_counts=True) for k in range(3)]
    assert [values.tolist() for values, _ in counts] == [[-2, -1, 0, 1, 2], [-2, -1, 0, 1, 2], [0, 1]]
    assert all((number - 2000 / len(number)).abs().max() < 100 for _, number in counts)
    assert torch.equal(draws, Augment(2, True).draw(2000, torch.Generator().manual_seed(0)))
    assert not Augment().draw(50, torch.Generator().manual_seed(0)).any()


def test_processes_apply_their_rows_of_the_global_batch():
    augment, x = Augment(4, True), torch.rand(8, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    draws = augment.draw(8, torch.Generator().manual_seed(0))
    parts = [augment.apply(x[rank::2], draws[rank::2]) for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), augment.apply(x, draws))


def test_augmentation_leaves_its_input_and_class_labels_alone():
    x, y = torch.rand(4, 1, 5, 5), torch.arange(4)
    before = x.clone()
    augment = Augment(3, True)
    _, labels = augment.apply(x, augment.draw(4, torch.Generator().manual_seed(0)), y)
    assert torch.equal(x, before)
    assert labels is y
    same = Augment().apply(x, Augment().draw(4, torch.Generator()))
    assert torch.equal(same, x)


def test_a_mirror_alone_needs_no_void_label():
    y = torch.arange(6).reshape(1, 2, 3)
    _, labels = Augment(flip=True).apply(torch.zeros(1, 1, 2, 3), torch.tensor([[0, 0, 1]]), y)
    assert torch.equal(labels, y.flip(-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64)), r"'x' parameter of Augment must be of shape \[n, channels"),
        (
            (torch.zeros(2, 1, 3, 3), torch.zeros(3, 3, dtype=torch.int64)),
            r"'draws' parameter of Augment must be of shape \[2, 3\]",
        ),
        (
            (torch.zeros(2, 1, 3, 3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 4)),
            "'y' parameter of Augment must be of shape",
        ),
        ((torch.zeros(2, 1, 3, 3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 3)), "'void' parameter of Augment"),
    ],
)
def test_batches_that_do_not_fit_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Augment(1).apply(*arguments)


def test_settings_of_augmentation_are_checked():
    with pytest.raises(ValueError, match="'crop' parameter of Augment must be an integer >= 0"):
        Augment(-1)
    with pytest.raises(TypeError, match="'flip' parameter of Augment must be a bool"):
        Augment(0, 1)


def test_a_data_set_is_what_load_gives():
    assert isinstance(load("digits"), Dataset)
