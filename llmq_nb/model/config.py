"""The shape of a model: what `config.json` says, in the glossary's letters.

`llmq_nb.io.hf_config` reads and writes `config.json`; `llmq_nb.model.families` has the presets.
"""

import dataclasses
from typing import Literal

from llmq_nb.core.errors import UserError

Family = Literal["qwen2", "qwen3", "llama", "mistral"]
ALIGNMENT = 16
"""Products need M, N and K that are multiples of this."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope:
    """Llama 3's stretched rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    family: Family
    C: int
    """Hidden size."""
    F: int
    """Feed-forward size."""
    L: int
    """Layers."""
    H: int
    """Query heads."""
    G: int
    """Key/value heads; H is a multiple of G."""
    D: int
    """head_dim; H * D need not be C."""
    V: int
    """Vocabulary size of the files; products use `padded_vocab`."""
    tied: bool
    """The LM head is the embedding table."""
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    max_position: int = 2048
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of every query and key head, before RoPE."""
    init_std: float = 0.02
    """Standard deviation of random initial matrices."""
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.H % self.G:
            raise UserError(f"{self.H} query heads, {self.G} key/value heads", mend="must divide")
        for name, value in (
            ("hidden size", self.C),
            ("feed-forward size", self.F),
            ("head_dim", self.D),
        ):
            if value % ALIGNMENT:
                raise UserError(f"{name} {value}", mend=f"must be a multiple of {ALIGNMENT}")

    @property
    def padded_vocab(self) -> int:
        """V rounded up to a multiple of 16: the extra rows get no gradient, no export."""
        return -(-self.V // ALIGNMENT) * ALIGNMENT

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: queries, keys, values."""
        return (self.H + 2 * self.G) * self.D

    @property
    def attention_columns(self) -> int:
        """Columns of the attention output: H * D."""
        return self.H * self.D
