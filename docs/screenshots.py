"""Make the pictures of the HTML pages with Chromium: `python docs/screenshots.py docs/images`.

`--dark` and `--width 420` show other states of the pages. Pillow (`pip install pillow`) makes the files smaller.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from click.testing import CliRunner

import reshard
from reshard.cli import main
from reshard.commit.save_log import SaveRecord, append

LAYOUT = {
    "mesh": {"pp": 2, "tp": 4},
    "rules": [{"match": "*.weight", "cut": ["tp"]}],
    "place": [
        {"match": "*layers.{i}.*", "axis": "pp"},
        {"match": "*embed_tokens.*", "axis": "pp", "at": 0},
        {"match": "*lm_head.*", "axis": "pp", "at": -1},
    ],
}
FSDP = "{mesh: {fsdp: 8}, rules: [{match: '*', cut: [fsdp]}]}\n"
LOSSES = [4.42, 3.84, 3.54, 3.31, 2.92, 2.8, 2.7, 3.53, 2.39, 2.37, 2.16, 2.18]  # every 500 iterations


def weights(n_layers: int = 8, width: int = 256) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors of a small model of the llama family."""
    shapes = {"model.embed_tokens.weight": (4096, width)}
    for n in range(n_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{n}.self_attn.{name}.weight"] = (width, width)
        for name, shape in {"gate_proj": (688, width), "up_proj": (688, width), "down_proj": (width, 688)}.items():
            shapes[f"model.layers.{n}.mlp.{name}.weight"] = shape
    return shapes | {"lm_head.weight": (4096, width)}


def make_run(root: Path) -> None:
    """A run with complete, deleted and damaged saves, one of them pinned, and a loss that rises once."""
    model = {key: np.zeros(shape, ml_dtypes.bfloat16) for key, shape in weights().items()}
    adam = {
        f"{name}.{key}": np.zeros(shape, np.float32)
        for key, shape in weights().items()
        for name in ("adam_m", "adam_v")
    }
    whole = root.with_name("whole")
    reshard.save(whole, 500, model, adam)
    for number, loss in enumerate(LOSSES, 1):
        iteration = number * 500
        if iteration in (1000, 2000, 4500, 5000, 5500, 6000):
            reshard.convert(whole, root, layout=LAYOUT, iteration=iteration, overwrite=True)
        root.mkdir(exist_ok=True)
        metrics = {"loss": loss, "grad_norm": 0.1}
        append(root, SaveRecord(iteration, f"2026-03-{number:02}T22:00:00+00:00", 4.2, 0.4, 84_300_000, metrics))
    reshard.pin(root, 1000)
    os.truncate(root / "iteration_00005000" / "model-0000001-0000008.safetensors", 1000)


def screenshot(page: Path, picture: Path, width: int, height: int, *, dark: bool) -> None:
    """Show a page in Chromium, and write what it looks like."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium: `apt-get install chromium`")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={picture}",
               f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
               page.as_uri()]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    with contextlib.suppress(ImportError):
        from PIL import Image  # noqa: PLC0415

        Image.open(picture).convert("RGB").quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            picture, optimize=True
        )


def run(*arguments: str) -> None:
    """Run a command of reshard in this process."""
    done = CliRunner().invoke(main, arguments)
    if done.exit_code:
        raise SystemExit(done.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1140)
    given = parser.parse_args()
    folder = given.folder.resolve()
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        make_run(Path("run").resolve())
        Path("fsdp8.yaml").write_text(FSDP)
        run("inspect", "run", "--html", "inspect.html")
        run("plan", "run", "--layout", "fsdp8.yaml", "--html", "plan.html")
        for name, height in (("inspect", 2410), ("plan", 1415)):
            screenshot(Path(f"{name}.html").resolve(), folder / f"{name}.png", given.width, height, dark=given.dark)
