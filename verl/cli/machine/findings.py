"""Findings from facts: problems and slow settings, each with its cause and fix, by a table of rules."""

from collections.abc import Iterator

from verl.cli.machine.host import Facts, advice
from verl.cli.machine.requirements import broken_sentence, numbers_of, unmet_sentence
from verl.cli.report import Line, fail, info, passed, warn
from verl.errors import install_command

_GIB = 1 << 30
_MIN_SHARED_MEMORY = 1 * _GIB
_MIN_FREE_DISK = 5 * _GIB
_MIN_MEMORY = 4 * _GIB
_MIN_OPEN_FILES = 1024


def findings(host: Facts, packages: Facts) -> Iterator[Line]:
    """Every warning and failure, or one line if there is none."""
    rules = (_requirements, _torch, _transformers, _cpu, _memory, _disk, _pythons)
    lines = [line for rule in rules for line in rule(host, packages)]
    lines += [*advice(host["links"]), *_engine_names(packages)]
    yield from lines or [passed("no problem for training in one process")]


def _requirements(host: Facts, packages: Facts) -> Iterator[Line]:
    if "verl" in packages["requirements"]:
        yield warn(
            "verl runs from a checkout without being installed, so its requirements were not checked. "
            "Install it: pip install -e ."
        )
    elif packages["requirements"]:
        yield fail(unmet_sentence(packages["requirements"]))


def _is_unmet(name: str, packages: Facts) -> bool:
    """Whether the line about requirements says already that the package is missing."""
    return any(text.startswith(name) and state == "not installed" for text, state in packages["requirements"].items())


def _torch(host: Facts, packages: Facts) -> Iterator[Line]:
    torch = packages["torch_probe"]
    if "error" in torch:
        if not _is_unmet("torch", packages):
            yield fail(broken_sentence("torch", torch["error"]))
        return
    driver = packages["driver"]
    if driver and not torch["cuda_available"]:
        if torch["cuda_build"] is None:
            yield warn(
                f"the machine has {driver['gpus'][0]}, but torch {torch['version']} is a build without CUDA, so the GPU "
                "is unused. Install a CUDA build of torch"
            )
        else:
            yield fail(
                f"torch {torch['version']} is built for CUDA {torch['cuda_build']}, and the driver supports up to CUDA "
                f"{driver['newest_cuda']}. Update the driver, or install a torch built for an older CUDA "
                "(CUDA_VISIBLE_DEVICES hides devices too)"
            )
    for device in torch["devices"]:
        if device["capability"] < [8, 0]:
            yield warn(
                f"{device['name']} has no bfloat16 arithmetic; dtype=auto computes in float32 there"
                + ", and fsdp_config.dtype=float16 on its tensor cores" * (device["capability"] >= [7, 0])
                + ". Attention holds all its scores, and generation has no CUDA graphs, which newer GPUs have"
            )
    if torch.get("hip_build") and torch["devices"]:
        yield warn(
            f"torch {torch['version']} is built for ROCm, where flash attention and graphs are not used: attention holds all "
            "its scores and the host drives every step of generation"
        )
    if torch["cuda_available"] and not torch.get("hip_build") and numbers_of(torch["version"]) < (2, 12):
        yield warn(
            f"the flash attention of torch {torch['version']} reads no pages, so that each row of generation takes the memory "
            "of its longest sequence. Install torch 2.12 or newer for pages"
        )


def _transformers(host: Facts, packages: Facts) -> Iterator[Line]:
    problem = packages["transformers_probe"].get("error")
    if "error" in packages["torch_probe"]:
        return
    broken = {name: facts["error"] for name, facts in packages["companions"].items() if "error" in facts}
    for name, cause in broken.items():
        effect = "and breaks transformers" if problem else "and may break transformers"
        yield Line(
            "fail" if problem else "warn",
            f"{name} does not fit this torch {effect}: {cause}. verl does not need it: pip uninstall -y {name}",
        )
    if problem and not broken and not _is_unmet("transformers", packages):
        yield fail(broken_sentence("transformers", problem))


def _cpu(host: Facts, packages: Facts) -> Iterator[Line]:
    torch = packages["torch_probe"]
    if torch.get("cuda_available") or "error" in torch:
        return
    speed = torch["gflops"]
    if speed["bfloat16"] < speed["float32"]:
        native = torch.get("bf16") == "native"
        yield info(
            f"this CPU multiplies bfloat16 at {speed['bfloat16']:.0f} GFLOP/s and float32 at {speed['float32']:.0f}: "
            + (
                "fsdp_config.dtype=float32 may train faster than auto, which computes in bfloat16 here"
                if native
                else "leave fsdp_config.dtype=auto, which computes in float32 here"
            )
        )
    decoder = packages["decoder_probe"]
    if "error" in decoder:
        yield warn(f"the decoding kernels cannot be used: {decoder['error']}")
    elif not decoder["compiled"] and "avx2" in host["cpu_flags"]:
        yield warn(
            "the decoding kernels of this CPU were not compiled, so rollouts are slower and may depend on their batch. "
            "Install a C compiler (Debian and Ubuntu: apt install gcc) and reinstall verl"
        )
    if torch["num_threads"] < int(host["num_usable_cores"]):
        yield warn(
            f"torch uses {torch['num_threads']} of {host['num_usable_cores']:g} cores. Unset OMP_NUM_THREADS, or set it "
            f"to {int(host['num_usable_cores'])}"
        )
    if host["cpu_flags"] and not {"avx2", "asimd"} & set(host["cpu_flags"]):
        yield warn("the CPU has no AVX2, so training will be very slow")


def _memory(host: Facts, packages: Facts) -> Iterator[Line]:
    if host["available_memory_bytes"] < _MIN_MEMORY:
        yield warn(
            f"{host['available_memory_bytes'] / _GIB:.1f} GiB of memory are free; training a model of 135 million "
            "parameters needs about 4"
        )
    if host["shared_memory_bytes"] is not None and host["shared_memory_bytes"] < _MIN_SHARED_MEMORY:
        yield warn(
            f"/dev/shm has {host['shared_memory_bytes'] / (1 << 20):.0f} MiB: enough for one process, too little for "
            "several. In a container start it with --shm-size=8g"
        )
    if host["free_disk_bytes"] is not None and host["free_disk_bytes"] < _MIN_FREE_DISK:
        yield warn(
            f"{host['free_disk_bytes'] / _GIB:.1f} GiB of disk are free here; set trainer.default_local_dir to a larger one"
        )
    open_files = host["limits"].get("nofile")
    if open_files is not None and open_files < _MIN_OPEN_FILES:
        yield warn(f"only {open_files} open files are allowed. Raise it: ulimit -n 65536")
    if host["limits"].get("as") is not None:
        yield warn("the address space is limited (ulimit -v), which torch may exceed. Raise it: ulimit -v unlimited")


def _disk(host: Facts, packages: Facts) -> Iterator[Line]:
    file_system = host["file_system"]
    for refusal in file_system["refusals"]:
        yield warn(
            f"the current folder cannot hold checkpoints: {refusal}. Set trainer.default_local_dir to another disk"
        )
    for notice in file_system["notices"]:
        yield info(f"the current folder: {notice}")


def _pythons(host: Facts, packages: Facts) -> Iterator[Line]:
    if not packages["virtual_environment"] and packages["other_pythons"]:
        yield warn(
            f"this is {packages['executable']}, outside a virtual environment, and there are also "
            f"{', '.join(packages['other_pythons'])}: pip may belong to another one. Make one: python -m venv .venv"
        )


def _engine_names(packages: Facts) -> Iterator[Line]:
    for package, ways in packages["engine_names"].items():
        for way, names in ways.items():
            if missing := [name for name, is_there in names.items() if not is_there]:
                yield warn(
                    f"{package} {packages['optional'][package]} has no {', '.join(missing)}, which verl uses {way}. Install "
                    f"a version that verl was tried with: {install_command(package, package)}"
                )
