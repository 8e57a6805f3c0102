"""Templates of examples/clusters, Dockerfile and compose file: they parse, their versions are the tested ones, and the keys of
their commands load."""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml

from tests.commands import ran
from tests.house.source import ROOT
from tests.slow import slow
from verl.config import load_config
from verl.config.sections.trainer import TrainerConfig

CLUSTERS = ROOT / "examples" / "clusters"
SCRIPTS = sorted([*CLUSTERS.glob("*.sbatch"), *CLUSTERS.glob("*.sh")])
PINNED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read_yaml(name):
    return yaml.safe_load((ROOT / name).read_text())


def keys_of(command):
    """The overrides of the `verl train` or `main_ppo` command in a text, with its variables as numbers."""
    text = re.search(r"(?:verl train|verl\.trainer\.main_ppo)((?:\\\n|[^\n])*)", command)[1].replace("\\\n", " ")
    text = re.sub(r"\$\{?\w+(?::-\w+)?\}?", "2", text.split("' ")[0]).replace('"$@"', "")
    return [word for word in shlex.split(text.rstrip("&' ")) if "=" in word]


def test_a_page_names_every_template():
    page = (CLUSTERS / "README.md").read_text()
    assert {path.name for path in CLUSTERS.iterdir()} - {"README.md"} == set(re.findall(r"^\| `([\w.]+)`", page, re.M))


def test_scripts_parse():
    for script in SCRIPTS:
        ran("bash", "-n", script)


@pytest.mark.parametrize("name", [path.name for path in (*SCRIPTS, *CLUSTERS.glob("*.yaml"))])
def test_keys_of_the_commands_load(name):
    text = (CLUSTERS / name).read_text()
    if name == "kuberay.yaml":
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    keys = keys_of(text)
    assert any(key.startswith("trainer.nnodes=2") for key in keys)
    needed = ["actor_rollout_ref.model.path=model", "data.train_files=a.parquet", "algorithm.adv_estimator=grpo"]
    config = load_config([*needed, *keys, "actor_rollout_ref.rollout.n=4"]).config
    assert config.trainer.n_gpus_per_node in (2, 8)


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_options_of_slurm(name):
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", (CLUSTERS / name).read_text(), re.M))
    assert options["ntasks-per-node"] == "1"  # Ray and torchrun start the processes of a node
    signal, seconds = re.fullmatch(r"(?:B:)?(\w+)@(\d+)", options["signal"]).groups()
    assert signal == "TERM"
    stop = re.search(r"trainer.stop_timeout_s=(\d+)", (CLUSTERS / name).read_text())
    assert stop is None or int(stop[1]) < int(seconds)


@pytest.mark.parametrize("name", ["verl/trainer/runtime_env.yaml", "examples/clusters/kuberay.yaml"])
def test_a_job_of_ray_has_time_to_save_before_it_is_killed(name):
    content = read_yaml(name)
    environment = yaml.safe_load(content["spec"]["runtimeEnvYAML"]) if "spec" in content else content
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > TrainerConfig().stop_timeout_s


def test_the_job_of_kuberay():
    job = read_yaml("examples/clusters/kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == PINNED["ray"]
    workers = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/data"]]
    gpus = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for group in workers
    ]
    keys = dict(key.split("=", 1) for key in keys_of(job["spec"]["entrypoint"]))
    assert sum(group["replicas"] for group in workers) == int(keys["trainer.nnodes"])
    assert gpus == [int(keys["trainer.n_gpus_per_node"])]


def test_the_task_of_skypilot():
    """Fields of SkyPilot's schema of a task."""
    task = read_yaml("examples/clusters/skypilot.yaml")
    assert set(task) <= {"name", "resources", "num_nodes", "envs", "workdir", "file_mounts", "setup", "run"}
    for part in ("setup", "run"):
        ran("bash", "-n", input=task[part])


def test_versions_of_the_image_are_the_tested_ones():
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.M))
    assert arguments["TORCH"] == PINNED["torch"]
    project = (ROOT / "pyproject.toml").read_text()
    for extra in arguments["EXTRAS"].split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    copied = copied_files()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / file).exists() for file in copied)


def copied_files():
    return {file for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.M) for file in line.split()[:-1]}


@pytest.mark.slow
def test_the_wheel_of_the_image_has_what_an_installation_has(tmp_path):
    """Of the files that the image copies from a fresh clone: the YAML of Hydra too, since the build writes it."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, clone], check=True, timeout=300)
    source.mkdir()
    for name in copied_files() - {"constraints.txt"}:
        copy = shutil.copytree if (clone / name).is_dir() else shutil.copy
        copy(clone / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, "."]
    subprocess.run(build, cwd=source, check=True, timeout=1800)
    (wheel,) = tmp_path.glob("verl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"verl/__init__.py", "verl/trainer/config/ppo_trainer.yaml"} <= names
    assert any(re.fullmatch(r"verl/.*\.so", name) for name in names)


def test_services_of_the_compose_file():
    compose = read_yaml("compose.yaml")
    for service in compose["services"].values():
        assert service["build"]["target"] == "${TARGET:-cpu}"
        assert (service["shm_size"], service["init"]) == ("8gb", True)
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["view"]["ports"])


@pytest.mark.parametrize("target", [slow("cpu"), slow("cuda")])
def test_the_image_builds_and_starts(target):
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("needs docker and its daemon")
    tag = f"verl-test:{target}"
    ran(docker, "build", "--target", target, "-t", tag, ".", cwd=ROOT, timeout=3600)
    output = subprocess.run([docker, "run", "--rm", tag, "doctor"], capture_output=True, text=True, timeout=300)
    assert f"torch {PINNED['torch']}" in output.stdout
