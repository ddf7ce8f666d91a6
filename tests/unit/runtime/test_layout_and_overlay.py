"""Names, references and overlay options are checked before they become paths."""

import os
from pathlib import Path

import pytest

from sandboxes.runtime.exceptions import ImageUnusable, LayerMissing, StartFailed
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import DRIVER, check_image, find_layers, mount_options

REFERENCE = "layer-" + "0" * 32


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    made.make()
    return made


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 121, "a\n"])
def test_a_strange_name_is_no_path(layout: Layout, name: str) -> None:
    with pytest.raises(ValueError, match="not a sandbox name"):
        layout.instance(name)


@pytest.mark.parametrize("reference", ["", "layer-", "../x", REFERENCE + "0", REFERENCE + "\n"])
def test_a_strange_reference_is_a_missing_layer(layout: Layout, reference: str) -> None:
    with pytest.raises(LayerMissing):
        find_layers(layout, [reference], DRIVER)


def test_a_layer_of_another_driver_is_refused(layout: Layout) -> None:
    folder = layout.layer(REFERENCE)
    (folder / "diff").mkdir(parents=True)
    write_record(folder / "layer.json", {"driver": "fuse-overlayfs"})

    with pytest.raises(LayerMissing, match="written by fuse-overlayfs"):
        find_layers(layout, [REFERENCE], DRIVER)

    write_record(folder / "layer.json", {"driver": DRIVER})
    assert find_layers(layout, [REFERENCE], DRIVER) == [folder / "diff"]


def test_options_put_the_topmost_layer_first_and_stay_relative(layout: Layout) -> None:
    layers = [layout.root / "layers" / name / "diff" for name in ("top", "low")]

    options = mount_options(
        layout, image=Path("/images/base"), layers=layers, instance=layout.instance("a")
    )

    assert options == (
        "userxattr,lowerdir=layers/top/diff:layers/low/diff:/images/base,"
        "upperdir=instances/a/upper,workdir=instances/a/work"
    )


@pytest.mark.parametrize("path", ["/a,b", "/a:b", "/a\\b", '/a"b'])
def test_a_path_that_would_end_an_option_is_refused(layout: Layout, path: str) -> None:
    with pytest.raises(StartFailed, match="must not hold"):
        mount_options(layout, image=Path(path), layers=[], instance=layout.instance("a"))


def test_too_many_layers_are_refused(layout: Layout) -> None:
    layers = [layout.layer(f"layer-{index:032x}") / "diff" for index in range(100)]

    with pytest.raises(StartFailed, match="100 layers"):
        mount_options(layout, image=Path("/i"), layers=layers, instance=layout.instance("a"))


def test_an_image_of_another_owner_says_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / ".singularity.d").mkdir()
    uid, gid = os.geteuid(), tmp_path.stat().st_gid

    check_image(tmp_path, uid, gid)
    with pytest.raises(ImageUnusable, match="chown -R -h"):
        check_image(tmp_path, uid, gid + 1)
    (tmp_path / ".singularity.d").rmdir()
    with pytest.raises(ImageUnusable, match="has no"):
        check_image(tmp_path, uid, gid)


def test_records_are_whole_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "record.json"

    assert read_record(path) is None
    write_record(path, {"a": 1})
    assert read_record(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    for damaged in ("", "[1]", "{", "x" * (2**20 + 1)):
        path.write_text(damaged)
        assert read_record(path) is None
