"""`make site`: builds site/, the page as static files, with Python in the browser through Pyodide.

Pyodide comes from npm, checked against the checksum below. Needs npm with node, and the network the first time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from fitgpt.web.form import DOCS
from fitgpt.web.page_files import page_files

VERSION = "314.0.7"  # Python 3.14
SHA512 = ("d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
          "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SITE = ROOT / "site"
DOWNLOADED = ROOT / "build" / f"pyodide-{VERSION}"
PYODIDE = DOWNLOADED / "package"
WASM, LOCK = "pyodide.asm.wasm", "pyodide-lock.json"


def main() -> None:
    for program in ("npm", "node"):
        if not shutil.which(program):
            sys.exit(f"{program} is not installed: the static site needs npm and node to build.")
    download()
    shutil.rmtree(SITE, ignore_errors=True)
    for name, content in page_files().items():
        write(name, content)
    python = SITE / "python"
    python.mkdir()
    run_in_pyodide(HERE / "pack.py", ROOT / "src", python, SITE / "static" / "answers.json")
    for name in ("pyodide.mjs", "pyodide.asm.mjs"):
        shutil.copy(PYODIDE / name, python)
    lock = json.loads((PYODIDE / LOCK).read_text(encoding="utf-8"))
    write(f"python/{LOCK}", json.dumps(lock | {"packages": {}}).encode())  # no package of Pyodide is used
    write(f"python/{WASM}.gzip", gzip.compress((PYODIDE / WASM).read_bytes(), mtime=0))
    shutil.copy(HERE / "worker.js", python)
    shutil.copy(HERE / "ask.js", SITE / "static")
    write("service_worker.js", service_worker().encode())
    for path in DOCS.glob("*.md"):
        write(f"docs/{path.name}", path.read_bytes())
    (SITE / ".nojekyll").touch()  # GitHub Pages: serve the files as they are
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    print(f"Built {SITE.relative_to(ROOT)}/ ({size / 1e6:.1f} MB). To look at it: python -m http.server -d site")


def download() -> None:
    """The npm package, unpacked into PYODIDE."""
    if PYODIDE.is_dir():
        return
    DOWNLOADED.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", f"pyodide@{VERSION}"], cwd=DOWNLOADED, check=True,
                   stdout=subprocess.DEVNULL)
    packed = DOWNLOADED / f"pyodide-{VERSION}.tgz"
    found = hashlib.sha512(packed.read_bytes()).hexdigest()
    if found != SHA512:
        packed.unlink()
        sys.exit(f"pyodide {VERSION} from npm has the SHA-512 {found}, and not {SHA512}.")
    with tarfile.open(packed) as archive:
        archive.extractall(DOWNLOADED, filter="data")


def run_in_pyodide(script: Path, *paths: Path, stdlib: Path = PYODIDE / "python_stdlib.zip") -> None:
    subprocess.run(["node", *map(str, (HERE / "run.mjs", PYODIDE, stdlib, script, *paths))], check=True)


def service_worker() -> str:
    """With the names of all files, and a hash of them."""
    files = sorted(path for path in SITE.rglob("*") if path.is_file())
    names = ["./", *(path.relative_to(SITE).as_posix() for path in files)]
    version = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    text = (HERE / "service_worker.js").read_text(encoding="utf-8")
    return text.replace("VERSION", version, 1).replace("FILES = []", f"FILES = {json.dumps(names)}", 1)


def write(name: str, content: bytes) -> None:
    path = SITE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
