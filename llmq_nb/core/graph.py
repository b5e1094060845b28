"""Record work on a stream once, replay it as a CUDA graph.

Everything that `record` launches on the stream, and on streams forked from it by events and joined
back, becomes one graph; nothing runs while recording. Kernels must be loaded before (launch.py
loads when a kernel is first asked for, so run the step once eagerly or call `kernel` for each).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq_nb.core.device import check, driver


@dataclass(slots=True)
class Graph:
    """An instantiated graph. Replays read and write the addresses that were recorded."""

    name: str
    executable: Any
    nodes: int

    def launch(self, stream: Any) -> None:
        """Replay in stream order (5 us of host time for 200 kernels, 57 us for 6000)."""
        check(driver().cuGraphLaunch(self.executable, stream), f"cuGraphLaunch of {self.name}")

    def upload(self, stream: Any) -> None:
        """Do the first launch's one-time work now."""
        check(driver().cuGraphUpload(self.executable, stream), f"cuGraphUpload of {self.name}")

    def close(self) -> None:
        """Free the executable graph; it must not be running."""
        if self.executable is not None:
            check(
                driver().cuGraphExecDestroy(self.executable), f"cuGraphExecDestroy of {self.name}"
            )
            self.executable = None


def capture(stream: Any, record: Callable[[], None], *, name: str) -> Graph:
    """The graph of what `record` launches on the stream.

    If it raises, the capture is ended, the stream is usable again and the exception is passed on.
    """
    d = driver()
    relaxed = (
        d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    )  # thread-local calls stay allowed
    check(d.cuStreamBeginCapture(stream, relaxed), f"cuStreamBeginCapture of {name}")
    try:
        record()
    except BaseException:
        status, graph = d.cuStreamEndCapture(stream)
        if int(status) == 0 and int(graph):
            d.cuGraphDestroy(graph)
        raise
    graph = check(d.cuStreamEndCapture(stream), f"cuStreamEndCapture of {name}")
    try:
        executable = check(d.cuGraphInstantiate(graph, 0), f"cuGraphInstantiate of {name}")
        nodes = check(d.cuGraphGetNodes(graph, 0), f"cuGraphGetNodes of {name}")[-1]
    finally:
        d.cuGraphDestroy(graph)
    return Graph(name, executable, int(nodes))
