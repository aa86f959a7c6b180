"""Guards of the layout: folders and links, who may import what, what an import loads, sizes, tests, the wheel."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPONENTS = ("compression", "server", "bindings")  # linked into kvstore/
PRODUCT = ("kvstore", *COMPONENTS)

# An import of the key (anywhere in a module, lazy ones included) is allowed in these files and folders only.
OWNERS: dict[str, tuple[str, ...]] = {
    "zmq": ("kvstore/zmq_transport.py",),
    "cupy": ("compression/kernels_cupy.py", "kvstore/arrays.py"),
    "torch": ("bindings/", "kvstore/arrays.py"),
    "jax": ("bindings/", "kvstore/arrays.py"),
    "ray": ("bindings/",),
    "sklearn": ("server/",),
    "matplotlib": ("server/",),
}

# Modules without a test file of their own: the file that tests them instead, and why.
TESTED_ELSEWHERE: dict[str, tuple[str, str]] = {
    "compression/philox_numba.py": ("tests/compression/test_philox.py", "all twins pass the same tests"),
    "kvstore/__init__.py": ("tests/test_layout.py", "re-exports only"),
    "kvstore/machine.py": ("tests/kvstore/test_simulator.py", "a protocol and plain data"),
    "server/processes.py": ("tests/server/test_membership.py", "the machine's table, tested through it"),
    "kvstore/on_stale.py": ("tests/server/test_cluster_staleness.py", "an enum"),
    "compression/hadamard_numba.py": ("tests/compression/test_hadamard.py", "compared with the reference there"),
    "kvstore/adaptive_rules.py": ("tests/kvstore/test_update_rules.py", "all rules pass the same recorded checks"),
}

MAY_IMPORT = {
    "kvstore": ("kvstore", "kvstore.compression"),
    "compression": ("kvstore.errors", "kvstore.compression"),
    "server": ("kvstore", "kvstore.compression", "kvstore.server"),
    "bindings": ("kvstore", "kvstore.compression", "kvstore.bindings"),
}

HEAVY = ("numba", "torch", "jax", "ray", "cupy", "click", "rich", "matplotlib", "sklearn", "safetensors")
UNSAFE_MODULES = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle")
UNSAFE_CALLS = ("eval", "exec", "compile")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


@dataclass(frozen=True)
class Module:
    """One product module: its real path from the root, its import name, its syntax tree."""

    path: str
    name: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]


@dataclass(frozen=True)
class Import:
    """One imported module, and whether it is imported as soon as the importing module is."""

    target: str
    eager: bool


def files(folders: tuple[str, ...], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below the folders by their real paths: links are not followed."""
    for folder in folders:
        for where, inner, names in os.walk(ROOT / folder):
            inner[:] = [name for name in inner if name != "__pycache__" and not (Path(where) / name).is_symlink()]
            yield from (Path(where) / name for name in sorted(names) if Path(name).suffix in suffixes)


def import_name(path: str) -> str:
    """`compression/a.py` is `kvstore.compression.a`, `kvstore/__init__.py` is `kvstore`."""
    parts = list(Path(path).with_suffix("").parts)
    parts = parts if parts[0] == "kvstore" else ["kvstore", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def product() -> tuple[Module, ...]:
    paths = [path.relative_to(ROOT).as_posix() for path in files(PRODUCT, (".py",))]
    return tuple(Module(path, import_name(path), ast.parse((ROOT / path).read_text())) for path in paths)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    return tuple(_imports(module, module.tree, eager=True))


def _imports(module: Module, node: ast.AST, *, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(target, eager) for target in _targets(module, child))
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(child)
            yield from _imports(module, child, eager=eager and not lazy)


def _targets(module: Module, node: ast.ImportFrom) -> Iterator[str]:
    """`from a import b` imports `a.b` where that is one of our modules, else `a`."""
    base = node.module or ""
    if node.level:
        depth = node.level - module.path.endswith("/__init__.py")
        package = module.name.split(".")
        base = ".".join([*package[: len(package) - depth], *([base] if base else [])])
    known = {other.name for other in product()} | {f"kvstore.{component}" for component in COMPONENTS}
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if inner in known else base


def _is_for_types(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter that stands in the repository's root."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_init_file_where_one_would_shadow_or_split_a_package() -> None:
    found = [path for path in files((*COMPONENTS, "tests", "scripts"), (".py", ".pyi")) if path.stem == "__init__"]
    assert found == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_is_linked_below_kvstore(component: str) -> None:
    link = ROOT / "kvstore" / component
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{component}"
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--stage", f"kvstore/{component}"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert listed.startswith("120000 "), "the link is not committed as a link"


def test_standard_library_imports_from_the_root() -> None:
    run_python("import gzip, bz2, lzma, ctypes, zipfile, shutil, tarfile")


def test_our_folder_does_not_shadow_the_standard_compression_package() -> None:
    code = "import sys, importlib.util as u; s = u.find_spec('compression'); print(s.origin if s else None)"
    origin = run_python(code).strip()
    assert not origin.startswith(str(ROOT))
    if sys.version_info >= (3, 14):
        run_python("import compression.zstd")


def test_import_direction() -> None:
    wrong = []
    for module in product():
        for found in imports(module):
            if not below(found.target, "kvstore"):
                continue
            parts = found.target.split(".")
            in_component = len(parts) > 1 and parts[1] in COMPONENTS
            package = f"kvstore.{parts[1]}" if in_component else "kvstore"
            allowed = MAY_IMPORT[module.folder]
            if package not in allowed and found.target not in allowed:
                wrong.append(f"{module.path} imports {found.target}")
    assert wrong == []


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_library_is_imported_by_its_owners_only(library: str) -> None:
    users = {module.path for module in product() for found in imports(module) if below(found.target, library)}
    assert {path for path in users if not path.startswith(OWNERS[library])} == set()


def test_no_import_cycle() -> None:
    modules = {module.name: module for module in product()}
    edges = {
        name: {found.target for found in imports(module) if found.eager and found.target in modules}
        for name, module in modules.items()
    }
    while ready := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in ready}
    assert sorted(edges) == [], "these modules import each other, or a cycle"


def test_nothing_that_runs_received_bytes() -> None:
    wrong = []
    for module in product():
        wrong += [f"{module.path} imports {i.target}" for i in imports(module) if i.target in UNSAFE_MODULES]
        for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
            named = isinstance(call.func, ast.Name) and call.func.id in UNSAFE_CALLS
            flagged = [
                keyword.arg
                for keyword in call.keywords
                if keyword.arg in ("allow_pickle", "shell") and getattr(keyword.value, "value", True) is not False
            ]
            if named or flagged:
                wrong.append(f"{module.path}:{call.lineno} {ast.unparse(call)[:60]}")
    assert wrong == []


def test_import_kvstore_loads_nothing_heavy() -> None:
    loaded = json.loads(run_python("import kvstore, sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert "kvstore" in loaded
    assert sorted(set(HEAVY) & set(loaded)) == []


def test_every_module_has_its_tests() -> None:
    missing = []
    for module in product():
        folder, name = os.path.split(module.path)
        own = f"tests/{folder}/test_{name.strip('_')}"
        elsewhere, _reason = TESTED_ELSEWHERE.get(module.path, (own, ""))
        if not (ROOT / elsewhere).is_file():
            missing.append(f"{module.path}: no {elsewhere}")
    assert missing == []


def test_the_list_of_modules_tested_elsewhere_is_current() -> None:
    assert set(TESTED_ELSEWHERE) <= {module.path for module in product()}


def test_files_are_small() -> None:
    sources = files((*PRODUCT, "tests", "scripts"), (".py", ".cu", ".h", ".sh", ""))
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_small() -> None:
    long = {}
    for path in files((*PRODUCT, "tests", "scripts"), (".py",)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.slow
def test_wheel_holds_every_module_and_kernel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*wheel, "-w", str(tmp_path), str(source)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("gradkv-*.whl"))) as archive:
        names = set(archive.namelist())
    paths = [path.relative_to(ROOT).as_posix() for path in files(PRODUCT, (".py", ".cu", ".h", ".typed"))]
    expected = {path if path.startswith("kvstore/") else f"kvstore/{path}" for path in paths}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvstore"}
