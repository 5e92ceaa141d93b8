#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make check` runs: every rule of the sources that a program can judge.

python tools/check.py                  # all
python tools/check.py types headers    # some
python tools/check.py --fix            # rewrite what ruff and clang-format can
python tools/check.py --list
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import ctypes
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = "core/include"
CORE_LIBRARY = "core/python/sparse_operation_kit/lib/libsok_core.so"
LIBRARIES = (CORE_LIBRARY, "tf_frontend/libsok_tensorflow.so", "torch_frontend/libsok_torch.so")
MAX_LINES = 500
MAX_COLUMNS = 120

CPP = (".cc", ".cu", ".cuh", ".h")
SOURCES = (*CPP, ".py", ".cmake", ".sh")
FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "torch", "horovod")

# <...> headers that the core may include besides the standard library's, which have neither folder nor suffix.
SYSTEM_HEADERS = re.compile(
    r"(assert|cpuid|dlfcn|errno|fcntl|immintrin|inttypes|limits|math|pthread|sched|std\w+|string|unistd|x86intrin)\.h"
    r"|(sys|linux|cub|cuda|thrust|cooperative_groups|nvtx3)/[\w./]+|cuda(_\w+)?\.h|cooperative_groups\.h|nccl\.h"
)
# What libsok_core.so may need from the host at load time. Not a CUDA runtime, not an OpenMP runtime.
HOST_LIBRARIES = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux-x86-64)\.so\.\d+")

# Libraries without type information whose sources mypy reads all the same: names and arguments are checked.
TYPED_BY_SOURCE = ("keras", "horovod")

Problems = Iterator[str]


def tracked(*suffixes: str, under: Iterable[str] = ()) -> list[Path]:
    """Files that git tracks or would (not the ignored ones), as paths below ROOT."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *under]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = sorted({Path(name) for name in out.split("\0") if name})
    return [path for path in paths if (ROOT / path).is_file() and (not suffixes or path.suffix in suffixes)]


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def tool(name: str) -> str:
    """A program beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is missing. `make check` brings it; by hand: pip install -r requirements/lint.txt")
    return found


def run(*command: str, env: dict[str, str] | None = None) -> Problems:
    """Yields a problem when the command fails, with what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        yield f"{Path(command[0]).name} {command[1]}: status {done.returncode}\n{done.stdout}{done.stderr}".rstrip()


def run_all(commands: Iterable[Sequence[str]]) -> Problems:
    """The same of several, one a CPU at a time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for problems in threads.map(lambda command: [*run(*command)], commands):
            yield from problems


def check_python_format(fix: bool) -> Problems:
    """Python is formatted by ruff."""
    yield from run(tool("ruff"), "format", "--quiet", *(() if fix else ("--diff",)), ".")


def check_python_lint(fix: bool) -> Problems:
    """Python passes ruff's rules (pyproject.toml)."""
    yield from run(tool("ruff"), "check", "--quiet", *(("--fix",) if fix else ()), ".")


def check_cpp_format(fix: bool) -> Problems:
    """C, C++ and CUDA are formatted by clang-format (.clang-format)."""
    files = [str(path) for path in tracked(*CPP)]
    yield from run(tool("clang-format"), *(("-i",) if fix else ("--dry-run", "-Werror")), *files)


def check_tidy(fix: bool) -> Problems:
    """The core on the host passes clang-tidy (.clang-tidy), with the options that it was last compiled with."""
    folder = ROOT / "build" / "core"
    database = folder / "compile_commands.json"
    if not database.is_file():
        yield f"{database.relative_to(ROOT)} is missing: python tools/build.py core"
        return
    sources = sorted({entry["file"] for entry in json.loads(database.read_text()) if entry["file"].endswith(".cc")})
    command = (tool("clang-tidy"), "--quiet", "-p", str(folder))
    yield from run_all([(*command, source) for source in sources])


def check_without_cuda(fix: bool) -> Problems:
    """Sources that SOK_WITH_CUDA changes compile without it too, with no warning; after a build that had it."""
    found = (ROOT / "build" / part / "compile_commands.json" for part in ("core", "tensorflow", "torch"))
    entries = [entry for database in found if database.is_file() for entry in json.loads(database.read_text())]
    commands = []
    for entry in entries:
        words = shlex.split(entry["command"])
        switches = [word for word in words if word.startswith("-DSOK_WITH_CUDA")]
        if not switches or not entry["file"].endswith(".cc") or "SOK_WITH_CUDA" not in read(entry["file"]):
            continue
        # Headers that were compiled ahead are those with CUDA: they are read as text.
        kept = [word for word in words if word not in (*switches, "-Winvalid-pch")]
        commands.append((*kept, "-Werror", "-fsyntax-only"))
    yield from run_all(commands)


def typing_tree() -> Path:
    """A folder with the packages as they are installed, made of links: mypy cannot map folders to packages."""
    tree = ROOT / "build" / "mypy"
    package = tree / "sparse_operation_kit"
    shutil.rmtree(tree, ignore_errors=True)
    package.mkdir(parents=True)
    for item in (ROOT / "core/python/sparse_operation_kit").iterdir():
        (package / item.name).symlink_to(item)
    for name, folder in (("tensorflow", "tf_frontend"), ("torch", "torch_frontend")):
        (package / name).symlink_to(ROOT / folder)
    for name in TYPED_BY_SOURCE:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            (tree / name).symlink_to(found.submodule_search_locations[0])
    for path in tracked(".py", under=["tests"]):
        link = tree / test_module(path)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / path)
    return tree


def test_module(path: Path) -> Path:
    """Where mypy finds a file of tests/: by the name that conftest.py gives what suites import, else under `suites`, as
    modules that stand in for others, which they would hide.

    Not under tests/, where ROOT has the same files once more.
    """
    if path.name.startswith("test_") or path.name == "conftest.py" or path.parent.name == "stand_ins":
        return Path("suites", *path.parts[1:])
    suite = path.parent.name.removeprefix("gpu_")  # those of frontends may not clash with the core's
    return Path(f"{suite}_{path.name}" if suite in FRAMEWORKS else path.name)


def check_types(fix: bool) -> Problems:
    """The packages, examples and benchmarks pass mypy --strict, the tests mypy with their own few annotations."""
    tree = typing_tree()
    env = {**os.environ, "MYPYPATH": str(tree)}
    config = str(ROOT / "pyproject.toml")
    packages = [word for name in ("sparse_operation_kit", "examples", "benchmarks", "suites") for word in ("-p", name)]
    helpers = [word for path in sorted(tree.glob("*.py")) for word in ("-m", path.stem)]
    yield from run(tool("mypy"), "--config-file", config, *packages, *helpers, env=env)
    yield from run(tool("mypy"), "--config-file", config, *map(str, tracked(".py", under=["tools"])))


def check_headers(fix: bool) -> Problems:
    """Each public header compiles alone, as C11 and as C++17."""
    languages = (("c", "cc", "-std=c11"), ("c++", "c++", "-std=c++17"))
    with tempfile.TemporaryDirectory() as folder:
        for header in sorted((ROOT / INCLUDE).glob("sok/*.h")):
            for language, compiler, standard in languages:
                source = Path(folder, "header.c")
                # Twice: an include guard that is missing or copied from another header shows.
                source.write_text(f'#include "sok/{header.name}"\n#include "sok/{header.name}"\nint sok_unused;\n')
                command = (compiler, "-x", language, standard, "-pedantic-errors", "-Wall", "-Wextra", "-Werror")
                yield from run(*command, "-I", INCLUDE, "-fsyntax-only", str(source))


def include_problems(path: Path, text: str) -> Problems:
    """The include rules, for one file."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not found:
            continue
        quoted, name = found[1] == '"', found[2]
        where = f"{path}:{number}: #include {name}:"
        if ".." in Path(name).parts:
            yield f"{where} no .. in includes"
        elif path.parts[0] == "core":
            known = any((ROOT / root / name).is_file() for root in ("core/include", "core/src"))
            if quoted and not known:
                yield f"{where} the core includes its own files and the system's only"
            elif not quoted and not re.fullmatch(rf"[a-z_]+|{SYSTEM_HEADERS.pattern}", name):
                yield f"{where} not a header of the C++ standard or the system; no framework in the core"
            elif path.is_relative_to(INCLUDE) and (ROOT / "core/src" / name).is_file():
                yield f"{where} a public header may not need an internal one"
        elif not name.startswith("sok/"):
            own = (ROOT / path.parent / name).is_file()
            if not own and (ROOT / "core/src" / name).is_file():
                yield f"{where} a frontend includes nothing of the core but sok/*.h"


def check_includes(fix: bool) -> Problems:
    """The core includes no framework; the frontends include nothing of the core but its public headers."""
    for path in tracked(*CPP, under=["core", "tf_frontend", "torch_frontend"]):
        yield from include_problems(path, read(path))


def import_problems(path: Path, text: str) -> Problems:
    """The import rules, for one Python file of the packages."""
    allowed = {"tf_frontend": FRAMEWORKS[:3] + FRAMEWORKS[4:], "torch_frontend": ("torch",)}.get(path.parts[0], ())
    typing_only: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            typing_only.update(child for statement in node.body for child in ast.walk(statement))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            frontend = re.match(r"sparse_operation_kit\.(tensorflow|torch)\b", name)
            if node in typing_only:
                continue
            if top in FRAMEWORKS and top not in allowed:
                yield f"{path}:{node.lineno}: import {name}: a framework that does not belong here"
            elif frontend and path.parts[0] != {"tensorflow": "tf_frontend", "torch": "torch_frontend"}[frontend[1]]:
                yield f"{path}:{node.lineno}: import {name}: only that frontend imports itself"


def check_imports(fix: bool) -> Problems:
    """The framework-free packages import no framework, a frontend only its own."""
    for path in tracked(".py", under=["core/python", "tf_frontend", "torch_frontend"]):
        yield from import_problems(path, read(path))


def dynamic_section(library: Path, *arguments: str) -> list[str]:
    command = [*arguments, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def declared_functions() -> set[str]:
    """The functions of the C interface, from its headers."""
    text = "".join(path.read_text() for path in sorted((ROOT / INCLUDE).glob("sok/*.h")))
    text = re.sub(r"/\*.*?\*/|^#[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"SOK_EXPORT\b[^;(]*?\b(\w+)\s*\(", text))


def check_exports(fix: bool) -> Problems:
    """libsok_core.so exports what its headers declare and nothing else, and needs only the C++ runtime."""
    for name in LIBRARIES:
        library = ROOT / name
        if not library.is_file():
            if name == CORE_LIBRARY:
                yield f"{name} is not built: python tools/build.py"
            continue
        entries = dynamic_section(library, "readelf", "-d", "-W")
        for line in entries:
            if "(RUNPATH)" in line or "(RPATH)" in line:
                yield f"{name}: holds a path of the machine that built it: {line.strip()}"
        if name != CORE_LIBRARY:
            continue
        exported = {line.split()[-1] for line in dynamic_section(library, "nm", "-D", "--defined-only")}
        declared = declared_functions()
        yield from (f"{name} exports {symbol}, which no public header declares" for symbol in exported - declared)
        yield from (f"{symbol} is declared and {name} does not export it" for symbol in declared - exported)
        for line in entries:
            needed = re.search(r"\(NEEDED\).*\[(.*)\]", line)
            if needed and not HOST_LIBRARIES.fullmatch(needed[1]):
                yield f"{name} needs {needed[1]} of the host"


def package_version() -> str:
    found = re.search(r'^__version__ = "(.*)"$', read("core/python/sparse_operation_kit/_version.py"), re.MULTILINE)
    if found is None:
        raise SystemExit("_version.py has no __version__")
    return found[1]


def check_version(fix: bool) -> Problems:
    """_version.py, CHANGELOG.md and the compiled core agree on the version."""
    version = package_version()
    heading = re.search(r"^## \[?(\d[^\]\s]*)", read("CHANGELOG.md"), re.MULTILINE)
    if heading is None or heading[1] != version:
        yield f"CHANGELOG.md: the newest heading is {heading and heading[1]}, the package is {version}"
    if (ROOT / CORE_LIBRARY).is_file():
        library = ctypes.CDLL(str(ROOT / CORE_LIBRARY))
        library.sok_version.restype = ctypes.c_char_p
        built = library.sok_version().decode()
        if built != version:
            yield f"{CORE_LIBRARY} is version {built}, the package is {version}; build it again"


def source_problems(path: Path, text: str) -> Problems:
    """Size, width, license line and stray paths of one file."""
    lines = text.splitlines()
    is_source = path.suffix in SOURCES or path.name in ("Makefile", "CMakeLists.txt")
    if is_source:
        if len(lines) >= MAX_LINES:
            yield f"{path}: {len(lines)} lines; {MAX_LINES - 1} is the most. Which two things live in it?"
        if lines and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
            yield f"{path}: no `SPDX-License-Identifier: Apache-2.0` in its first lines"
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS and path.suffix != ".py" and "http" not in line:  # ruff judges Python
                yield f"{path}:{number}: {len(line)} columns; {MAX_COLUMNS} is the most"
    for number, line in enumerate(lines, 1):
        if re.search(r"(?<![\w.}])/(home|root|Users|work)/", line):
            yield f"{path}:{number}: a path of somebody's machine: {line.strip()}"


def check_sources(fix: bool) -> Problems:
    """Files are short, narrow, carry their license and no path of somebody's machine."""
    for path in tracked():
        try:
            text = read(path)
        except UnicodeDecodeError:
            continue  # an image, golden bytes
        yield from source_problems(path, text)


CHECKS: dict[str, Callable[[bool], Problems]] = {
    "python-format": check_python_format,
    "python-lint": check_python_lint,
    "cpp-format": check_cpp_format,
    "tidy": check_tidy,
    "without-cuda": check_without_cuda,
    "types": check_types,
    "headers": check_headers,
    "includes": check_includes,
    "imports": check_imports,
    "exports": check_exports,
    "version": check_version,
    "sources": check_sources,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--fix", action="store_true", help="let ruff and clang-format rewrite files, and stop there")
    parser.add_argument("--list", action="store_true", help="say what each check is")
    args = parser.parse_args(argv)
    unknown = set(args.checks) - set(CHECKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if args.list:
        for name, check in CHECKS.items():
            print(f"{name:14} {(check.__doc__ or '').strip()}")
        return 0
    fixable = ("python-lint", "python-format", "cpp-format")  # lint first: its fixes want formatting
    names = args.checks or (fixable if args.fix else tuple(CHECKS))
    failed = 0
    for name in names:
        problems = list(CHECKS[name](args.fix))
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} {name}", flush=True)
        for problem in problems:
            print(f"     {problem}".replace("\n", "\n     "), flush=True)
    print(f"{len(names) - failed} of {len(names)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
