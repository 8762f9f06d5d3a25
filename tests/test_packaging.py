"""The package builds from pip's own wheels, for each CUDA, and works where it is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from once import made_once

from umem import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("purelib"))
GUARD = "umem/runtime/_guard_torch{}_{}" + sysconfig.get_config_var("EXT_SUFFIX")
CMAKE = str(Path(sys.executable).with_name("cmake"))

# Runs "$@" where the folders in $HIDDEN are empty and the files in $HIDDEN_FILES are not there.
HIDE = """
set -e
for folder in $HIDDEN; do mount -t tmpfs none "$folder"; done
for file in $HIDDEN_FILES; do mount --bind /dev/null "$file"; done
exec "$@"
"""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Output of a command, standard error included; fails the test if the command fails."""
    done = subprocess.run(
        [str(word) for word in command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without what leads to a CUDA toolkit or to this checkout."""
    leads = ("CUDA", "CMAKE_", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "PYTHONPATH", "UMEM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leads)}
    kept.pop("LD_LIBRARY_PATH", None)
    # An isolated build's packages are used once: no bytecode is made of them.
    return kept | {"PIP_NO_COMPILE": "no"} | settings


def system_toolkits() -> list[Path]:
    """Folders of the CUDA toolkits on this machine."""
    named = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CUDAToolkit_ROOT")]
    folders = [*Path("/usr/local").glob("cuda*"), *Path("/opt").glob("cuda*")]
    folders += [Path(name) for name in named if name]
    return sorted({folder.resolve() for folder in folders if folder.is_dir()})


def without_toolkit(env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the words to put before a command, and its environment, to hide CUDA toolkits."""
    compiler = shutil.which("nvcc")
    toolkits = system_toolkits()
    if not toolkits and compiler is None:
        return [], env
    unshare = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("a CUDA toolkit is installed, and mount namespaces to hide it are not allowed")
    hidden = {"HIDDEN": " ".join(map(str, toolkits)), "HIDDEN_FILES": compiler or ""}
    return [*unshare, "bash", "-c", HIDE, "hide"], env | hidden


def build_wheel(cuda: str, folder: Path, torch: str = "none") -> tuple[Path, str]:
    """Build in isolation without a CUDA toolkit; the wheel, and what the build said."""
    before, env = without_toolkit(clean_environment(UMEM_CUDA=cuda, UMEM_TORCH=torch))
    # Not optimised, and each library in one piece, as most of the time goes into headers: these
    # tests ask what a wheel holds and finds, not how fast it is.
    options = ("CMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG", "CMAKE_UNITY_BUILD_BATCH_SIZE=0")
    flags = [f"--config-settings=cmake.define.{it}" for it in options]
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", *flags]
    said = run(*before, *pip, "--wheel-dir", folder, ROOT, env=env)
    (wheel,) = folder.glob("umem-*.whl")
    return wheel, said


def native_library(wheel: Path, folder: Path) -> Path:
    """Unpack the native library of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [name for name in names if name.startswith("umem/runtime/_native.cpython")]
        return Path(archive.extract(name, folder))


@pytest.fixture(scope="module")
def wheel13(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    def build(folder: Path) -> None:
        _, said = build_wheel("13", folder, torch="auto")
        (folder / "said").write_text(said)

    folder = made_once(tmp_path_factory, "wheel13", build)
    (wheel,) = folder.glob("umem-*.whl")
    return wheel, (folder / "said").read_text()


@pytest.fixture(scope="module")
def clean_python(wheel13: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a virtual environment with the wheel, RMM and CUDA's runtime installed in it.

    The other dependencies, torch above all, are lent from this environment through a path file;
    such a folder's own path files are not read, so this checkout's editable install stays out.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    needs = ["librmm-cu13", "rapids-logger", "nvidia-cuda-runtime"]
    run(*pip, "-c", ROOT / "constraints.txt", *needs, wheel13[0], env=clean_environment())
    (site / "lent.pth").write_text(f"{SITE}\n")
    return python


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_builds_without_a_system_toolkit(
    cuda: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if cuda == "13":
        wheel, said = request.getfixturevalue("wheel13")
    else:
        wheel, said = build_wheel(cuda, tmp_path)
    (line,) = [line for line in said.splitlines() if f"umem: CUDA {cuda} runtime at" in line]
    assert "pip-build-env" in line.partition("headers in")[2]
    library = native_library(wheel, tmp_path).read_bytes()
    assert f"libcudart.so.{cuda}".encode() in library
    assert b"libcuda.so" not in library
    assert b"libtorch" not in library
    assert b"libc10" not in library


def test_builds_the_core_without_cuda_and_rmm(tmp_path: Path) -> None:
    wheel, said = build_wheel("none", tmp_path)
    assert "librmm" not in said
    library = native_library(wheel, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_guard_torch" in name]
    assert "no guard" in said
    load = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])\n"
        "native = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
        "assert not native.HAS_CUDA and native.RMM_VERSION == ''\n"
        "host = native.Allocator.on_host(native.Config([native.ClassSetting()] * 6))\n"
        "host.free(host.malloc(1000))\n"
    )
    run(sys.executable, "-I", "-c", load, library, cwd=tmp_path)


def test_wheel_holds_policies_examples_and_types(wheel13: tuple[Path, str]) -> None:
    with zipfile.ZipFile(wheel13[0]) as archive:
        names = set(archive.namelist())
    files = (path.relative_to(ROOT) for path in (ROOT / "policies").rglob("*.yaml"))
    policies = {f"umem/{path.as_posix()}" for path in files}
    assert "umem/policies/sft.yaml" in policies
    types = {f"umem/runtime/{name}.pyi" for name in ("_native", "_guard")}
    assert policies | types | {"umem/py.typed"} <= names
    examples = {f"umem/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert "umem/examples/demo.py" in examples
    assert {name for name in names if name.startswith("umem/examples/")} == examples
    assert {name.split("/")[0] for name in names} == {"umem", "umem-0.1.0.dist-info"}


def test_an_isolated_build_has_the_guard_for_the_torch_of_the_environment(
    wheel13: tuple[Path, str], clean_python: Path, tmp_path: Path
) -> None:
    guard = GUARD.format(*version("torch").split(".")[:2])
    with zipfile.ZipFile(wheel13[0]) as archive:
        assert [name for name in archive.namelist() if "_guard_torch" in name] == [guard]
    show = "from umem.runtime.native_guard import *; print(native_guard(), guard_problem())"
    shown = run(clean_python, "-c", show, cwd=tmp_path, env=clean_environment())
    assert f"{clean_python.parent.parent}/" in shown
    assert guard in shown


def test_native_library_finds_its_libraries_by_itself(clean_python: Path, tmp_path: Path) -> None:
    # Loaded as torch does, with nothing that would have loaded RMM or CUDA's runtime before.
    find = "import importlib.util as u; spec = u.find_spec('umem')"
    load = (
        f"{find}; import ctypes, pathlib\n"
        "(library,) = pathlib.Path(spec.origin).parent.glob('runtime/_native.cpython*')\n"
        "torch_side = ctypes.CDLL(library)\n"
        "assert torch_side.umem_malloc and torch_side.umem_free\n"
        "loaded = pathlib.Path('/proc/self/maps').read_text()\n"
        "print([line.split()[-1] for line in loaded.splitlines() if 'libcudart' in line][0])\n"
    )
    cudart = run(clean_python, "-I", "-c", load, cwd=tmp_path, env=clean_environment()).strip()
    assert Path(cudart).is_relative_to(clean_python.parent.parent)


def test_installed_wheel_works_away_from_the_checkout(clean_python: Path, tmp_path: Path) -> None:
    show = (
        "import umem, umem.runtime._native as n; print(umem.__file__, n.HAS_CUDA, umem.__version__)"
    )
    file, has_cuda, version = run(
        clean_python, "-c", show, cwd=tmp_path, env=clean_environment()
    ).split()
    assert Path(file).is_relative_to(clean_python.parent.parent)
    assert (has_cuda, version) == ("True", "0.1.0")
    command = clean_python.parent / "umem"
    listed = run(command, "policy", "list", cwd=tmp_path, env=clean_environment())
    for path in (ROOT / "policies").glob("*.yaml"):
        assert path.stem in listed
    find = "from umem.cli.demo import examples_folder; print(examples_folder())"
    found = run(clean_python, "-c", find, cwd=tmp_path, env=clean_environment()).strip()
    assert Path(found).is_relative_to(clean_python.parent.parent)


class Configuration:
    """CMake's configuration step, under an interpreter that sees the wheels linked into `site`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.site.mkdir()
        venv.create(folder / "venv", with_pip=False)
        self.link("nanobind")

    def link(self, *names: str) -> None:
        for name in names:
            found = list(SITE.glob(name))
            if not found:
                pytest.skip(f"{name} is not installed in {SITE}")
            for path in found:
                (self.site / path.name).symlink_to(path)

    def run(self, cuda: str, *options: str) -> tuple[int, str]:
        python = self.folder / "venv" / "bin" / "python"
        before, env = without_toolkit(clean_environment(PYTHONPATH=str(self.site)))
        choices = [f"-DUMEM_CUDA={cuda}", f"-DPython_EXECUTABLE={python}", "-DUMEM_TESTS=OFF"]
        choices += options
        done = subprocess.run(
            [*before, CMAKE, "-S", str(ROOT), "-B", str(self.folder / "build"), *choices],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # CMake wraps its messages.
        return done.returncode, " ".join(done.stdout.split())


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration(tmp_path)


RMM = ("librmm", "librmm_cu13-*", "rapids_logger", "rapids_logger-*")


@pytest.mark.parametrize(
    ("cuda", "wheels", "works", "says"),
    [
        ("auto", (), True, ["building the core only, without CUDA", "pip install librmm-cu13"]),
        ("13", (), False, ["pip install librmm-cu13"]),
        ("13", RMM, False, ["pip install nvidia-cuda-runtime nvidia-cuda-crt"]),
        ("11", (), False, ["UMEM_CUDA is '11'; it may be auto, 12, 13 or none"]),
        ("none", (), True, ["umem: no guard", "umem doctor"]),
    ],
    ids=[
        *("missing RMM leaves the core", "RMM where CUDA is asked for", "headers"),
        *("unknown choices", "a torch that comes later"),
    ],
)
def test_what_is_missing_is_named(
    cuda: str, wheels: tuple[str, ...], works: bool, says: list[str], configuration: Configuration
) -> None:
    configuration.link(*wheels)
    status, said = configuration.run(cuda)
    assert (status == 0) is works, said
    assert all(words in said for words in says)


def test_wheels_are_found_on_the_import_path(configuration: Configuration) -> None:
    configuration.link(*RMM, "nvidia")
    status, said = configuration.run("auto")
    assert status == 0, said
    assert f"at {configuration.site}/librmm/lib64/librmm.so" in said
    assert f"CUDA 13 runtime at {configuration.site}/nvidia/cu13/lib/libcudart.so.13" in said


def test_a_conda_environment_has_no_python_package_of_rmm(configuration: Configuration) -> None:
    """Its libraries and headers are in `lib` and `include` of the environment."""
    prefix = configuration.folder / "venv"
    cuda = prefix / "targets" / "x86_64-linux"
    for folder in ("conda-meta", "include", "lib", cuda):
        (prefix / folder).mkdir(parents=True, exist_ok=True)
    wheels = [SITE / "librmm", SITE / "rapids_logger", SITE / "nvidia" / "cu13"]
    if not all(wheel.is_dir() for wheel in wheels):
        pytest.skip(f"RMM or CUDA's runtime is not installed in {SITE}")
    for wheel in wheels[:2]:
        for path in [*(wheel / "include").iterdir(), *(wheel / "lib64").glob("*.so")]:
            kind = "lib" if path.suffix == ".so" else "include"
            (prefix / kind / path.name).symlink_to(path)
    for name in ("include", "lib"):
        (cuda / name).symlink_to(wheels[2] / name)
    status, said = configuration.run("auto")
    assert status == 0, said
    assert f"at {prefix}/lib/librmm.so" in said
    assert f"CUDA 13 runtime at {cuda}/lib/libcudart.so.13, headers in " in said
    assert f"{prefix}/include;{cuda}/include " in said


def fake_torch(folder: Path, version: str) -> Path:
    """A folder with what the build looks for of torch."""
    for name in ("c10", "torch_cpu", "torch_python"):
        library = folder / "torch" / "lib" / f"lib{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
    (folder / "torch" / "include" / "ATen").mkdir(parents=True)
    (folder / "torch" / "include" / "ATen" / "ATen.h").touch()
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return folder


def test_each_minor_version_of_torch_has_a_guard(configuration: Configuration) -> None:
    folders = configuration.folder / "torches"
    for number, torch in enumerate(["2.8.0+cpu", "2.14.1+cu130", "2.8.1+cpu"]):
        fake_torch(folders / str(number), torch)
    status, said = configuration.run("none", f"-DUMEM_TORCH={folders}/[01];{folders}/2")
    assert status == 0, said
    assert re.findall(r"guard for torch (\S+)", said) == ["2.8.0+cpu", "2.14.1+cu130"]
    cmake = (CMAKE, "--build", configuration.folder / "build", "--target", "help")
    assert {"_guard_torch2_8", "_guard_torch2_14", "guard"} <= set(re.findall(r"\w+", run(*cmake)))


def test_a_folder_without_torch_is_refused(configuration: Configuration) -> None:
    empty = configuration.folder / "empty"
    status, said = configuration.run("none", f"-DUMEM_TORCH={empty}")
    assert status != 0
    assert f"{empty} holds no torch" in said


def test_torches_are_downloaded_as_the_build_wants_them(tmp_path: Path) -> None:
    """Of each minor version the newest wheel for this Python; libraries that nothing links stay."""
    index, folder = tmp_path / "index", tmp_path / "torches"
    index.mkdir()
    for torch in ("2.7.0", "2.9.0", "2.9.1", "2.11.0"):
        content = fake_torch(tmp_path / torch, torch) / "torch"
        (content / "lib" / "libtorch_cuda.so").touch()
        about = f"torch-{torch}.dist-info"
        with zipfile.ZipFile(index / f"torch-{torch}-py3-none-any.whl", "w") as wheel:
            for path in content.rglob("*"):
                wheel.write(path, path.relative_to(content.parent))
            said = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}"
            wheel.writestr(f"{about}/METADATA", said)
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
            wheel.writestr(f"{about}/RECORD", "")
    fake_torch(folder / "2.10", "2.10.0")  # of another Python
    script = ROOT / "cmake" / "download_torches.py"
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": "", "PIP_NO_INDEX": "1"}
    env = clean_environment(**alone, PIP_FIND_LINKS=str(index))
    run(sys.executable, script, folder, env=env)
    assert sorted(path.name for path in folder.iterdir()) == ["2.11", "2.9"]
    libraries = {path.name for path in (folder / "2.9" / "torch" / "lib").iterdir()}
    assert libraries == {"libc10.so", "libtorch_cpu.so", "libtorch_python.so"}
    locate = ROOT / "cmake" / "locate_torch.py"
    found = json.loads(run(sys.executable, locate, f"{folder}/*"))
    assert [torch["version"] for torch in found] == ["2.11.0", "2.9.1"]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_conda_recipe_agrees_with_the_project(project: dict[str, Any]) -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    versions = recipe["context"]
    assert versions["version"] == __version__
    (entry_point,) = recipe["build"]["python"]["entry_points"]
    name, _, function = entry_point.partition(" = ")
    assert {name: function} == project["project"]["scripts"]
    needs = [need.replace(" ", "") for need in recipe["requirements"]["run"]]
    needs = [need.replace("pytorch", "torch") for need in needs]
    asked = [*project["project"]["dependencies"], f"python{project['project']['requires-python']}"]
    extra = project["project"]["optional-dependencies"][f"cuda{versions['cuda'].split('.')[0]}"]
    assert set(asked) <= set(needs)
    assert {need for need in extra if need.startswith("cuda-python")} <= set(needs)
    (rmm,) = [need for need in extra if need.startswith("rmm-")]
    assert rmm.endswith(f"=={versions['rmm']}.*")


def test_the_conda_recipe_renders() -> None:
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(str(ROOT / "packaging" / "conda" / "recipe.yaml"))
    (variant,) = recipe.render(rattler_build.VariantConfig())
    assert f"version='{__version__}'" in repr(variant)


def test_the_apptainer_recipe_has_known_sections_of_valid_shell() -> None:
    header, *sections = re.split(r"^%", (ROOT / "packaging" / "umem.def").read_text(), flags=re.M)
    assert dict(line.split(": ") for line in header.strip().splitlines()).keys() == {
        "Bootstrap",
        "From",
    }
    scripts = {}
    for section in sections:
        name, _, text = section.partition("\n")
        scripts[name] = text
    assert scripts.keys() == {"help", "files", "post", "test", "runscript"}
    for name in ("post", "test", "runscript"):
        subprocess.run(["sh", "-n"], input=scripts[name], text=True, check=True)


def test_the_dockerfile_has_known_instructions_of_valid_shell() -> None:
    text = (ROOT / "packaging" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    instructions = [
        line.split(maxsplit=1) for line in "\n".join(lines).replace("\\\n", "").split("\n")
    ]
    instructions = [it for it in instructions if it]
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "COPY", "SHELL", "WORKDIR", "CMD"}
    stages = [text.partition(" AS ")[2] for name, text in instructions if name == "FROM"]
    copied = [text for name, text in instructions if name == "COPY" and text.startswith("--from=")]
    assert [text.split()[0].removeprefix("--from=") for text in copied] == stages[:-1]
    for name, script in instructions:
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        elif name in ("SHELL", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(script))


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "packaging/Dockerfile"),
        ("zizmor", "--offline", "--strict-collection", ".github"),
    ],
    ids=lambda command: command[0],
)
def test_recipes_pass_their_linter(command: tuple[str, ...]) -> None:
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed; .github/requirements has it")
    run(program, *command[1:], env=clean_environment())


def test_locks_hold_what_make_installs() -> None:
    for cuda in ("12", "13"):
        lock = (ROOT / ".github" / "requirements" / f"cuda{cuda}.txt").read_text()
        locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, flags=re.M))
        pins: dict[str, str] = {}
        for file in ("constraints.txt", f"constraints-cuda{cuda}.txt"):
            for line in (ROOT / file).read_text().splitlines():
                if not line.startswith("#"):
                    name, _, version = line.partition("==")
                    pins[name.lower().replace("_", "-")] = version
        common = pins.keys() & locked.keys()
        assert {"cuda-python", "numpy", "nanobind"} <= common
        assert "torch" not in locked
        assert {name: locked[name] for name in common} == {name: pins[name] for name in common}
        assert lock.count("--hash=sha256:") >= len(locked)


@pytest.mark.parametrize("present", [[], ["aarch64-linux-gnu-g++"], ["qemu-aarch64"]])
def test_aarch64_without_its_tools_says_what_to_install(tmp_path: Path, present: list[str]) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("make", "sh", "find", "nproc", "sed", "expr"):
        (bin_folder / name).symlink_to(shutil.which(name) or name)
    for name in present:
        (bin_folder / name).symlink_to("/bin/true")
    done = subprocess.run(
        [bin_folder / "make", "test-aarch64", "--old-file=.venv/tools.stamp"],
        cwd=ROOT,
        env={"PATH": str(bin_folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "apt-get install g++-aarch64-linux-gnu qemu-user" in done.stderr
    assert "cmake" not in done.stdout
