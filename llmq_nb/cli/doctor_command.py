"""`llmq-nb doctor`: what this machine has, and what is missing for what."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import click

PACKAGES = ("numba", "numba-cuda", "cuda-bindings", "cuda-core", "numpy", "ml-dtypes", "zarr")
GPU_PACKAGES = ("nvidia-nvvm", "nvidia-nvjitlink", "nvmath-python", "nvidia-cublas")


@click.command("doctor")
def command() -> None:
    """Versions, cores, memory, disk, NVIDIA driver and GPUs, and what to install for them."""
    from llmq_nb.core.driver import find_driver, missing_packages

    click.echo(f"llmq-nb {version('llmq-nb')}, Python {platform.python_version()}, {_system()}")
    for name in (*PACKAGES, *GPU_PACKAGES):
        click.echo(f"  {name:16} {_version(name)}")
    cores = len(os.sched_getaffinity(0))
    free = shutil.disk_usage(".").free / 2**30
    click.echo(f"cores {cores}, memory available {_available():.1f} GiB, disk free {free:.1f} GiB")
    driver = find_driver()
    if driver is None:
        click.echo("no NVIDIA GPU or driver: training runs on the cpu")
        return
    click.echo(f"NVIDIA driver for CUDA {driver.cuda}: {', '.join(driver.devices)}")
    missing = missing_packages(driver)
    if missing:
        click.echo(f"missing for the GPU: {', '.join(missing)}: pip install -e '.[{driver.extra}]'")


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _available() -> float:
    """MemAvailable in GiB; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return 0.0
