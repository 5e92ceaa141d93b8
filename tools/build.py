#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the core and the op libraries with CMake; setup.py and developers use the same functions.

    python tools/build.py                 # core, then the ops of each framework that is installed
    python tools/build.py core            # one part
    python tools/build.py torch --debug --clean
    python tools/build.py --werror        # warnings are errors, as `make build` has it

Libraries are written into the source tree, where an editable install finds them; a wheel copies them. Beside the ops of
a framework a file says for which version of it they were compiled. Environment variables (docs/ENVVARS.md):
SOK_WITH_TENSORFLOW, SOK_WITH_TORCH, SOK_WITH_CUDA (1: must be built, 0: left out, unset: built when its tools are
found), SOK_CUDA_ARCHS, MAX_JOBS.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("core", "tensorflow", "torch")
CORE_LIBRARY = "libsok_core.so"
CORE_OUTPUT = "core/python/sparse_operation_kit/lib"
CUDA_ARCHS = (80, 90)
"""Built for when SOK_CUDA_ARCHS is unset and this host has no GPU to ask; newer GPUs compile the PTX of the last."""


class BuildError(Exception):
    """The build cannot go on; the message says what to install or set."""


@dataclasses.dataclass(frozen=True)
class Framework:
    """What the ops of a framework need to be compiled."""

    title: str
    module: str
    short: str
    """In the label of a version."""
    minimum: tuple[int, int]
    install: str
    switch: str
    source: str
    output: str
    library: str
    probe: str

    @property
    def oldest(self) -> str:
        return ".".join(map(str, self.minimum))


@dataclasses.dataclass(frozen=True)
class Installed:
    """A framework of this environment."""

    version: str
    variables: dict[str, str]
    """CMake's."""

    @property
    def series(self) -> str:
        """Major and minor number: libraries for one series of a framework do not fit another."""
        return ".".join(self.version.split(".")[:2])


FRAMEWORKS = {
    "tensorflow": Framework(
        title="TensorFlow",
        module="tensorflow",
        short="tf",
        minimum=(2, 16),
        install="python -m pip install 'tensorflow-cpu==2.21.*'  (or `tensorflow` for GPUs)",
        switch="SOK_WITH_TENSORFLOW",
        source="tf_frontend/csrc",
        output="tf_frontend",
        library="libsok_tensorflow.so",
        probe="""
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "variables": {
    "SOK_TF_CFLAGS": ";".join(tf.sysconfig.get_compile_flags()),
    "SOK_TF_LFLAGS": ";".join(tf.sysconfig.get_link_flags()),
}}))
""",
    ),
    "torch": Framework(
        title="PyTorch",
        module="torch",
        short="torch",
        minimum=(2, 9),
        install="python -m pip install torch  (a CPU build of PyTorch is enough on a host with no GPU)",
        switch="SOK_WITH_TORCH",
        source="torch_frontend/csrc",
        output="torch_frontend",
        library="libsok_torch.so",
        probe="""
import glob, json, os, torch
root = os.path.dirname(torch.__file__)
include = os.path.join(root, "include")
openmp = glob.glob(os.path.join(root, "lib", "libgomp*.so*")) + glob.glob(root + ".libs/libgomp*.so*")
print(json.dumps({"version": torch.__version__, "variables": {
    "SOK_TORCH_INCLUDE_DIRS": ";".join([include, os.path.join(include, "torch", "csrc", "api", "include")]),
    "SOK_TORCH_LIBRARY_DIR": os.path.join(root, "lib"),
    "SOK_TORCH_CXX11_ABI": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
    "SOK_TORCH_OPENMP_LIBRARY": (openmp + [""])[0],
}}))
""",
    ),
}


def switch(name: str) -> bool | None:
    """A SOK_WITH_* variable: True must, False must not, None as found."""
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "auto"):
        return None
    if value in ("1", "on", "true", "yes"):
        return True
    if value in ("0", "off", "false", "no"):
        return False
    raise BuildError(f"{name}={os.environ[name]!r}: use 1 (must be built), 0 (left out) or nothing (built when found).")


def find_tool(name: str) -> str | None:
    """A program beside this Python (as pip installs them) or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def cmake() -> str:
    """CMake of version 3.25 or newer."""
    hint = "Install it: python -m pip install cmake  (or: sudo apt-get install cmake)"
    found = find_tool("cmake")
    if found is None:
        raise BuildError(f"CMake is missing. {hint}")
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < (3, 25):
        raise BuildError(f"CMake 3.25 or newer is needed and {found} is {text.splitlines()[0]}. {hint}")
    return found


def check_compiler() -> None:
    """Fails early, with the command that helps, when there is no C++20 compiler."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler.split()[0]) is None and (os.environ.get("CXX") or shutil.which("c++") is None):
        raise BuildError(
            f"No C++ compiler ({compiler}). Install GCC 11 or newer (sudo apt-get install g++) or name one with CXX."
        )


def generator() -> str:
    """Ninja when it is there, else Make."""
    if find_tool("ninja"):
        return "Ninja"
    if shutil.which("make"):
        return "Unix Makefiles"
    raise BuildError("Neither ninja nor make is installed. Install one: python -m pip install ninja")


def jobs() -> int:
    """Compilers to run at once: MAX_JOBS, or one a CPU as long as each has 2 GB of memory."""
    text = os.environ.get("MAX_JOBS", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise BuildError(f"MAX_JOBS={text!r}: use a positive number.")
        return int(text)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(gigabytes / 2)))


def find_nvcc() -> str | None:
    """The CUDA compiler: CUDACXX, CUDA_HOME, PATH, the usual folder."""
    for candidate in (os.environ.get("CUDACXX"), _below("CUDA_HOME"), _below("CUDA_PATH"), shutil.which("nvcc")):
        if candidate and shutil.which(candidate):
            return candidate
    usual = "/usr/local/cuda/bin/nvcc"
    return usual if os.access(usual, os.X_OK) else None


def _below(variable: str) -> str | None:
    home = os.environ.get(variable)
    return str(Path(home) / "bin" / "nvcc") if home else None


def cuda_archs(nvcc: str) -> str:
    """SOK_CUDA_ARCHS, the GPUs of this host, or CUDA_ARCHS as far as this nvcc knows them; as CMake wants it."""
    given = re.findall(r"[^\s,;]+", os.environ.get("SOK_CUDA_ARCHS", ""))
    if given:
        archs = [text.replace(".", "") for text in given]
        bad = [text for text in archs if not re.fullmatch(r"\d{2,3}[af]?(-real|-virtual)?", text)]
        if bad:
            raise BuildError(f"SOK_CUDA_ARCHS: {', '.join(bad)}: use compute capabilities such as 80;90 or 9.0.")
        return ";".join(archs)
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        here = sorted({line.strip().replace(".", "") for line in found.stdout.splitlines()}, key=len)
        if found.returncode == 0 and here and all(text.isdigit() for text in here):
            return ";".join(here)
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    archs = [str(arch) for arch in CUDA_ARCHS if f"compute_{arch}\n" in known + "\n"]
    # Machine code for each, and PTX of the newest for GPUs that come later.
    return ";".join([f"{arch}-real" for arch in archs[:-1]] + archs[-1:])


def cuda_variables() -> dict[str, str]:
    """CMake's variables for CUDA, on or off."""
    wanted = switch("SOK_WITH_CUDA")
    nvcc = None if wanted is False else find_nvcc()
    if nvcc is None:
        if wanted:
            raise BuildError(
                "SOK_WITH_CUDA=1 but there is no nvcc. Install the CUDA toolkit (12.4 or newer) and put its bin folder "
                "on PATH, or set CUDA_HOME."
            )
        return {"SOK_WITH_CUDA": "OFF"}
    return {"SOK_WITH_CUDA": "ON", "CMAKE_CUDA_COMPILER": nvcc, "CMAKE_CUDA_ARCHITECTURES": cuda_archs(nvcc)}


def probe(framework: Framework) -> dict[str, object] | None:
    """Version and compile flags of an installed framework, or None.

    Runs in a process of its own: importing a framework is slow and changes the process. A build that pip isolates sees
    only the build requirements through PYTHONPATH, so a second try is made without it, which finds what is installed
    in the environment that the package is built for.
    """
    attempts = [dict(os.environ)]
    if "PYTHONPATH" in os.environ:
        attempts.append({name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    failure = ""
    for env in attempts:
        env["TF_CPP_MIN_LOG_LEVEL"] = "3"
        command = [sys.executable, "-c", framework.probe]
        # Not in ROOT: a folder there must not be taken for a package.
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT / "tools", check=False)
        if done.returncode == 0:
            found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
            return found
        if f"No module named '{framework.module}'" not in done.stderr:
            failure = done.stderr.strip()
    if failure:
        raise BuildError(
            f"{framework.title} is installed but cannot be imported; mend it or set {framework.switch}=0:\n{failure}"
        )
    return None


def cached_probe(framework: Framework, folder: Path) -> dict[str, object] | None:
    """`probe`, remembered in CMake's folder as long as the same file would be imported."""
    spec = importlib.util.find_spec(framework.module)
    if spec is None or not spec.origin:
        return probe(framework)
    key = [sys.executable, spec.origin, os.stat(spec.origin).st_mtime_ns, framework.probe]
    record = folder / "probe.json"
    if record.is_file():
        known = json.loads(record.read_text())
        if known["key"] == key:
            found: dict[str, object] = known["found"]
            return found
    answer = probe(framework)
    if answer is not None:
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"key": key, "found": answer}))
    return answer


def installed(framework: Framework, folder: Path) -> Installed | None:
    """The framework whose ops are to be built, or None when they are left out."""
    wanted = switch(framework.switch)
    if wanted is False:
        return None
    found = cached_probe(framework, folder)
    if found is None:
        if wanted:
            raise BuildError(
                f"{framework.switch}=1 but {framework.title} is not installed for {sys.executable}.\n"
                f"Install it first: {framework.install}\n"
                "When it is installed there, build with `pip install --no-build-isolation`."
            )
        print(f"-- {framework.title} is not installed: its ops are left out ({framework.install})", flush=True)
        return None
    version = re.match(r"(\d+)\.(\d+)", str(found["version"]))
    if version is None or (int(version[1]), int(version[2])) < framework.minimum:
        message = f"{framework.title} {found['version']} is too old; {framework.oldest} is the least."
        if wanted:
            raise BuildError(f"{message} {framework.install}")
        print(f"-- {message} Its ops are left out.", flush=True)
        return None
    variables = found["variables"]
    assert isinstance(variables, dict)
    return Installed(str(found["version"]), {str(name): str(value) for name, value in variables.items()})


def plan(parts: Sequence[str] = PARTS, build_dir: Path | None = None) -> dict[str, Installed | None]:
    """The frameworks among the parts; None for those whose ops are left out.

    Raises:
      BuildError: a demanded one is missing, or there is none at all and nobody has said that this is meant.
    """
    build_dir = build_dir or ROOT / "build"
    planned = {name: installed(FRAMEWORKS[name], build_dir / name) for name in parts if name in FRAMEWORKS}
    undecided = [FRAMEWORKS[name] for name in planned if switch(FRAMEWORKS[name].switch) is None]
    if undecided and not any(planned.values()):
        raise BuildError(
            f"No framework is installed for {sys.executable}, so no ops would be built. Install one first:\n"
            + "".join(f"  {framework.install}\n" for framework in undecided)
            + "then `pip install .` again, with uv `uv pip install --no-build-isolation .`, which takes "
            "setuptools, wheel, cmake and ninja too.\n"
            "Or have the build bring it: SOK_WITH_TORCH=1 pip install '.[torch]'  "
            "(SOK_WITH_TENSORFLOW=1 pip install '.[tensorflow]').\n"
            "For the core alone, without a framework: "
            + " ".join(f"{framework.switch}=0" for framework in undecided)
            + " pip install ."
        )
    return planned


def requirements() -> list[str]:
    """What an isolated build has to install: tools that are missing or old here, and demanded frameworks."""
    needed = []
    try:
        cmake()
    except BuildError:
        needed.append("cmake>=3.25")
    if find_tool("ninja") is None:
        needed.append("ninja")
    for framework in FRAMEWORKS.values():
        if switch(framework.switch) and probe(framework) is None:
            needed.append(f"{framework.module}>={framework.oldest}")
    return needed


def run(command: Sequence[str], hint: str) -> None:
    """Runs a command with its output on the terminal."""
    print("+", " ".join(command), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise BuildError(f"`{command[0]}` ended with status {code}; its messages are above.\n{hint}")


def _cached(folder: Path, name: str) -> str:
    """A value of an earlier configuration."""
    cache = folder / "CMakeCache.txt"
    match = re.search(rf"^{name}:\w+=(.*)$", cache.read_text(), re.MULTILINE) if cache.is_file() else None
    return match.group(1) if match else ""


def compile_part(source: Path, folder: Path, variables: dict[str, str], debug: bool) -> None:
    """Configures and builds one CMake project."""
    stale = _cached(folder, "CMAKE_HOME_DIRECTORY")
    if stale and Path(stale) != source:  # the checkout was moved or copied
        shutil.rmtree(folder)
    known = _cached(folder, "CMAKE_GENERATOR")
    tool = known or generator()
    settings = {"CMAKE_BUILD_TYPE": "Debug" if debug else "Release", **variables}
    if tool == "Ninja":
        settings["CMAKE_MAKE_PROGRAM"] = find_tool("ninja") or ""
    command = [cmake(), "-S", str(source), "-B", str(folder), "-G", tool]
    run(
        command + [f"-D{name}={value}" for name, value in settings.items()],
        f"Configuring failed. Remove {folder} and try again if tools have changed since the last build.",
    )
    run(
        [cmake(), "--build", str(folder), "--parallel", str(jobs())],
        "Compiling failed. GCC 11 or newer is needed (sudo apt-get install g++, or name a compiler with CXX).\n"
        "If a compiler was killed, memory ran out: try again with MAX_JOBS=1.",
    )


def build(
    parts: Sequence[str] = PARTS, *, build_dir: Path | None = None, debug: bool = False, werror: bool = False
) -> dict[str, Path]:
    """Builds the parts into the source tree.

    Args:
      parts: of PARTS. The core is always brought up to date first: the ops link to it.
      build_dir: CMake's files; None: build/ in the source tree.
      debug: no optimisation, assertions on.
      werror: a warning ends the build, in these CMake files from now on. Not by default: what another compiler warns of
        must not stop a user's `pip install`.

    Returns:
      Where each library is, and the file with its framework's version, by its place in the package
      `sparse_operation_kit`.

    Raises:
      BuildError: a tool or a framework is missing (`plan`), or a compiler failed.
    """
    check_compiler()
    build_dir = build_dir or ROOT / "build"
    core = ROOT / CORE_OUTPUT / CORE_LIBRARY
    cuda = cuda_variables()
    planned = plan(parts, build_dir)  # before the long compile, so that a wrong switch fails at once
    warnings = {"SOK_WERROR": "ON"} if werror else {}
    compile_part(ROOT / "core", build_dir / "core", {"SOK_OUTPUT_DIR": str(core.parent), **warnings, **cuda}, debug)
    made = {f"lib/{CORE_LIBRARY}": core}
    for name, found in planned.items():
        if found is None:
            continue
        framework = FRAMEWORKS[name]
        settings = {
            "SOK_OUTPUT_DIR": str(ROOT / framework.output),
            "SOK_INCLUDE_DIR": str(ROOT / "core/include"),
            "SOK_CORE_LIBRARY": str(core),
            "SOK_WITH_CUDA": cuda["SOK_WITH_CUDA"],
            **warnings,
            **found.variables,
        }
        compile_part(ROOT / framework.source, build_dir / name, settings, debug)
        library = ROOT / framework.output / framework.library
        built_for = library.with_suffix(".built_for")
        built_for.write_text(f"{found.version}\n")
        made |= {f"{name}/{file.name}": file for file in (library, built_for)}
    absent = [str(path) for path in made.values() if not path.is_file()]
    if absent:
        raise BuildError(f"The build ended well but made no {', '.join(absent)}: please report this.")
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS, "all"], help="what to build (default: all)")
    parser.add_argument("--debug", action="store_true", help="no optimisation, assertions on; in build/debug")
    parser.add_argument("--werror", action="store_true", help="warnings are errors, until --clean")
    parser.add_argument("--clean", action="store_true", help="remove CMake's files of these parts first")
    args = parser.parse_args(argv)
    parts = PARTS if not args.parts or "all" in args.parts else tuple(args.parts)
    build_dir = ROOT / "build" / "debug" if args.debug else ROOT / "build"
    if args.clean:
        for part in parts:
            shutil.rmtree(build_dir / part, ignore_errors=True)
    try:
        made = build(parts, build_dir=build_dir, debug=args.debug, werror=args.werror)
    except BuildError as error:
        print(f"\nbuild: {error}", file=sys.stderr)
        return 1
    for path in made.values():
        print(f"built {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
