"""Imports go down only: the table of allowed imports, read from the source with `ast`."""

import ast
import collections
import graphlib
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_fedq"
ARRAYS = {"torch", "numpy", "numba", "scipy"}
HOST = {"_lightning", "torch"}

# What each room, or a low part of one, may import: parts of this package, and packages from outside. Not
# listed are `cli`, `commands`, `flower`, `audit` and `comparison`, which stand on top.
ALLOWED = {
    "imports": set(),
    "functional": ARRAYS,
    "keys": {"numpy", "cryptography", "numba", "llvmlite"},
    "wire": {"constriction", *ARRAYS},
    "privacy.losses": {"functional", *ARRAYS},
    "privacy.assumptions": set(),
    "mechanisms.interface": {"functional", "wire", "privacy.losses", "keys", "torch"},
    "mechanisms.contract": {"mechanisms.interface", "wire", "torch"},
    "mechanisms.contract_suite": {
        *("mechanisms.contract", "mechanisms.interface", "functional", "keys", "wire"),
        *("jsonargparse", "yaml", "torch"),
    },
    "mechanisms.registry": {"mechanisms.interface", "mechanisms"},
    "algorithms.byzantine.robust": ARRAYS,
    "mechanisms": {
        *("mechanisms.interface", "privacy.losses", "privacy.accounting", "privacy.assumptions"),
        *("imports", "wire", "keys", "functional", *ARRAYS),
    },
    "privacy.collusion": {"functional", "numpy"},
    "privacy.cohorts": {
        *("mechanisms.interface", "keys", "functional", "privacy.losses", "privacy.assumptions", "numpy")
    },
    "privacy.run": {"mechanisms.interface", "privacy.collusion", "privacy.cohorts", "torch"},
    "secagg": {
        *("mechanisms.interface", "privacy.collusion", "privacy.run", "wire", "keys", "functional"),
        *("cryptography", *ARRAYS),
    },
    "privacy.verdict": set(),
    "privacy.grid": {"privacy.losses", *ARRAYS},
    "privacy.accounting": {"mechanisms.interface", "privacy.losses", "privacy.grid", *ARRAYS},
    "dpsgd.accountant": {"imports", "privacy.accounting", "privacy.grid", "opacus", *ARRAYS},
    "dpsgd.layers": {"torch"},
    "dpsgd.opacus": {"dpsgd.layers", "imports", "functional", "opacus", *ARRAYS},
    "dpsgd.statement": {"dpsgd.accountant", "privacy.assumptions", "privacy.verdict"},
    "privacy": {
        *("mechanisms.interface", "imports", "functional", "keys", "dpsgd.accountant", "dpsgd.statement"),
        *("privacy.losses", "privacy.grid", "privacy.accounting", "privacy.verdict", "privacy.run"),
        *("privacy.collusion", "privacy.cohorts", "privacy.assumptions", *ARRAYS),
    },
    "privacy.planning": {
        *("mechanisms.interface", "privacy", "privacy.run", "privacy.accounting"),
        *("keys", "secagg", "wire", "torch"),
    },
    "rounds": {
        *("rounds", "mechanisms.contract", "mechanisms.interface", "keys", "functional", "privacy", "wire"),
        *("privacy.run", "numpy", "torch"),
    },
    "algorithms.byzantine": {
        *("algorithms.byzantine.robust", "mechanisms.interface", "functional", "rounds", *HOST)
    },
    "_lightning": {"pytorch_lightning", "lightning"},
    "data": {"functional", "matplotlib", "numpy", *HOST},
    "data.datasets": {"data", "imports", "sklearn", "torchvision", "PIL", "numpy", *HOST},
    "data.models": {"torchmetrics", *HOST},
    "reports": {
        *("mechanisms.interface", "privacy.planning", "privacy", "privacy.verdict", "rounds"),
        *("jinja2", "markupsafe", "matplotlib", "PIL", "rich"),
    },
    "algorithms": {"functional", "torch"},
    "algorithms.local_algorithm": {"torch"},
    "clients": {
        *("algorithms.local_algorithm", "data", "functional", "mechanisms", "torchmetrics", "numpy", *HOST)
    },
    "training": {
        *("clients", "algorithms", "algorithms.byzantine", "mechanisms.interface", "functional", "keys"),
        *("privacy.planning", "privacy", "rounds", "secagg", "data", "wire", "reports"),
        *("numpy", "torchmetrics", *HOST),
    },
    "dpsgd": {
        *("clients", "mechanisms.interface", "data", "training", "privacy", "keys", "rounds", "numpy"),
        *HOST,
    },
    "callbacks": {
        *("imports", "algorithms.byzantine", "algorithms", "mechanisms.interface", "functional", "keys"),
        *("wire", "rounds", "privacy", "data", "clients", "training", "dpsgd", "reports", "secagg"),
        *("torchmetrics", "matplotlib", "numpy", "opacus", "rich", "wandb", "yaml", *HOST),
    },
    "leakage": {
        *("callbacks", "clients", "data", "functional", "keys", "mechanisms.interface", "rounds", "training"),
        *("mechanisms.near_optimal_utility", "scipy", *HOST),
    },
}
TOP = {"__main__", "cli", "commands", "flower", "audit", "comparison"}
ASIDE = ("audit", "comparison", "leakage")
LIGHTNING = {"pytorch_lightning", "lightning"}


def _part_of(module):
    """The longest name in the table that a module's name begins with."""
    names = module.split(".")
    longest = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((name for name in longest if name in ALLOWED), names[0])


def _layer(path):
    return _part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def _may(layer, module):
    """Whoever may import a room may import every part of it."""
    return any(f"{module}.".startswith(f"{name}.") for name in ALLOWED[layer] | {layer})


def _imports(path):
    """Every imported layer of this package or package from outside, lazy imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: absolute imports only"
            assert node.module is not None
            names = [node.module]
            if node.module == "lightning_fedq":
                names = [f"lightning_fedq.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            found = rest if first == "lightning_fedq" else first
            if found and found not in sys.stdlib_module_names:
                yield found, node.lineno


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
EXPERIMENTS = sorted(PACKAGE.with_name("reproductions").rglob("*.py"))
"""Outside of the package: they may use everything, and nothing uses them."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    layer = _layer(path)
    if layer in TOP:
        return
    assert layer in ALLOWED, f"{layer} is not in the table of layers; decide where it stands"
    wrong = [f"line {line}: {name}" for name, line in _imports(path) if not _may(layer, name)]
    assert not wrong, f"{path.relative_to(PACKAGE)} ({layer}) may not import {wrong}"


def test_the_table_has_no_cycles():
    done = set()
    while len(done) < len(ALLOWED):
        waits = {name: (ALLOWED[name] & set(ALLOWED)) - done - {name} for name in set(ALLOWED) - done}
        free = {layer for layer, lower in waits.items() if not lower}
        assert free, f"these layers import each other: {sorted(waits)}"
        done |= free


NAMES = {
    ".".join(("lightning_fedq", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES
}
NAMES = {name.removesuffix(".__init__"): path for name, path in NAMES.items()}


def _needs(node, types=False):
    """Modules of this package that a file imports, late imports included, those a type checker's if asked."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test) and not types:
            continue
        if isinstance(part, ast.ImportFrom):
            assert part.module is not None
            inner = [f"{part.module}.{alias.name}" for alias in part.names]
            yield from (name if name in NAMES else part.module for name in inner)
        elif isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        yield from _needs(part, types)


def test_the_longest_chain_of_imports():
    """A change below reaches whoever stands above: at most 12 modules on each other, but for late imports."""
    imports = (ast.Import, ast.ImportFrom)
    needs, heights = {}, {}
    for name, path in NAMES.items():
        body = [part for part in ast.parse(path.read_text()).body if isinstance(part, imports)]
        needs[name] = set(_needs(ast.Module(body, []))) if path.name != "__init__.py" else set()

    def height(name):
        if name not in heights:
            heights[name] = 1 + max((height(below) for below in needs[name] if below in needs), default=0)
        return heights[name]

    assert max(map(height, needs)) <= 13  # a run holds its law of cohorts


@pytest.mark.parametrize("types", [False, True])
def test_no_module_needs_itself(types):
    """Those that a type checker alone imports included."""
    graph = {
        name: set(_needs(ast.parse(path.read_text()), types)) & set(NAMES) for name, path in NAMES.items()
    }
    packages = {name for name, path in NAMES.items() if path.name == "__init__.py"}  # a door, and no room
    graph = {name: below - packages for name, below in graph.items() if name not in packages}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_one_module_binds_to_lightning():
    """Programs of either of Lightning's packages work only if no other module imports one of them."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if _layer(path) != "commands" and any(name in LIGHTNING for name, _ in _imports(path))
    }
    assert found <= {"_lightning.py"}


@pytest.mark.parametrize("room", ASIDE)
def test_nothing_needs_what_stands_aside(room):
    """Its commands and callbacks are found by name, so it could be left out."""
    outside = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] != room]
    wrong = {str(path) for path in outside for name, _ in _imports(path) if f"{name}.".startswith(f"{room}.")}
    assert len(outside) > 200 and not wrong


def test_the_package_knows_no_experiment():
    """The wheel holds none."""
    assert EXPERIMENTS
    assert not [str(path) for path in MODULES if "reproductions" in {name for name, _ in _imports(path)}]


def test_partition_is_pure():
    assert {name for name, _ in _imports(PACKAGE / "data" / "partition.py")} <= {"functional.checks", "torch"}


def test_no_file_name_occurs_three_times():
    names = collections.Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert not {name: count for name, count in names.items() if count > 2}


def test_the_round_engine_names_no_mechanism():
    engine = [path for path in MODULES if _layer(path) == "rounds"]
    found = {name for path in engine for name, _ in _imports(path) if name.startswith("mechanisms")}
    assert engine
    assert {name for name in found if not _may("mechanisms.interface", name)} == {"mechanisms.contract"}


DRAWS = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli")}

USERS_OWN_DRAWS = "data/generator_turns.py"
"""The user's dropout and transforms draw from the process's generators: a seed a client repeats them."""


def test_no_global_random_numbers():
    """Streams are arguments: no torch.manual_seed, no torch.rand* without a generator, no unseeded numpy."""
    wrong = set()
    for path in [*MODULES, *EXPERIMENTS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                free = name in DRAWS and not any(keyword.arg == "generator" for keyword in node.keywords)
                seeded = "default_rng(" in ast.unparse(node) and "default_rng()" not in ast.unparse(node)
                module = name.startswith(("np.random", "numpy.random", "random.")) and not seeded
                if free or module or name == "torch.manual_seed":
                    wrong.add((path.as_posix().removeprefix(f"{PACKAGE.as_posix()}/"), name))
    assert not {(path, name) for path, name in wrong if path != USERS_OWN_DRAWS}
    names = {name.rpartition(".")[2] for path, name in wrong if path == USERS_OWN_DRAWS}
    draws = {"seed", "getstate", "setstate", "get_state", "set_state", "Generator", "RandomState", "Random"}
    assert names <= draws, "it draws nothing itself"
