"""`verl doctor`: devices, packages, memory and disk of this machine, and problems with their fixes."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping

from verl.cli.machine.host import Facts
from verl.cli.parser import Parser

_ABOUT = "Report devices, torch build, engines, memory and disk of this machine, and problems with their fixes."


def run_doctor(argv: list[str]) -> int:
    """Print the report: the exit code, 1 if something fails."""
    parser = Parser(prog="verl doctor", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    arguments = parser.parse_args(argv)
    from verl.cli.machine.findings import findings
    from verl.cli.machine.host import host, links
    from verl.cli.machine.packages import packages
    from verl.cli.report import Report, info

    host_facts, versions = {**host(), "links": links()}, packages()
    lines = list(findings(host_facts, versions))
    if arguments.json:
        records = [{"level": line.level, "text": line.text} for line in lines]
        print(json.dumps({"host": host_facts, "packages": versions, "findings": records}, indent=2))
        return 1 if any(line.level == "fail" for line in lines) else 0
    report = Report()
    for topic, text in facts(host_facts, versions):
        report.add(topic, info(text))
    for line in lines:
        report.add("findings", line)
    return report.close("This machine can train", "This machine cannot train yet")


def facts(host: Facts, packages: Facts) -> list[tuple[str, str]]:
    """(topic, sentence) of every fact."""
    from verl.cli.machine.host import described

    torch, transformers = packages["torch_probe"], packages["transformers_probe"]
    limits = ", ".join(f"{name} {'unlimited' if v is None else v}" for name, v in host["limits"].items())
    engines = [f"{name} {version or 'not installed'}" for name, version in packages["optional"].items()]
    rows = [
        ("system", f"{host['system']}, {host['libc'] or 'libc unknown'}"),
        ("cpu", f"{host['cpu']}, {host['num_usable_cores']:g} of {host['num_cores']} cores usable"),
        ("cpu", f"instruction sets: {' '.join(host['cpu_flags']) or 'unknown'}"),
        ("memory", f"{_gib(host['available_memory_bytes'])} free of {_gib(host['memory_bytes'])}; "
                   f"swap {_gib(host['swap_bytes'])}; /dev/shm {_gib(host['shared_memory_bytes'])}"),
        ("disk", f"{_gib(host['free_disk_bytes'])} free here ({host['file_system']['kind'] or 'unknown file system'}), "
                 f"{_gib(host['free_temporary_bytes'])} for temporary files"),
        ("limits", limits or "unknown"),
        ("python", f"{packages['python']} at {packages['executable']}"
                   + ("" if packages["virtual_environment"] else ", outside a virtual environment")),
        ("python", f"others on the PATH: {', '.join(packages['other_pythons']) or 'none'}"),
        ("torch", _torch(torch)),
        ("cpu", f"decoding of plain decoders: {_decoder(packages['decoder_probe'])}"),
        ("cpu", _bfloat16(torch)),
        ("devices", _devices(torch, packages["driver"])),
        ("links", described(host["links"])),
        ("packages", f"transformers {_version(transformers)}"),
        ("packages", ", ".join(engines)),
        ("engines", _engines()),
        *(("names", text) for text in _engine_names(packages)),
    ]  # fmt: skip
    if host["environment"]:
        rows.append(("variables", ", ".join(f"{name}={value}" for name, value in host["environment"].items())))
    return rows


def _engines() -> str:
    try:
        from verl.engines.api import ENGINES as TRAINING
        from verl.rollout.api import ENGINES as ROLLOUT
    except ImportError as error:  # it has its own finding
        return f"unknown without the package {error.name}"
    return f"rollout {', '.join(ROLLOUT)} and training {', '.join(TRAINING)} come with verl"


def _engine_names(packages: Facts) -> Iterator[str]:
    """The names of each installed engine that verl uses, a line for each class, module or kind of name."""
    for package, ways in packages["engine_names"].items():
        for way, names in ways.items():
            groups: dict[str, list[str]] = {}
            for name, is_there in names.items():
                place, mark, rest = name.rpartition("." if "." in name.partition(":")[2] else ":")
                groups.setdefault(f"{place}{mark}", []).append(rest if is_there else f"{rest} (missing)")
            for place, members in groups.items():
                yield f"{package} {packages['optional'][package]} {way}: {place}{{{', '.join(members)}}}"


def _version(probe: Facts) -> str:
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'", probe.get("error", ""))
    if missing:
        return "not installed" if missing[1] == "transformers" else f"cannot be used without {missing[1]}"
    return str(probe.get("version", "broken"))


def _torch(torch: Facts) -> str:
    if "error" in torch:
        return f"cannot be imported: {torch['error']}"
    build = f"CUDA {torch['cuda_build']}" if torch["cuda_build"] else "no CUDA"
    speed = ", ".join(f"{name} {value:.0f}" for name, value in torch["gflops"].items())
    return f"{torch['version']}, built with {build}; {torch['num_threads']} threads; CPU GFLOP/s: {speed}"


def _decoder(probe: Mapping[str, object]) -> str:
    return f"compiled kernels for {probe['name']}, batch-invariant" if probe.get("name") else "torch"


def _bfloat16(torch: Facts) -> str:
    kinds = {"native": "native instructions", "widened": "widened to float32, which is faster on this CPU"}
    return "bfloat16 on this CPU: " + kinds.get(torch.get("bf16", ""), "unknown")


def _devices(torch: Facts, driver: Facts | None) -> str:
    devices = [
        f"{d['name']} ({_gib(d['memory_bytes'])}, compute capability {d['capability'][0]}.{d['capability'][1]})"
        for d in torch.get("devices", [])
    ]
    if torch.get("mps_available"):
        devices.append("an Apple GPU, unused by verl")
    driver_text = (
        f"; driver: {'; '.join(driver['gpus'])}, CUDA up to {driver['newest_cuda']}" if driver else "; no NVIDIA driver"
    )
    return (", ".join(devices) or "the CPU alone") + driver_text


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 30):.1f} GiB"
