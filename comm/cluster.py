"""The processes of one run, one a machine, started by mpirun or srun: what they tell each other.

    gather    every process gives a value and gets all of them; everything else is made of it
    share     an array from the process that has it to all

What passes in a step goes another way (wire.py); this is for what lies around it: settings,
results, signals, checkpoints. All processes go through the same calls in the same order.

An error is told through the gather that the others come to: then one process says it and all end
with its exit code. If they do not come (they are in the middle of a step, or dead), the process
says its error itself, and MPI ends the others. Whoever dies without a word is seen by the launcher.
"""

import atexit
import contextlib
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmq_nb.comm.wire import NoWire, Wire
from llmq_nb.core.errors import EXIT_FAILURE, EXIT_USER, UserError

T = TypeVar("T")
JOIN_SECONDS = 3.0
"""That a failed process waits for the others to take notice by themselves."""
UNWIND_SECONDS = 4.0
"""That it then has for cleaning up, before it ends them in any case."""
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables with a process's number."""
LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")
"""Variables by which MPI's launchers show themselves; without one nothing of MPI is loaded."""


class Ended(SystemExit):
    """Another process failed and says so: this one ends with the same exit code, in silence."""


class Post(Protocol):
    """How bytes get from process to process (`mpi.py`). index: of `size` processes."""

    index: int
    size: int

    def gather(self, status: int, data: bytes, seconds: float | None = None) -> Sequence[bytes]:
        """The data of all processes, in their order. status: 0, or the exit code of a failed one.

        Raises Failed where a process gave another status, TimeoutError where not all processes came
        within `seconds`.
        """
        ...

    def broadcast(self, array: NDArray[np.uint8], root: int) -> None:
        """Fill the array of all others with that of process `root`."""
        ...

    def wire(self, ranks: int) -> Wire:
        """Between host memories. ranks: of each machine."""
        ...

    def abort(self, code: int) -> None:
        """End all processes, this one too."""
        ...


class Failed(Exception):
    """Processes failed. codes: exit codes by process, of those that did."""

    def __init__(self, codes: Mapping[int, int]) -> None:
        self.codes = dict(codes)
        super().__init__(f"processes failed: {self.codes}")


class Cluster:
    """This process among all of the run; one alone (`Cluster()`) gives and gets its own values."""

    def __init__(self, post: Post | None = None, name: str = "") -> None:
        """name: of the machine, for errors."""
        self._post, self.name = post, name
        self.index, self.size = (0, 1) if post is None else (post.index, post.size)
        self._amid = False
        """Whether a gather was begun and not ended: a signal cut it short."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.index == 0

    @property
    def several(self) -> bool:
        """Whether there is another one."""
        return self.size > 1

    def gather(self, value: T) -> list[T]:
        """Every process's value, in their order. Raises Ended where one has failed."""
        if self._post is None:
            return [value]
        self._amid = True
        try:
            found = self._post.gather(0, pickle.dumps(value))
        except Failed as failed:
            self._amid = False
            raise Ended(_code(failed.codes)) from None
        self._amid = False
        return [pickle.loads(data) for data in found]

    def first(self, work: Callable[[], T]) -> T:
        """The first process does it; all get the result."""
        value: Any = work() if self.leads else None
        return self.gather(value)[0]

    def share(self, array: NDArray[Any], owner: int) -> NDArray[Any]:
        """The array of process `owner`. array: what others give has its shape and format."""
        if self._post is None:
            return array
        out = np.ascontiguousarray(array)
        if out.size:
            self._post.broadcast(out.reshape(-1).view(np.uint8), owner)
        return out

    def wire(self, ranks: int) -> Wire:
        """To the other machines' host memories. ranks: of each machine."""
        return NoWire() if self._post is None else self._post.wire(ranks)

    def local(self, ranks: int) -> range:
        """The numbers of this machine's ranks. ranks: of each machine."""
        return range(self.index * ranks, (self.index + 1) * ranks)

    def same(self, what: str, value: Any, mend: str) -> None:
        """Raise UserError where a machine has another value than the first one."""
        found = self.gather((self.name, value))
        for name, other in found:
            if other != found[0][1]:
                line = f"{what}: {other} on {name}, {found[0][1]} on {found[0][0]}"
                raise UserError(line, where="several machines", mend=mend)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Work in which an error of one process is all processes' end; the outermost is the one
        that counts. The errors that this process is to say come out as they are."""
        try:
            yield
            self.gather(None)  # an error of another one, after this one's last word
        except Ended:
            raise
        except BaseException as error:
            if self._post is not None and self.several and not hasattr(error, "told"):
                self._tell(self._post, error)
            raise

    def _tell(self, post: Post, error: BaseException) -> None:
        """Let the others know. Raises Ended where another process says its error."""
        code = exit_code(error)
        try:
            if self._amid:  # the others would take another word for this one
                time.sleep(0.0 if self.leads else JOIN_SECONDS)  # the first one may be speaking
                raise TimeoutError
            post.gather(code, b"", JOIN_SECONDS)
        except Failed as failed:
            if min(failed.codes) != self.index:
                raise Ended(_code(failed.codes)) from None
        except TimeoutError:
            atexit.register(post.abort, code)  # after the error was said
            threading.Thread(target=_end, args=(post, error, code), daemon=True).start()
        error.told = True  # type: ignore[attr-defined]


def _end(post: Post, error: BaseException, code: int) -> None:
    """What a clean-up that hangs (a GPU that waits for another machine) does not stop."""
    time.sleep(UNWIND_SECONDS)
    traceback.print_exception(error)
    post.abort(code)


def _code(codes: Mapping[int, int]) -> int:
    """The exit code of the first process that failed."""
    return codes[min(codes)]


def exit_code(error: BaseException) -> int:
    """That of a process which ends by this error; never 0, which says that all is well."""
    if isinstance(error, UserError):
        return EXIT_USER
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or EXIT_FAILURE
    return 128 + 2 if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE


def open_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """The processes of the launcher that started this one; alone without a launcher.

    Raises UserError where there is a launcher and MPI cannot be used.
    """
    if not any(name in environment for name in LAUNCHERS):
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1:
            what = f"srun started {tasks} processes that cannot find each other"
            mend = "srun --mpi=pmi2 (or --mpi=pmix); srun --mpi=list shows all"
            raise _unless_said(environment, what, mend)
        return Cluster()
    sizes = [int(environment[name]) for name in LAUNCHERS if name.endswith("SIZE") and name in
             environment]  # fmt: skip
    if sizes and max(sizes) == 1:
        return Cluster()
    try:
        from llmq_nb.comm.mpi import open_post
    except (ImportError, RuntimeError) as error:  # mpi4py is missing, or finds no MPI library
        what = f"a run of several processes needs mpi4py and MPI ({error})"
        raise _unless_said(environment, what, "pip install -e '.[cluster]'") from None
    post = open_post()
    if sizes and post.size != max(sizes):
        what = f"the launcher started {max(sizes)} processes, MPI knows {post.size}"
        mend = "use the mpirun of the MPI that mpi4py loads"
        raise _unless_said(environment, what, mend)
    if post.size == 1:
        return Cluster()
    return Cluster(post, socket.gethostname())


def _unless_said(environment: Mapping[str, str], what: str, mend: str) -> BaseException:
    """The error of all processes, which cannot speak to each other: the first one says it."""
    numbers = [environment[name] for name in RANKS if name in environment]
    return Ended(EXIT_USER) if numbers and numbers[0] != "0" else UserError(what, mend=mend)
