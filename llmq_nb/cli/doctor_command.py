"""`llmq-nb doctor`: what this machine has, and what is missing for what."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

PACKAGES = ("numba", "numba-cuda", "cuda-bindings", "cuda-core", "numpy", "ml-dtypes", "zarr")
GPU_PACKAGES = ("nvidia-nvvm", "nvidia-nvjitlink", "nvmath-python", "nvidia-cublas")


@click.command("doctor")
def command() -> None:
    """Versions, cores, memory, disk, NVIDIA driver and GPUs, what to install for them, and which
    GPUs copy from each other."""
    from llmq_nb.core.driver import find_driver, missing_packages
    from llmq_nb.core.files import free_bytes
    from llmq_nb.core.host import available_bytes
    from llmq_nb.core.sizes import format_bytes

    click.echo(f"llmq-nb {_version('llmq-nb')}, Python {platform.python_version()}, {_system()}")
    for name in (*PACKAGES, *GPU_PACKAGES):
        click.echo(f"  {name:16} {_version(name)}")
    cores = len(os.sched_getaffinity(0))
    memory, disk = format_bytes(available_bytes() or 0), format_bytes(free_bytes(Path.cwd()))
    click.echo(f"cores {cores}, memory available {memory}, disk free {disk}")
    driver = find_driver()
    if driver is None:
        click.echo("no NVIDIA GPU or driver: training runs on the cpu")
        return
    click.echo(f"NVIDIA driver for CUDA {driver.cuda}: {', '.join(driver.devices)}")
    missing = missing_packages(driver)
    if not missing and len(driver.devices) > 1:
        _peers(len(driver.devices))
    if missing:
        click.echo(f"missing for the GPU: {', '.join(missing)}: pip install -e '.[{driver.extra}]'")


def _peers(count: int) -> None:
    """Which GPU copies from which itself; opens them all."""
    from llmq_nb.comm.topology import check_peers, matrix_lines
    from llmq_nb.core.device import open_device
    from llmq_nb.core.errors import MachineError, UserError

    try:
        matrix = check_peers([open_device(i) for i in range(count)], announce=click.echo)
    except (MachineError, UserError) as error:  # such as a GPU that is full, or too old
        click.echo(f"copies between GPUs were not tried: {error}")
        return
    click.echo("copies between GPUs (row takes from column)")
    for line in matrix_lines(matrix):
        click.echo(line)


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
