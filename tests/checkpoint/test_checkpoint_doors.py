"""What comes to checkpoints from outside: numbers of steps, paths, folders, keys, full disks."""

import errno
import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.checkpoint import arrays, checkpoints, inspection
from zero_jax.checkpoint.arrays import Array, Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints

TREE = {"w": jnp.arange(6.0)}


@pytest.mark.parametrize("step", [-1, 301.5, "7", None])
def test_a_step_is_a_whole_number(tmp_path, step):
    with Checkpoints(tmp_path) as own, pytest.raises(ValueError, match="a whole number from 0"):
        own.save(step, TREE)


def test_a_step_below_the_newest_is_refused(tmp_path):
    with Checkpoints(tmp_path) as own:
        own.save(np.int64(300), TREE)
        with pytest.raises(ValueError, match=r"holds step 300, and step 200 would never be"):
            own.save(200, TREE)
        with pytest.raises(ValueError, match="holds step 300 already"):
            own.save(300, TREE)
        own.save(jnp.int32(301), TREE)
        assert own.steps == [300, 301]


def test_random_keys_come_back_into_shapes(tmp_path):
    keys = {
        "one": jax.random.key(3),
        "many": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "w": jnp.arange(2.0),
    }
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), keys)
    with Checkpoints(tmp_path) as own:
        own.save(1, keys)
        found = own.restore(like).tree
    for name in ("one", "many"):
        assert jax.random.key_impl(found[name]) == jax.random.key_impl(keys[name])
        np.testing.assert_array_equal(*map(jax.random.key_data, (found[name], keys[name])))


def test_paths_may_have_two_dots_and_links_in_them(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    with Checkpoints("../ck") as own:
        own.save(1, TREE)
        assert own.directory == tmp_path / "ck"
        np.testing.assert_array_equal(own.restore(TREE).tree["w"], TREE["w"])
    with Checkpoints("../link/../ck2") as own:
        own.save(1, TREE)
    assert inspection.damage(tmp_path / "here" / ".." / "ck" / "1") == []
    assert inspection.damage(tmp_path / "ck2" / "1") == []


def test_folders_that_are_no_steps_are_in_nobodys_way(tmp_path):
    with Checkpoints(tmp_path) as own:
        own.save(1, TREE)
    for name in ("²", "١٢", "notes"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "manifest.json").write_text("{}")
    with Checkpoints(tmp_path) as own:
        assert own.steps == [1]
        own.restore(TREE)
        own.save(2, TREE)
    assert list(inspection.folders(tmp_path)) == [1, 2]


@pytest.mark.parametrize("folder", ["/tmp", "../../elsewhere", "arrays/../../.."])
def test_a_manifest_names_no_folder_outside(tmp_path, folder):
    with Checkpoints(tmp_path) as own:
        own.save(1, TREE)
    path = tmp_path / "1" / "state" / "manifest.json"
    text = path.read_text().rpartition("\n}\n")[0] + "\n}"
    known = json.loads(text)
    known["arrays"]["w"]["folder"] = folder
    text = json.dumps(known)
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    (tmp_path / "1" / "seal.json").unlink()
    with Checkpoints(tmp_path, read_only=True) as own, pytest.raises(Damaged, match="outside"):
        own.restore(TREE)


def test_a_full_disk_is_told_with_the_file_and_the_reason(tmp_path):
    array = Array(str(tmp_path / "a"), (4,), "float32", (4,))
    said = (
        'RESOURCE_EXHAUSTED: Error writing local file "/x/c/0": Failed to write lock file '
        "\"/x/c/0.__lock\": No space left on device [os_error_code='28']"
    )
    with pytest.raises(OSError, match="No space left on device") as told, arrays._os_errors("/x"):
        raise ValueError(said)
    assert told.value.errno == errno.ENOSPC and told.value.filename == "/x/c/0"
    (tmp_path / "a").write_text("a file where a folder should be")
    with pytest.raises(NotADirectoryError) as told:
        array.write([((0,), np.zeros(4, np.float32))])
    assert told.value.filename == str(tmp_path / "a" / "c" / "0")


def test_room_is_told_to_the_byte_and_of_files_too(tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 3, 4096, 10, 2

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(OSError, match="has 12,288 bytes free, and a checkpoint takes 12,289"):
        checkpoints._check_space(tmp_path, 12289, 1)
    with pytest.raises(OSError, match="room for 2 files, and a checkpoint takes 6 at least"):
        checkpoints._check_space(tmp_path, 1, 6)
    checkpoints._check_space(tmp_path, 1, 2)
