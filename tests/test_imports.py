"""Imports point one way: a module knows those of lower levels, and those of its own level only where said here."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import angpt_jax

ROOT = Path(angpt_jax.__file__).parent
LEVELS = [
    "errors files hidden host_memory json_text links slurm_array nu axes part layout product ops measure attention "
    "attention.blocks attention.choice attention.context attention.splash chips training_flops ahead ahead.hlo "
    "ahead.collectives ahead.costs ahead.batch_search processes timing timing.load",
    "parts parts.gate parts.head parts.init parts.norms parts.pointwise parts.qk parts.residual",
    "arch places archs archs.angpt archs.gpt_plus archs.layer_norm archs.ngpt archs.norm_variants how seen model",
    "config schema yaml_files form cli path_rules task_files processes.cluster processes.membership meshes mesh_rules "
    "rules rows grids tables ahead.topologies",
    "optim sharding checkpoint restore integrity metrics flops speedup ahead.roofline progress unit_progress stopping "
    "run_dir run_lock weights_folder nu.monte_carlo processes.rendezvous processes.group processes.distributed "
    "data data.corpus data.tokenizer data.tokenizer_files data.shards data.prepared data.packing data.text_cache "
    "data.tokens data.pipeline data.sources data.units data.streams data.columns data.readers data.tfds_sets "
    "data.sentencepieces data.words data.work data.build data.workspace data.plans "
    "laws laws.points laws.loss laws.optima laws.bootstrap laws.fits timing.side json_output",
    "step instruments evaluation experiment fold decoding generate placement footprint dry_run loop scoring "
    "harness_run plots plots.look plots.history plots.curves plots.depth plots.pictures plots.page plots.installed "
    "plots.laws plots.comparison tuning verdict timing.rounds timing.results",
    "job pretrain finished init_from trials contenders standings announce trained weights harness ahead.step "
    "ahead.report ahead.table exports exports.exported exports.tensors exports.description exports.tokenizer "
    "exports.writing exports.reading timing.measures timing.child",
    "train sample evaluate export prepare report scaling sweep compare compile bench nu.__main__",
]
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules.split()}
COMMANDS = set(LEVELS[-1].split())
STANDALONE = "exports.standalone"  # files that an export takes along; they have no level, as no import leads there
# Within a level: who may import whom. A package's own modules may import each other.
WITHIN = {
    0: [
        ("layout", "axes"),
        ("product", "layout"),
        ("ops", "layout"),
        ("ops", "product"),
        ("attention", ""),
        ("ahead", "ahead"),
    ],
    1: [("parts", "parts")],
    2: [
        ("archs", "archs"),
        ("archs", "arch"),
        ("model", "arch"),
        ("model", "how"),
        ("model", "seen"),
        ("seen", "how"),
        ("places", "arch"),
    ],
    3: [("", "")],
    4: [
        ("data", "data"),
        ("laws", "laws"),
        ("data.build", "stopping"),
        ("processes", "processes"),
        ("", "processes.group"),
        ("checkpoint", "integrity"),
        ("checkpoint", "restore"),
        ("restore", "integrity"),
        ("run_dir", "weights_folder"),
    ],
    6: [
        ("pretrain", "job"),
        ("pretrain", "init_from"),
        ("job", "init_from"),
        ("init_from", "trained"),
        ("init_from", "exports"),
        ("weights", "trained"),
        ("exports", "exports"),
        ("exports", "trained"),
        ("ahead", "ahead"),
        ("contenders", "trials"),
        ("standings", "trials"),
        ("standings", "contenders"),
        ("announce", "standings"),
        ("timing.child", "timing.measures"),
        ("timing.measures", "trained"),
    ],
    5: [
        ("evaluation", "step"),
        ("instruments", "step"),
        ("experiment", "step"),
        ("experiment", "instruments"),
        ("placement", "experiment"),
        ("dry_run", "experiment"),
        ("dry_run", "placement"),
        ("dry_run", "footprint"),
        ("placement", "footprint"),
        ("loop", "step"),
        ("generate", "decoding"),
        ("plots", "plots"),
        ("tuning", "plots.history"),
        ("verdict", "plots.history"),
        ("plots.comparison", "tuning"),
        ("plots.comparison", "verdict"),
        ("loop", "evaluation"),
        ("timing.results", "timing.rounds"),
    ],
}
ON_DEVICES = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}


def modules() -> list[str]:
    """`data.tokens` for angpt_jax/data/tokens.py, `data` for its folder; not the package itself."""
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in names if name != "__init__")


def standalone() -> list[str]:
    """The modules that an export takes along."""
    return [name for name in modules() if is_in(name, STANDALONE)]


def file_of(module: str) -> Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def imported(module: str) -> frozenset[str]:
    """Full names of all that `module` imports, wherever the statement stands; of the package: its modules."""
    names = set()
    for node in ast.walk(ast.parse(file_of(module).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports: the full name says where a thing is from"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {name for name in parts if name.removeprefix("angpt_jax.") in modules()}
            names |= ours or {str(node.module)}
    return frozenset(names)


def of_the_package(module: str) -> set[str]:
    return {name.removeprefix("angpt_jax.") for name in imported(module) if name.startswith("angpt_jax.")}


def is_in(module: str, package: str) -> bool:
    return package in ("", module) or module.startswith(f"{package}.")


def allowed(module: str, other: str) -> bool:
    if LEVEL[other] != LEVEL[module]:
        return LEVEL[other] < LEVEL[module]
    return any(is_in(module, a) and is_in(other, b) for a, b in WITHIN.get(LEVEL[module], []))


def test_every_module_has_a_level():
    assert sorted([*LEVEL, *standalone()]) == modules()


@pytest.mark.parametrize("module", LEVEL)
def test_imports_point_down(module):
    assert [other for other in sorted(of_the_package(module)) if not allowed(module, other)] == []


def test_nothing_imports_a_command():
    assert {module for module in LEVEL if of_the_package(module) & COMMANDS} == set()


def test_nothing_imports_what_an_export_takes_along():
    """Nor does that import anything but PyTorch, transformers and its neighbours, which are named relatively, as the
    folder of an export is no part of this package."""
    assert len(standalone()) == 5
    assert [name for name in LEVEL for other in of_the_package(name) if is_in(other, STANDALONE)] == []
    neighbours = {name.rpartition(".")[2] for name in standalone()}
    for module in standalone():
        for node in ast.walk(ast.parse(file_of(module).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in neighbours, module
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                libraries = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
                assert libraries <= {"torch", "transformers"}, module


def test_the_skeleton_does_not_know_the_recipes():
    assert [name for name in of_the_package("model") if is_in(name, "archs")] == []


def test_a_step_gets_its_model_and_optimizer_as_arguments():
    assert of_the_package("step") == {"measure"}


@pytest.mark.parametrize("module", LEVELS[3].split())
def test_a_config_is_read_before_a_device_is_touched(module):
    reached, new = set(), {module}
    while new:
        reached |= new
        new = set().union(*(of_the_package(name) for name in new)) - reached
    libraries = {name.split(".")[0] for name in reached for name in imported(name)}
    assert libraries & ON_DEVICES == set()


def test_the_pure_array_functions_know_jax_alone():
    for module in LEVELS[0].split():
        libraries = {name.split(".")[0] for name in imported(module)} - set(sys.stdlib_module_names)
        assert libraries <= {"jax", "flax", "numpy", "angpt_jax"}, module
