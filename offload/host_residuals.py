"""The residual stream at the blocks' inputs, kept on the host from forward to backward.

Each layer's residual is written into one of two staging buffers by turns, sent to the host after
forward's last use, and fetched a layer ahead of backward. The last two layers' residuals are still
in the buffers when backward begins with them: they never leave.
"""

from collections.abc import Mapping, Sequence

from llmq_nb.core.tensor import Tensor
from llmq_nb.offload.transfer import Copy, Transfer


class HostResiduals:
    """staging: the buffers, layer `l` uses the one of l modulo their number. copies: by layer."""

    def __init__(
        self, staging: Sequence[Tensor], copies: Mapping[int, tuple[Copy, ...]], transfer: Transfer
    ) -> None:
        self._staging, self._copies, self._transfer = staging, copies, transfer
        self._ready = [transfer.mark() for _ in staging]
        self._sent = [transfer.mark() for _ in staging]
        self.reset()

    def write(self, layer: int) -> None:
        """Forward is about to write the residual: wait until its place is empty."""
        turn = layer % len(self._staging)
        if self._sending[turn]:
            self._transfer.wait(self._sent[turn])

    def keep(self, layer: int) -> None:
        """Forward is done with it; backward will come back to it."""
        turn = layer % len(self._staging)
        if layer in self._copies:
            self._transfer.to_host(self._copies[layer], done=self._sent[turn])
            self._transfer.free(self._staging[turn])
            self._sending[turn] = True
        else:
            self._held[turn] = layer

    def gather(self, layer: int) -> None:
        """Start to bring it back; the layer above that had its place is released."""
        turn = layer % len(self._staging)
        if layer in self._copies and self._held[turn] != layer:
            assert self._held[turn] is None, f"layer {layer} needs the buffer of one in use"
            # it is on the host: the compute stream waited for that before it wrote layer + 2
            self._transfer.to_device(self._copies[layer], done=self._ready[turn])
            self._held[turn] = layer

    def get(self, layer: int) -> None:
        """Backward is about to read it: wait until it is there."""
        self.gather(layer)
        if layer in self._copies:
            self._transfer.wait(self._ready[layer % len(self._staging)])

    def release(self, layer: int) -> None:
        """Backward is done with it."""
        turn = layer % len(self._staging)
        self._held[turn] = None
        self._transfer.free(self._staging[turn])

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a backward."""
        return all(layer is None for layer in self._held)

    def reset(self) -> None:
        """Begin with nothing held or in flight."""
        self._held: list[int | None] = [None] * len(self._staging)
        self._sending = [False] * len(self._staging)
        self._transfer.reset()

    def finish(self) -> None:
        """End with nothing held or in flight."""
        assert self.idle, f"residuals of {self._held} are still held"
        self._transfer.join()
        self._sending = [False] * len(self._staging)
