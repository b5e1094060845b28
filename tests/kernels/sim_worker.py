"""The process that harness.run_sim talks to: runs check functions in the CUDA simulator."""

import importlib.util
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from types import ModuleType

from tests.kernels.harness import SimulatedDevice

_modules: dict[str, ModuleType] = {}


def load(path: str) -> ModuleType:
    """The test module at a path, imported once."""
    if path not in _modules:
        spec = importlib.util.spec_from_file_location(f"simulated_{len(_modules)}", path)
        assert spec and spec.loader
        _modules[path] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = _modules[path]
        spec.loader.exec_module(_modules[path])
    return _modules[path]


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # device integers wrap
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            path, name, kwargs = connection.recv()
        except EOFError:
            return
        device = SimulatedDevice()
        try:
            getattr(load(path), name)(device, **kwargs)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
        finally:
            device.close()


if __name__ == "__main__":
    main()
