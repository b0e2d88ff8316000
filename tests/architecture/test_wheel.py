"""What is built for release: complete, installable, and found by name from anywhere."""

from __future__ import annotations

import configparser
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as ``python -m build`` makes it: from the source archive, not from the checkout.

    ``--no-isolation`` takes the build backend that is installed, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts folder of a new environment that holds the wheel and, of all else, sees what is installed here.

    The dependencies are taken over by a path entry instead of being installed again: no network, and seconds instead of
    minutes. Path files inside such an entry are not read, so an editable install of this checkout stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    scripts = folder / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install"]
    subprocess.run([*install, "--no-deps", "--no-index", "--quiet", str(wheel)], capture_output=True, check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    places = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (packages / "dependencies.pth").write_text("".join(f"{place}\n" for place in places))
    return scripts


def test_the_wheel_holds_every_module_config_fragment_and_card(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "lightning_rlstab"
    wanted = {f"lightning_rlstab/{path.relative_to(package)}" for path in package.rglob("*.py")}
    wanted |= {"lightning_rlstab/py.typed"}
    for shelf in ("configs", "callbacks"):
        files = [path for path in (ROOT / shelf).rglob("*") if path.suffix in (".yaml", ".md")]
        assert files
        wanted |= {f"lightning_rlstab/shelf/{path.relative_to(ROOT)}" for path in files}
    assert not wanted - held
    strangers = {name for name in held if not name.startswith("lightning_rlstab") or "__pycache__" in name}
    assert not strangers


def test_the_wheel_names_its_licence_and_both_console_scripts(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    scripts = configparser.ConfigParser()
    scripts.read_string(archive.read(entry_points).decode())
    assert dict(scripts["console_scripts"]) == {
        "lightning-rlstab": "lightning_rlstab.cli:main",
        "rlstab-report": "lightning_rlstab.report.__main__:main",
    }
    assert any(name.endswith("LICENSE") for name in archive.namelist())


@pytest.mark.slow
def test_an_installed_wheel_finds_config_and_fragment_by_name_from_a_foreign_directory(
    installed: Path, tmp_path: Path
) -> None:
    where = [str(installed / "python"), "-c", "import lightning_rlstab; print(lightning_rlstab.__file__)"]
    place = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(place).is_relative_to(installed.parent)
    stacked = ["--config", "configs/demo.yaml", "--config", "callbacks/gepo.yaml"]
    command = [str(installed / "lightning-rlstab"), "fit", *stacked, "--print_config"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    config = yaml.safe_load(printed.stdout)
    assert config["trainer"]["default_root_dir"] == "runs/demo"
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in config["trainer"]["callbacks"]]
    assert "GEPO" in names
