"""Settings are composed in one place, and as Hydra composes them."""

import random
import shutil
import sys
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from kvbench.config import catalogue, compose
from kvbench.config.paths import CONF
from kvbench.config.provenance import source_hash, source_hashes
from kvbench.sweeps.plan import expand_sweep, label_cells, plan_cell
from kvbench.validation import SettingError
from tests.support.selection import only_in_full

VALUES = {
    "budget": ["0.05", "0.5", "128"],
    "budget_of": ["prompt", "seen"],
    "block_size": ["null", "16"],
    "seed": ["0", "7"],
    "limit": ["null", "3"],
    "temperature": ["0.0", "0.7"],
    "model.compile": ["auto", "off"],
    "sweep.share_prefill": ["true", "false"],
    "sweep.share_decoding": ["true", "false"],
    "results": ["results", "'a b/é'"],
    "+task.note": ["x", "{a: [1, 2]}"],
}
INSIDE = {
    "method=snapkv": {"method.preset": ["kvpress", "paper"], "method.window": ["3", "64"]},
    "method=criticalkv": {"method.base_args": ["{preset: kvpress}", "{}"]},
    "method=knorm": {"method.skip_layers": ["[0, 1]", "[]"]},
    "task=ruler": {"task.subtasks": ["[niah_single_1, ruler_vt]", "all"], "task.length": ["512"]},
    "task=longbench": {"task.path": ["miniature", "null"]},
}


def draw_cells(count: int) -> list[list[str]]:
    """Overrides of random cells: groups, settings in them and settings at the root, in any order."""
    draw = random.Random(0)
    cells = []
    for _ in range(count):
        own = [f"{group}={draw.choice(compose.list_choices(group))}" for group in ("allocator", "codec", "model")]
        chosen = [draw.choice([key for key in INSIDE if key.startswith(group)]) for group in ("method", "task")]
        values = VALUES | INSIDE[chosen[0]] | INSIDE[chosen[1]]
        names = draw.sample(sorted(values), draw.randint(0, len(values)))
        cell = [
            *draw.sample(own, draw.randint(0, 3)),
            *chosen,
            *(f"{name}={draw.choice(values[name])}" for name in names),
        ]
        cells.append(draw.sample(cell, len(cell)))
    return cells


@pytest.mark.parametrize("count", [3, only_in_full(200)])
def test_cells_are_composed_as_hydra_composes_them(count):
    for cell in draw_cells(count):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            expected = hydra.compose("config", cell)
        found = compose.compose_config(cell)
        assert OmegaConf.to_container(found) == OmegaConf.to_container(expected), cell
        resolved = OmegaConf.to_container(expected, resolve=True)
        assert OmegaConf.to_container(found, resolve=True) == resolved, cell
        for group in ("model", "method", "allocator", "codec", "task"):
            for name in catalogue.NO_SETTINGS:
                resolved[group].pop(name, None)
            assert catalogue.read_settings(group, found[group]) == resolved[group], cell


def test_settings_that_refer_to_other_groups_follow_them():
    for seed in (1, 2):
        assert catalogue.read_settings("task", compose.compose_config([f"seed={seed}"]).task)["seed"] == seed
    for window in ("${seed}", "${..seed}", "${.preset}${seed}"):
        for seed, found in ((3, 3), (4, 4)):
            config = compose.compose_config(["method=snapkv", f"seed={seed}", f"method.kernel={window}"])
            assert str(catalogue.read_settings("method", config.method)["kernel"]).endswith(str(found)), window


@pytest.mark.parametrize("spelling", ["codec.base_args={bits: 4}", "codec.base_args.bits=4", "+codec.base_args.bits=4"])
def test_a_codecs_base_has_settings(spelling):
    config = compose.compose_config(["codec=delta", "codec.base=kivi", spelling])
    assert catalogue.resolve("codec", config.codec)["base"]["bits"] == 4


def test_a_setting_that_the_base_does_not_have_is_refused():
    config = compose.compose_config(["codec=delta", "codec.base=kivi", "codec.base_args.bit=4"])
    with pytest.raises(SettingError, match="^codec setting=bit: did you mean bits[?] Choose one of preset, bits, "):
        catalogue.resolve("codec", config.codec)


def test_a_composition_is_no_others():
    one = compose.compose_config(["method=snapkv"])
    one.method.window = 3
    assert compose.compose_config(["method=snapkv"]).method.window == 32


def test_cells_are_counted_as_hydra_counts_them():
    assert expand_sweep(["method=snapkv,knorm", "seed=1", "budget=0.1,0.2"]) == [
        [f"method={method}", "seed=1", f"budget={budget}"] for method in ("snapkv", "knorm") for budget in (0.1, 0.2)
    ]
    assert [cell[0] for cell in expand_sweep(["seed=range(0, 3)"])] == ["seed=0", "seed=1", "seed=2"]
    assert [cell[0] for cell in expand_sweep(["method=glob(s*)"])] == ["method=sink", "method=snapkv"]


def test_a_label_says_what_tells_a_cell_from_the_others():
    cells = expand_sweep(["method=snapkv,knorm", "budget=0.1", "seed=1,2"])
    assert label_cells(cells)[1] == "method=snapkv seed=2" and label_cells(cells[:1]) == ["(one cell)"]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder with a method of one's own, and its package."""
    monkeypatch.setattr(compose, "_added", [])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "my_methods"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lately.py").write_text(
        "from kvbench.interfaces.method import Method\n\n\nclass Newest(Method):\n"
        "    def score(self, observation, rows, state):\n        return rows.places.float()\n"
    )
    folder = tmp_path / "conf"
    (folder / "method").mkdir(parents=True)
    text = "_target_: my_methods.lately.Newest\nname: lately\n"
    (folder / "method" / "lately.yaml").write_text(text)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_methods"]:
        del sys.modules[name]  # another test's package has the same name


def test_a_file_of_ones_own_may_choose_files_of_other_groups(own_folder):
    (own_folder / "method" / "rounding.yaml").write_text(
        "defaults: [snapkv, _self_, {override /codec@_global_.codec: kivi}]\nname: rounding\n"
    )
    compose.add_folder(own_folder)
    for task in ("ruler", "niah"):
        found = compose.compose(["method=rounding", f"task={task}"])
        assert (found.choices["codec"], found.config.codec.name, found.config.task.name) == ("kivi", "kivi", task)


def test_a_method_lives_in_ones_own_package(own_folder):
    compose.add_folder(own_folder)
    assert "lately" in catalogue.methods_available()
    method = catalogue.build("method", catalogue.load_settings("method", "lately"))
    assert type(method).__module__ == "my_methods.lately"
    assert compose.compose_config(["method=lately", "budget=0.1"]).method.name == "lately"


def install(own_folder: Path, entry: str) -> None:
    """Leave the package as pip leaves it: with metadata, a list of its files, and an entry point."""
    root = own_folder.parent
    shutil.move(own_folder, root / "my_methods" / "conf")
    info = root / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvbench.conf]\nmine = {entry}\n")
    files = [path.relative_to(root).as_posix() for path in (root / "my_methods").rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))


@pytest.fixture
def fresh_entry_points(monkeypatch):
    """Entry points are read once a process; not so in these tests."""
    monkeypatch.setattr(compose, "_installed_folders", compose._installed_folders.__wrapped__)


@pytest.mark.parametrize("namespace", [False, True])
def test_an_installed_package_brings_its_methods(own_folder, fresh_entry_points, namespace):
    """Its entry point names the folder of files, and its sources are part of a run's hash."""
    if namespace:
        (own_folder.parent / "my_methods" / "__init__.py").unlink()
    install(own_folder, "my_methods.conf")
    assert compose.compose_config(["method=lately"]).method._target_ == "my_methods.lately.Newest"
    run = plan_cell(["method=lately", "device=cpu"]).run
    assert any(name == "my_methods.lately" for name in source_hashes(run.sources()))
    before = source_hash(run.sources())
    source = own_folder.parent / "my_methods" / "lately.py"
    source.write_text(source.read_text().replace("float()", "double()"))
    assert source_hash(run.sources()) != before
    assert not any(name.startswith("my") for name in source_hashes(["kvbench.runs.runner"]))


def test_an_entry_point_that_cannot_be_used_is_one_line(own_folder, fresh_entry_points):
    install(own_folder, "my_methods.nowhere")
    with pytest.raises(
        SettingError, match="^entry point kvbench.conf mine=my_methods.nowhere: no package of that name$"
    ):
        compose.compose_config(["method=snapkv"])
    (own_folder.parent / "my_methods" / "__init__.py").write_text("raise RuntimeError('broken\\nat import')\n")
    del sys.modules["my_methods"]
    line = r"^entry point kvbench.conf mine=my_methods.nowhere: cannot be imported \(RuntimeError: broken at import\)$"
    with pytest.raises(SettingError, match=line):
        compose.compose_config(["method=snapkv"])


def test_two_files_of_one_name_are_one_line(own_folder):
    (own_folder / "method" / "snapkv.yaml").write_text("_target_: my_methods.lately.Newest\nname: snapkv\n")
    compose.add_folder(own_folder)
    with pytest.raises(
        SettingError, match=r"^method=snapkv: .*conf/method/snapkv.yaml .* have the same name; rename one$"
    ):
        compose.compose_config(["method=snapkv"])


def test_a_folder_that_is_none_is_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SettingError, match=r"^--config-dir=.*: a folder with method/<name>.yaml"):
            compose.add_folder(folder)
